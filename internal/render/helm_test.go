package render_test

import (
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"helm.sh/helm/v4/pkg/chart/common"
	chartvalues "helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	chartutil "helm.sh/helm/v4/pkg/chart/v2/util"
	"helm.sh/helm/v4/pkg/engine"
	helmrelease "helm.sh/helm/v4/pkg/release/v1"
	releaseutil "helm.sh/helm/v4/pkg/release/v1/util"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/render"
)

// byHelm returns the hooks and the manifest that Helm makes of a request.
func byHelm(t *testing.T, chartRequest render.ChartRequest) ([]*helmrelease.Hook, []releaseutil.Manifest) {
	t.Helper()
	loaded, err := loader.LoadFile(chartRequest.Chart.Path)
	if err != nil {
		t.Fatal(err)
	}
	if err := chartutil.ProcessDependencies(loaded, chartRequest.Values); err != nil {
		t.Fatal(err)
	}
	capabilities := common.DefaultCapabilities.Copy()
	version, err := common.ParseKubeVersion(chartRequest.KubeVersion)
	if err != nil {
		t.Fatal(err)
	}
	capabilities.KubeVersion = *version
	release := common.ReleaseOptions{Name: chartRequest.Name, Namespace: chartRequest.Namespace, Revision: 1, IsInstall: true}
	full, err := chartvalues.ToRenderValues(loaded, chartRequest.Values, release, capabilities)
	if err != nil {
		t.Fatal(err)
	}
	texts, err := engine.Render(loaded, full)
	if err != nil {
		t.Fatal(err)
	}
	maps.DeleteFunc(texts, func(path, _ string) bool { return strings.HasSuffix(path, "NOTES.txt") })
	hooks, manifest, err := releaseutil.SortManifests(texts, nil, releaseutil.InstallOrder)
	if err != nil {
		t.Fatal(err)
	}
	return hooks, manifest
}

// wantAsHelm compares objects with a manifest of Helm.
func wantAsHelm(t *testing.T, what, manifest string, got []*unstructured.Unstructured) {
	t.Helper()
	want, err := kube.DecodeLenient([]byte(manifest))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("%s differs from Helm's (-want +got):\n%s", what, diff)
	}
}

func TestReleaseEqualsReleaseOfHelm(t *testing.T) {
	t.Parallel()
	quoted := hooked()
	for name, text := range quoted.Files {
		text = strings.ReplaceAll(text, "retries: 3, note: ", "retries: '3', note: ''") // Helm leaves these to the API server
		quoted.Files[name] = strings.ReplaceAll(text, "weight: 5", "weight: '5'")
	}
	for name, chart := range map[string]examples.Chart{"example": {}, "hooks": quoted} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			chartRequest := request(t, chart)
			chartRequest.Values = values(t, "replicas: 3\ngreeting: {language: it}\n")
			wantHooks, wantManifest := byHelm(t, chartRequest)
			got := rendered(t, render.NewCharts(pool), chartRequest)
			var manifest, hooks, paths []string
			for _, text := range wantManifest {
				manifest, paths = append(manifest, text.Content), append(paths, text.Name)
			}
			for _, hook := range wantHooks {
				hooks, paths = append(hooks, hook.Manifest), append(paths, hook.Path)
			}
			first := len(got.Objects) - len(hooks) // of the hooks; there is one CRD
			wantAsHelm(t, "the manifest", strings.Join(manifest, "\n---\n"), got.Objects[1:first])
			wantAsHelm(t, "the list of hooks", strings.Join(hooks, "\n---\n"), got.Objects[first:])
			if diff := cmp.Diff(paths, got.Paths[1:]); diff != "" {
				t.Errorf("paths differ from Helm's (-want +got):\n%s", diff)
			}
		})
	}
}
