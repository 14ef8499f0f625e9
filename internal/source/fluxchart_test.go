package source_test

import (
	"maps"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v4/pkg/chart/v2/loader"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/source"
)

// fluxChartFiles returns a repository with one chart in charts/web.
func fluxChartFiles() map[string]string {
	return map[string]string{
		"README.md":                               "r",
		"charts/web/Chart.yaml":                   "apiVersion: v2\nname: web\nversion: 1.2.3\nappVersion: \"7\"\ndependencies: [{name: db, version: 1.0.0, repository: \"https://example.com\"}]\n",
		"charts/web/.helmignore":                  "*.bak\n",
		"charts/web/values.yaml":                  "a: 1\n",
		"charts/web/values.yaml.bak":              "secret",
		"charts/web/templates/configmap.yaml":     "kind: ConfigMap\n",
		"charts/web/charts/db/Chart.yaml":         "apiVersion: v2\nname: db\nversion: 1.0.0\n",
		"charts/web/charts/db/templates/one.yaml": "kind: Secret\n",
	}
}

func fluxChart(version string) configv1beta1.HelmChart {
	return configv1beta1.HelmChart{RepositoryURL: "gitrepository://eu/app/charts/web", ChartVersion: version, ReleaseName: "web", ReleaseNamespace: "web"}
}

// packageChart packages the chart of a Flux source with files.
func packageChart(t *testing.T, charts *source.Charts, chart configv1beta1.HelmChart, files map[string]string) (source.Chart, error) {
	t.Helper()
	h := newFluxHub(t)
	h.publish("one", tarball(t, files))
	ref, directory, err := source.ResolveChartSource(chart, templateContext())
	if err != nil || ref != app || directory != "charts/web" {
		t.Fatalf("ResolveChartSource() = %v, %q, %v", ref, directory, err)
	}
	return charts.Package(t.Context(), chart, h.contents().Artifacts, templateContext())
}

func TestChartOfAFluxSource(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	charts := newCharts(t, dir)
	first, err := packageChart(t, charts, fluxChart(""), fluxChartFiles())
	if err != nil {
		t.Fatal(err)
	}
	if first.Name != "web" || first.Version != "1.2.3" || first.AppVersion != "7" {
		t.Errorf("got %+v", first)
	}
	loaded, err := loader.LoadFile(first.Path)
	if err != nil {
		t.Fatal(err)
	}
	if err := loaded.Validate(); err != nil || len(loaded.Dependencies()) != 1 || len(loaded.Templates) != 1 {
		t.Errorf("got %d dependencies and %d templates, %v", len(loaded.Dependencies()), len(loaded.Templates), err)
	}
	var names []string
	for _, file := range loaded.Raw {
		names = append(names, file.Name)
	}
	want := []string{".helmignore", "Chart.yaml", "charts/db/Chart.yaml", "charts/db/templates/one.yaml", "templates/configmap.yaml", "values.yaml"}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("files of the archive (-want +got):\n%s", diff)
	}
	other := fluxChartFiles()
	other["README.md"] = "changed"
	for name, charts := range map[string]*source.Charts{"another revision": charts, "another directory": newCharts(t, t.TempDir()), "after a restart": newCharts(t, dir)} {
		again, err := packageChart(t, charts, fluxChart(""), other)
		if err != nil || again.Digest != first.Digest {
			t.Errorf("%s with the same chart: got digest %s, %v, want %s", name, again.Digest, err, first.Digest)
		}
	}
	other["charts/web/values.yaml"] = "a: 2\n"
	if changed, err := packageChart(t, charts, fluxChart(">= 1.2"), other); err != nil || changed.Digest == first.Digest {
		t.Errorf("a changed chart: got the same archive, %v", err)
	}
	if rest, err := os.ReadDir(dir); err != nil || len(rest) != 5 { // two archives, and an entry for each revision
		t.Errorf("got %d files in the directory, %v", len(rest), err)
	}
}

func TestChartOfAFluxSourceThatIsNotValid(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		files   map[string]string
		version string
		want    string
	}{
		"another version":    {nil, "2.x", "has chart web 1.2.3, and the profile wants chartVersion 2.x"},
		"no version":         {nil, "latest", `chartVersion "latest"`},
		"no chart":           {map[string]string{"charts/web/Chart.yaml": ""}, "", `GitRepository eu/app: chart in "charts/web"`},
		"missing dependency": {map[string]string{"charts/web/charts/db/Chart.yaml": "", "charts/web/charts/db/templates/one.yaml": ""}, "", "its dependencies are not in its directory charts: db"},
		"broken Chart.yaml":  {map[string]string{"charts/web/Chart.yaml": "name: [web\n"}, "", `GitRepository eu/app: chart in "charts/web": cannot load Chart.yaml`},
	} {
		files := fluxChartFiles()
		maps.Copy(files, test.files)
		maps.DeleteFunc(files, func(_, text string) bool { return text == "" })
		_, err := packageChart(t, newCharts(t, t.TempDir()), fluxChart(test.version), files)
		t.Run(name, func(t *testing.T) { wantInvalid(t, err, test.want) })
	}
	// A tar archive can have a file and a directory with the same name.
	files := fluxChartFiles()
	files["charts/web/templates"] = "a file"
	_, err := packageChart(t, newCharts(t, t.TempDir()), fluxChart(""), files)
	wantTexts(t, err, `GitRepository eu/app: chart in "charts/web": charts/web/templates/configmap.yaml: mkdir a file: not a directory`)
	chart := fluxChart("")
	for url, want := range map[string]string{
		"gitrepository://app":           `repositoryURL "gitrepository://app" is not gitrepository://<namespace>/<name>/<path>`,
		"bucket:///app/charts":          `repositoryURL "bucket:///app/charts" is not bucket://<namespace>/<name>/<path>`,
		"ocirepository://{{ .No }}/app": "repositoryURL",
	} {
		chart.RepositoryURL = url
		_, _, err := source.ResolveChartSource(chart, templateContext())
		wantInvalid(t, err, want)
	}
	restricted := templateContext()
	restricted.RestrictedNamespace = "us"
	_, _, err = source.ResolveChartSource(fluxChart(""), restricted)
	wantInvalid(t, err, "GitRepository eu/app: a Profile reads its own namespace us only")
}
