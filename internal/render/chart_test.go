package render_test

import (
	"context"
	"errors"
	"flag"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/yaml"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/source"
)

var update = flag.Bool("update", false, "write the golden files anew")

// fetched returns a chart as it comes from a repository.
func fetched(t *testing.T, chart examples.Chart) source.Chart {
	t.Helper()
	repository, err := examples.Repository(chart)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(repository)
	defer server.Close()
	charts, err := source.NewCharts(t.TempDir(), clocktesting.NewFakePassiveClock(time.Unix(0, 0)))
	if err != nil {
		t.Fatal(err)
	}
	name := chart.Name
	if name == "" {
		name = "hello"
	}
	for range 30 {
		got, err := charts.Fetch(t.Context(), configv1beta1.HelmChart{RepositoryURL: server.URL, ChartName: name, ChartVersion: ">=0-0"}, source.Login{}, source.Verification{}, nil)
		if err == nil {
			return got
		}
		pending, ok := errors.AsType[*source.PendingError](err)
		if !ok {
			t.Fatal(err)
		}
		<-time.After(pending.After) // a busy machine sends a large chart slowly
	}
	t.Fatal("the chart is not fetched")
	return source.Chart{}
}

// request returns a request for a release of chart on a cluster with Kubernetes 1.36.
func request(t *testing.T, chart examples.Chart) render.ChartRequest {
	t.Helper()
	return render.ChartRequest{
		Chart:       fetched(t, chart),
		Name:        "web",
		Namespace:   "site",
		KubeVersion: "v1.36.3",
		APIVersions: []string{"v1", "apps/v1", "apps/v1/Deployment"},
	}
}

// rendered returns the release that charts makes of a request.
func rendered(t *testing.T, charts *render.Charts, chartRequest render.ChartRequest) render.Release {
	t.Helper()
	release, err := charts.Render(t.Context(), chartRequest)
	if err != nil {
		t.Fatal(err)
	}
	return release
}

func withTemplate(text string) examples.Chart {
	return examples.Chart{Files: map[string]string{"templates/added.yaml": text}}
}

func TestRenderGolden(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*render.ChartRequest){
		"defaults": func(*render.ChartRequest) {},
		"values": func(r *render.ChartRequest) {
			r.Values = values(t, "replicas: 3\nmessage: Hi\ngreeting: {language: it}\n")
		},
		"no-subchart":    func(r *render.ChartRequest) { r.Values = values(t, "greeting: {enabled: false}\n") },
		"no-crds":        func(r *render.ChartRequest) { r.SkipCRDs = true },
		"vendor-version": func(r *render.ChartRequest) { r.KubeVersion = "v1.31.6+k3s1" },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			chartRequest := request(t, examples.Chart{})
			change(&chartRequest)
			golden(t, name, rendered(t, render.NewCharts(pool), chartRequest).Objects)
		})
	}
}

func golden(t *testing.T, name string, objects []*unstructured.Unstructured) {
	t.Helper()
	var got strings.Builder
	for _, object := range objects {
		raw, err := yaml.Marshal(object.Object)
		if err != nil {
			t.Fatal(err)
		}
		got.WriteString("---\n" + string(raw))
	}
	file := filepath.Join("testdata", name+".yaml")
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got.String()); diff != "" {
		t.Errorf("%s differs (-want +got):\n%s", file, diff)
	}
}

func values(t *testing.T, text string) map[string]any {
	t.Helper()
	parsed, err := render.Values(text, nil, source.TemplateContext{})
	if err != nil {
		t.Fatal(err)
	}
	return parsed
}

// manyObjects returns a chart with two templates that each have fewer than kube.MaxObjects objects, but not together.
func manyObjects() examples.Chart {
	list := `{"apiVersion":"v1","kind":"List","items":[{{ range 12000 }}{"apiVersion":"v1","kind":"Secret","metadata":{"name":"s{{ . }}"}},{{ end }}]}`
	return examples.Chart{Files: map[string]string{"templates/a.yaml": list, "templates/b.yaml": list}}
}

func TestRenderErrorsNameTheChartAndThePlace(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		chart  examples.Chart
		change func(*render.ChartRequest)
		want   []string
	}{
		"schema":           {change: func(r *render.ChartRequest) { r.Values = values(t, "replicas: many\n") }, want: []string{"render chart hello 0.1.0", "at '/replicas': got string, want integer"}},
		"subchart schema":  {change: func(r *render.ChartRequest) { r.Values = values(t, "greeting: {language: xx}\n") }, want: []string{"greeting: - at '/language': value must be one of"}},
		"template":         {chart: withTemplate("{{ fail \"not like this\" }}"), want: []string{"render chart hello 0.1.0", "hello/templates/added.yaml", "not like this"}},
		"many objects":     {chart: manyObjects(), want: []string{"render chart hello 0.1.0: it renders to more than 20000 objects"}},
		"missing value":    {chart: withTemplate("a: {{ .Values.nothing.here }}"), want: []string{"hello/templates/added.yaml:1"}},
		"broken YAML":      {chart: withTemplate(object("ConfigMap", "a") + "data: [\n"), want: []string{"hello/templates/added.yaml, document 1, line 5"}},
		"no kind":          {chart: withTemplate("apiVersion: v1\n"), want: []string{"hello/templates/added.yaml, document 1, line 1: it has no kind"}},
		"library":          {chart: examples.Chart{Files: map[string]string{"Chart.yaml": "apiVersion: v2\nname: hello\nversion: 0.1.0\ntype: library\n"}}, want: []string{"of type library"}},
		"missing subchart": {chart: examples.Chart{Files: map[string]string{"Chart.yaml": "apiVersion: v2\nname: hello\nversion: 0.1.0\ndependencies: [{name: other, version: 1.0.0}]\n"}}, want: []string{"chart hello 0.1.0: its archive lacks the subchart other"}},
		"other Kubernetes": {change: func(r *render.ChartRequest) { r.KubeVersion = "v1.20.0" }, want: []string{"chart hello 0.1.0 is for Kubernetes >=1.25.0-0, but the cluster has v1.20.0"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			chartRequest := request(t, test.chart)
			if test.change != nil {
				test.change(&chartRequest)
			}
			_, err := render.NewCharts(pool).Render(t.Context(), chartRequest)
			wantInvalid(t, err, test.want...)
		})
	}
}

func TestRenderSeesTheMember(t *testing.T) {
	t.Parallel()
	chartRequest := request(t, withTemplate(`apiVersion: v1
kind: ConfigMap
metadata:
  name: seen
data:
  version: {{ .Capabilities.KubeVersion }}
  raw: {{ .Capabilities.KubeVersion.Version }}
  deployments: {{ .Capabilities.APIVersions.Has "apps/v1/Deployment" | quote }}
  own: {{ .Capabilities.APIVersions.Has "hello.examples.towline.dev/v1/Greeting" | quote }}
  others: {{ .Capabilities.APIVersions.Has "example.com/v1" | quote }}
  release: {{ .Release.Namespace }}/{{ .Release.Name }} {{ .Release.IsInstall }} {{ .Release.Service }}
  lookup: {{ lookup "v1" "Namespace" "" "" | len | quote }}
  dns: {{ getHostByName "localhost" | quote }}
`))
	chartRequest.KubeVersion = "v1.31.6+k3s1"
	objects := rendered(t, render.NewCharts(pool), chartRequest).Objects
	for _, object := range objects {
		if object.GetName() != "seen" {
			continue
		}
		want := map[string]any{
			"version": "v1.31.6", "raw": "v1.31.6+k3s1", "deployments": "true", "own": "true", "others": "false",
			"release": "site/web true Helm", "lookup": "0", "dns": "",
		}
		if diff := cmp.Diff(want, object.Object["data"]); diff != "" {
			t.Errorf("what the chart sees differs (-want +got):\n%s", diff)
		}
		return
	}
	t.Error("the template is missing")
}

func TestRenderOnceForEqualRequests(t *testing.T) {
	t.Parallel()
	chartRequest := request(t, examples.Chart{})
	charts := render.NewCharts(pool)
	var (
		mu       sync.Mutex // guards releases
		releases = map[*unstructured.Unstructured]bool{}
		group    sync.WaitGroup
	)
	ask := func(change func(*render.ChartRequest)) {
		mine := chartRequest
		change(&mine)
		release, err := charts.Render(t.Context(), mine)
		if err != nil {
			t.Error(err)
			return
		}
		mu.Lock()
		defer mu.Unlock()
		releases[release.Objects[0]] = true
	}
	for i := range 20 {
		group.Go(func() { ask(func(r *render.ChartRequest) { r.Owner = strconv.Itoa(i) }) })
	}
	group.Wait()
	ask(func(r *render.ChartRequest) { r.APIVersions = []string{"v1", "apps/v1", "example.com/v1"} }) // no template looks at it
	ask(func(r *render.ChartRequest) { r.Revision, r.IsUpgrade = 7, true })                           // nor at these
	if len(releases) != 1 {
		t.Errorf("got %d renderings, want one for all", len(releases))
	}
	ask(func(r *render.ChartRequest) { r.Name = "other" })
	ask(func(r *render.ChartRequest) { r.Values = values(t, "replicas: 2\n") })
	ask(func(r *render.ChartRequest) { r.KubeVersion = "v1.35.0" }) // the page shows it
	if len(releases) != 4 {
		t.Errorf("got %d renderings, want one for each of four different requests", len(releases))
	}
}

func TestRenderDistinguishesAPIsThatTheChartReads(t *testing.T) {
	t.Parallel()
	chartRequest := request(t, withTemplate(`{{ if .Capabilities.APIVersions.Has "example.com/v1" }}`+object("ConfigMap", "extra")+`{{ end }}`))
	charts := render.NewCharts(pool)
	without := rendered(t, charts, chartRequest)
	chartRequest.APIVersions = append(chartRequest.APIVersions, "example.com/v1")
	with := rendered(t, charts, chartRequest)
	if len(with.Objects) != len(without.Objects)+1 {
		t.Errorf("got %d objects with the API and %d without it, want one more", len(with.Objects), len(without.Objects))
	}
}

// TestMembersWithEqualCheckedAPIsShareARendering checks that members share a rendering unless they differ in API
// versions that templates pass to Has, as long as the chart reads nothing else of the list.
func TestMembersWithEqualCheckedAPIsShareARendering(t *testing.T) {
	t.Parallel()
	has := `{{ if .Capabilities.APIVersions.Has "a/v1" }}{{ if .Capabilities.APIVersions.Has "b/v1" }}` + object("ConfigMap", "ab") + `{{ end }}{{ end }}`
	for name, test := range map[string]struct {
		template string
		lists    []string
		want     int
	}{
		"Has":                    {has, []string{"v1", "v1 c/v1", "v1 b/v1", "v1 a/v1", "v1 a/v1 c/v1", "v1 a/v1 b/v1", "v1 b/v1 a/v1 c/v1"}, 3},
		"Has, and the list":      {has + `{{ if has "z/v1" .Capabilities.APIVersions }}{{ end }}`, []string{"v1", "v1 c/v1"}, 2},
		"Has, and the version":   {has + `{{ $version := .Capabilities.KubeVersion.Version }}`, []string{"v1", "v1 c/v1"}, 1},
		"Has of a variable":      {`{{ $c := .Capabilities }}{{ if $c.APIVersions.Has "a/v1" }}{{ end }}`, []string{"v1", "v1 c/v1"}, 2},
		"Has of own definitions": {`{{ if .Capabilities.APIVersions.Has "hello.examples.towline.dev/v1" }}` + object("ConfigMap", "own") + `{{ end }}`, []string{"v1", "v1 c/v1"}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			chartRequest, charts := request(t, withTemplate(test.template)), render.NewCharts(pool)
			releases := map[*unstructured.Unstructured]bool{}
			for _, list := range test.lists {
				chartRequest.APIVersions = strings.Fields(list)
				shared := rendered(t, charts, chartRequest)
				releases[shared.Objects[0]] = true
				alone := rendered(t, render.NewCharts(pool), chartRequest)
				if diff := cmp.Diff(alone.Objects, shared.Objects); diff != "" {
					t.Errorf("%s: differs from a rendering for this member alone (-alone +shared):\n%s", list, diff)
				}
			}
			if len(releases) != test.want {
				t.Errorf("%d renderings for %d members, want %d", len(releases), len(test.lists), test.want)
			}
		})
	}
}

func TestRenderBigRelease(t *testing.T) {
	t.Parallel()
	chartRequest := request(t, examples.Chart{})
	chartRequest.Values = values(t, "filler: {count: 60, size: 100000}\n")
	objects := rendered(t, render.NewCharts(pool), chartRequest).Objects
	size := 0
	for _, object := range objects {
		text, _, _ := unstructured.NestedString(object.Object, "data", "filler")
		size += len(text)
	}
	if size < 5<<20 {
		t.Errorf("got %d bytes, want more than 5 MiB", size)
	}
}

func TestRenderNeedsTheVersion(t *testing.T) {
	t.Parallel()
	chartRequest := request(t, examples.Chart{})
	chartRequest.KubeVersion = ""
	if _, err := render.NewCharts(pool).Render(t.Context(), chartRequest); err == nil || !strings.Contains(err.Error(), "not known yet") {
		t.Errorf("got %v, want an error about the version", err)
	}
}

func TestRenderNeedsTheAPIsThatTheChartReads(t *testing.T) {
	t.Parallel()
	guard := `{{ if .Capabilities.APIVersions.Has "example.com/v1" }}a{{ end }}`
	for name, test := range map[string]struct {
		chart  examples.Chart
		values string
		want   string
	}{
		"the templates": {chart: withTemplate(guard), want: "not known yet"},
		"the values":    {values: guard, want: "not known yet"},
		"nothing":       {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			chartRequest := request(t, test.chart)
			chartRequest.APIVersions = nil
			if test.values != "" {
				chartRequest.Values = map[string]any{"greeting": test.values}
			}
			_, err := render.NewCharts(pool).Render(t.Context(), chartRequest)
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("got error %v, want %q in it", err, test.want)
			}
		})
	}
}

func TestRenderEndsWithItsContext(t *testing.T) {
	t.Parallel()
	chartRequest := request(t, withTemplate("{{ range until 30000000 }}{{ end }}"))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := render.NewCharts(pool).Render(ctx, chartRequest); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want the end of the context", err)
	}
}
