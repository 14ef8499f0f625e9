package release_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/release"
)

// TestManifestLacksCRDFiles checks that the manifest of a record has the objects of templates, and none of the crds
// directories.
func TestManifestLacksCRDFiles(t *testing.T) {
	t.Parallel()
	item := bundle.Item{Release: &bundle.Release{Name: "web", Namespace: "site"}}
	for _, path := range []string{
		"web/crds/a.yaml", "web/crds/sub/b.yaml", "web/crds/templates/c.yaml", "web/charts/db/crds/sub/d.yaml", "web/charts/db/charts/crds/crds/e.yaml",
		"web/templates/a.yaml", "web/templates/crds/b.yaml", "web/charts/db/templates/crds/c.yaml", "web/charts/crds/templates/d.yaml",
		"crds/templates/e.yaml",
	} {
		item.Objects = append(item.Objects, &unstructured.Unstructured{Object: map[string]any{"kind": "ConfigMap"}})
		item.Release.Data.Paths = append(item.Release.Data.Paths, path)
	}
	record, err := release.NewRecord(item, 1)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range strings.Lines(record.Manifest) {
		if source, ok := strings.CutPrefix(line, "# Source: "); ok {
			got = append(got, strings.TrimSpace(source))
		}
	}
	if diff := cmp.Diff(item.Release.Data.Paths[5:], got); diff != "" {
		t.Errorf("manifest differs (-want +got):\n%s", diff)
	}
}

// TestRecordHasTheDefaultValues checks that a record and the item that is deployed again from it have the values of the
// profile, and the default values of the chart.
func TestRecordHasTheDefaultValues(t *testing.T) {
	t.Parallel()
	item := bundle.Item{Release: &bundle.Release{Name: "web", Namespace: "site", Data: bundle.ReleaseData{
		Values: []byte(`{"replicas":3}`), Defaults: []byte(`{"image":"nginx","replicas":1}`),
	}}}
	record, err := release.NewRecord(item, 1)
	if err != nil {
		t.Fatal(err)
	}
	all, err := util.CoalesceValues(record.Chart, record.Config) // as `helm get values --all` does
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]any{"image": "nginx", "replicas": 3.0}, map[string]any(all)); diff != "" {
		t.Errorf("all values (-want +got):\n%s", diff)
	}
	again, err := (&release.StoredRecord{Release: record}).Item(t.Context(), bundle.ReleaseOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(item.Release.Data.Defaults), string(again.Release.Data.Defaults)); diff != "" {
		t.Errorf("default values of the item (-want +got):\n%s", diff)
	}
	before, err := item.RevisionDigest()
	if err != nil {
		t.Fatal(err)
	}
	item.Release.Data.Defaults = nil
	if after, err := item.RevisionDigest(); err != nil || after != before {
		t.Errorf("default values alone make a new revision: %s, %s, %v", before, after, err)
	}
}

func TestDefaultTimeoutIsHelms(t *testing.T) {
	t.Parallel()
	if got := (bundle.ReleaseOptions{}).TimeoutOrDefault(); got != 5*time.Minute {
		t.Errorf("default: got %s, want 5m", got)
	}
	if got := (bundle.ReleaseOptions{Timeout: time.Second}).TimeoutOrDefault(); got != time.Second {
		t.Errorf("got %s, want 1s", got)
	}
}
