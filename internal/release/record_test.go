package release_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
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
