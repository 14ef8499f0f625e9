package render_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/render"
)

// hook returns a Job with the annotations of a hook.
func hook(name, annotations string) string {
	return object("Job", name) + "  annotations: {" + annotations + "}\n"
}

// places lists kinds, names and template paths.
func places(release render.Release) []string {
	all := make([]string, 0, len(release.Objects))
	for i, object := range release.Objects {
		all = append(all, object.GetKind()+" "+object.GetName()+" "+release.Paths[i])
	}
	return all
}

// hooked has hooks of a chart and its subchart among objects of several kinds.
func hooked() examples.Chart {
	return examples.Chart{Files: map[string]string{
		"templates/added.yaml": strings.Join([]string{
			object("Zebra", "last"), object("Ape", "next"), hook("after", "helm.sh/hook: 'post-install, POST-UPGRADE', helm.sh/hook-weight: 5"),
			object("Namespace", "first"), hook("unknown", "helm.sh/hook: 'pre-install,before-lunch'"),
			hook("crd", "helm.sh/hook: crd-install"), object("ServiceAccount", "second"),
			object("Secret", "before") + "  annotations: {helm.sh/hook: pre-install, retries: 3, note: }\n",
			hook("probe", "helm.sh/hook: test-success"),
		}, "---\n"),
		"charts/greeting/templates/hook.yaml":  hook("sub", "helm.sh/hook: pre-delete"),
		"charts/greeting/templates/NOTES.txt":  "Greetings from {{ .Chart.Name }}.",
		"templates/nested/other/NOTES.txt":     "Not the notes of the chart.",
		"charts/greeting/templates/_part.yaml": "{{ define \"part\" }}no object{{ end }}",
	}}
}

func TestReleaseIsInHelmsOrder(t *testing.T) {
	t.Parallel()
	release := rendered(t, render.NewCharts(pool), request(t, hooked()))
	want := []string{
		"CustomResourceDefinition greetings.hello.examples.towline.dev hello/crds/greetings.yaml",
		"Namespace first hello/templates/added.yaml",
		"ServiceAccount second hello/templates/added.yaml",
		"ConfigMap web-greeting hello/charts/greeting/templates/configmap.yaml",
		"ConfigMap web-page hello/templates/configmap.yaml",
		"Service web hello/templates/service.yaml",
		"Deployment web hello/templates/deployment.yaml",
		"Ape next hello/templates/added.yaml",
		"Greeting web hello/templates/greeting.yaml",
		"Zebra last hello/templates/added.yaml",
		"Secret before hello/templates/added.yaml",
		"Job sub hello/charts/greeting/templates/hook.yaml",
		"Job after hello/templates/added.yaml",
		"Job probe hello/templates/added.yaml",
	}
	if diff := cmp.Diff(want, places(release)); diff != "" {
		t.Errorf("objects differ (-want +got):\n%s", diff)
	}
	annotations := map[string]map[string]string{}
	for _, object := range release.Objects {
		annotations[object.GetName()] = object.GetAnnotations()
	}
	wantAnnotations := map[string]map[string]string{
		"after":  {"helm.sh/hook": "post-install, POST-UPGRADE", "helm.sh/hook-weight": "5"},
		"before": {"helm.sh/hook": "pre-install", "retries": "3", "note": ""},
	}
	for name, want := range wantAnnotations {
		if diff := cmp.Diff(want, annotations[name]); diff != "" {
			t.Errorf("annotations of %s differ (-want +got):\n%s", name, diff)
		}
	}
}

func TestDisableHooksDropsHooksOnly(t *testing.T) {
	t.Parallel()
	charts := render.NewCharts(pool)
	chartRequest := request(t, hooked())
	all := rendered(t, charts, chartRequest)
	chartRequest.DisableHooks = true
	if diff := cmp.Diff(places(all)[:10], places(rendered(t, charts, chartRequest))); diff != "" {
		t.Errorf("objects differ (-want +got):\n%s", diff)
	}
}

func TestCRDsOfTheirDirectoryAreNoHooks(t *testing.T) {
	t.Parallel()
	crd := func(name, annotations string) string {
		return "apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\nmetadata:\n  name: " + name + "\n  annotations: {" + annotations + "}\n"
	}
	release := rendered(t, render.NewCharts(pool), request(t, examples.Chart{Files: map[string]string{
		"crds/a.yaml": crd("a", "helm.sh/hook: crd-install"), "crds/b.yaml": crd("b", "helm.sh/resource-policy: delete"),
	}}))
	got := map[string]map[string]string{}
	for _, object := range release.Objects[:2] {
		got[object.GetName()] = object.GetAnnotations()
	}
	want := map[string]map[string]string{"a": {"helm.sh/resource-policy": "keep"}, "b": {"helm.sh/resource-policy": "delete"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("annotations differ (-want +got):\n%s", diff)
	}
}

func TestRenderWithoutSchema(t *testing.T) {
	t.Parallel()
	chartRequest := request(t, examples.Chart{})
	chartRequest.Values, chartRequest.SkipSchemaValidation = values(t, "message: ''\n"), true
	rendered(t, render.NewCharts(pool), chartRequest)
}

func TestReleaseHasNotesAndMetadata(t *testing.T) {
	t.Parallel()
	charts := render.NewCharts(pool)
	chartRequest := request(t, hooked())
	chartRequest.Values = values(t, "message: Hi\n")
	release := rendered(t, charts, chartRequest)
	if got, want := strings.TrimSpace(release.Notes), "web says: Hi"; got != want {
		t.Errorf("notes: got %q, want %q", got, want)
	}
	var metadata unstructured.Unstructured
	metadata.Object = values(t, string(release.Chart))
	if got, _, _ := unstructured.NestedString(metadata.Object, "version"); got != "0.1.0" {
		t.Errorf("metadata: got %s, want version 0.1.0", release.Chart)
	}
	chartRequest.SubNotes = true
	want := "web says: Hi\n\nGreetings from greeting.\nNot the notes of the chart."
	if got := rendered(t, charts, chartRequest).Notes; got != want {
		t.Errorf("notes with those of subcharts: got %q, want %q", got, want)
	}
}

func TestTextEndsAsInHelm(t *testing.T) {
	t.Parallel()
	text := func(name, more string) string {
		return object("ConfigMap", name) + more + "data:\n  text: |\n    end"
	}
	chart := examples.Chart{Files: map[string]string{
		"templates/manifest.yaml": text("middle", "") + "\n---" + strings.ReplaceAll(text("kept", ""), "|", "|+") + "\n---\n" + text("last", ""),
		"templates/hook.yaml":     text("plain", "") + "\n---\n" + text("hook", "  annotations: {helm.sh/hook: post-install}\n"),
		"templates/joined.yaml":   "---" + object("Secret", "first") + "---   " + object("Secret", "second"),
	}}
	chartRequest := request(t, chart)
	got := map[string]any{}
	for _, object := range rendered(t, render.NewCharts(pool), chartRequest).Objects {
		data, _ := object.Object["data"].(map[string]any)
		got[object.GetKind()+" "+object.GetName()] = data["text"]
	}
	want := map[string]any{}
	hooks, manifest := byHelm(t, chartRequest)
	for _, m := range manifest {
		addTexts(t, want, m.Content+"\n")
	}
	for _, h := range hooks {
		addTexts(t, want, h.Manifest)
	}
	if want["ConfigMap last"] != "end\n" || want["ConfigMap kept"] != "end\n\n" || want["ConfigMap hook"] != "end" {
		t.Errorf("Helm's texts: got %q", want)
	}
	delete(got, "CustomResourceDefinition greetings.hello.examples.towline.dev") // comes from a crds directory
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("texts differ (-helm +got):\n%s", diff)
	}
}

func addTexts(t *testing.T, texts map[string]any, manifest string) {
	t.Helper()
	objects, err := kube.DecodeLenient([]byte(manifest))
	if err != nil {
		t.Fatal(err)
	}
	for _, object := range objects {
		data, _ := object.Object["data"].(map[string]any)
		texts[object.GetKind()+" "+object.GetName()] = data["text"]
	}
}
