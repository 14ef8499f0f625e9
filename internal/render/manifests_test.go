package render_test

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/source"
)

func templateContext() source.TemplateContext {
	return source.TemplateContext{
		Namespace: "eu",
		Name:      "eu-1",
		Cluster: func() (map[string]any, error) {
			return map[string]any{"metadata": map[string]any{"name": "eu-1", "labels": map[string]any{"env": "test"}}}, nil
		},
	}
}

// content holds files given as name and text, one after the other.
func content(files ...string) source.Content {
	held := source.Content{Reference: source.Reference{Kind: "ConfigMap", Namespace: "eu", Name: "web"}}
	for i := 0; i < len(files); i += 2 {
		held.Files = append(held.Files, source.File{Name: files[i], Data: []byte(files[i+1])})
	}
	return held
}

func refs(objects []*unstructured.Unstructured) []string {
	var names []string
	for _, object := range objects {
		names = append(names, kube.RefOf(object).String())
	}
	return names
}

func object(kind, name string) string {
	return "apiVersion: v1\nkind: " + kind + "\nmetadata:\n  name: " + name + "\n"
}

func TestManifests(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		content source.Content
		want    []string
	}{
		"nothing":             {content(), nil},
		"several files":       {content("a", object("Namespace", "a"), "b", object("Namespace", "b")), []string{"Namespace a", "Namespace b"}},
		"several documents":   {content("a", object("Namespace", "a")+"---\n"+object("Namespace", "b")), []string{"Namespace a", "Namespace b"}},
		"empty documents":     {content("a", "---\n# nothing\n---\n"+object("Namespace", "a")+"---\n\n---\nnull\n"), []string{"Namespace a"}},
		"separator comments":  {content("a", object("Namespace", "a")+"--- # next\n"+object("Namespace", "b")), []string{"Namespace a", "Namespace b"}},
		"content after it":    {content("a", `--- {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "a"}}`), []string{"Namespace a"}},
		"JSON":                {content("a", `{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "a"}}`), []string{"Namespace a"}},
		"Windows":             {content("a", "\ufeff"+strings.ReplaceAll(object("Namespace", "a")+"---\n"+object("Namespace", "b"), "\n", "\r\n")), []string{"Namespace a", "Namespace b"}},
		"dashes in a value":   {content("a", object("ConfigMap", "a")+"data:\n  x: |\n    ---\n    y\n"), []string{"ConfigMap a"}},
		"a List":              {content("a", "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Namespace, metadata: {name: a}}\n- {apiVersion: v1, kind: List, items: [{apiVersion: v1, kind: Namespace, metadata: {name: b}}]}\n"), []string{"Namespace a", "Namespace b"}},
		"a typed list":        {content("a", "apiVersion: v1\nkind: ConfigMapList\nitems:\n- metadata: {name: a, namespace: x}\n"), []string{"ConfigMap x/a"}},
		"a kind named so":     {content("a", "apiVersion: example.com/v1\nkind: AllowList\nmetadata: {name: a}\nspec: {items: []}\n"), []string{"AllowList example.com a"}},
		"no template without": {content("a", object("ConfigMap", "a")+"data: {x: '{{ .Nothing }}'}\n"), []string{"ConfigMap a"}},
		"an archive":          {content("a", object("Namespace", "a"), "b.tar.gz", string(archived(t, files{"sub/b.yaml": object("Namespace", "b")}).Content.Files[0].Data)), []string{"Namespace a", "Namespace b"}},
		"template": {
			func() source.Content {
				c := content("a", "{{ range list \"a\" \"b\" }}\n---\n"+object("Namespace", "{{ $.Cluster.metadata.name }}-{{ . }}")+"{{ end }}")
				c.Template = true
				return c
			}(),
			[]string{"Namespace eu-1-a", "Namespace eu-1-b"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := renderManifests(test.content, templateContext())
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, refs(got)); diff != "" {
				t.Errorf("objects differ (-want +got):\n%s", diff)
			}
		})
	}
}

func renderManifests(content source.Content, tmplCtx source.TemplateContext) ([]*unstructured.Unstructured, error) {
	objects, _, err := render.NewManifestRenderer().Render(content, tmplCtx)
	return objects, err
}

func TestManifestsKeepsNumbers(t *testing.T) {
	t.Parallel()
	got, err := renderManifests(content("a", object("Thing", "a")+"spec: {big: 9007199254740993, small: 1, part: 1.5, text: \"1\"}\n"), templateContext())
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]any{"big": int64(9007199254740993), "small": int64(1), "part": 1.5, "text": "1"}
	if diff := cmp.Diff(want, got[0].Object["spec"]); diff != "" {
		t.Errorf("numbers differ (-want +got):\n%s", diff)
	}
}

func TestManifestsNamesThePlaceOfAnError(t *testing.T) {
	t.Parallel()
	templated := content("a.yaml", "{{ .Cluster.metadata.labels.region }}")
	templated.Template = true
	for name, test := range map[string]struct {
		content source.Content
		want    string
	}{
		"broken YAML":       {content("ok", object("Namespace", "a"), "a.yaml", "# first\n"+object("Namespace", "a")+"---\n"+object("Namespace", "b")+"\tx: y\n"), "ConfigMap eu/web, key a.yaml, document 2, line 11: found"},
		"on its first line": {content("a.yaml", "\n\na: b: c\n"), "ConfigMap eu/web, key a.yaml, document 1, line 3: mapping values are not allowed in this context"},
		"a key twice":       {content("a.yaml", object("Namespace", "a")+"kind: Other\n"), `ConfigMap eu/web, key a.yaml, document 1, line 5: key "kind" already set in map`},
		"no object":         {content("a.yaml", "---\n- a\n"), "ConfigMap eu/web, key a.yaml, document 1, line 2: it is not an object with fields"},
		"no kind":           {content("a.yaml", object("Namespace", "a")+"---\n# of what?\napiVersion: v1\n"), "ConfigMap eu/web, key a.yaml, document 2, line 7: it has no kind"},
		"no name":           {content("a.yaml", "apiVersion: v1\nkind: Pod\nmetadata: {generateName: x-}\n"), "ConfigMap eu/web, key a.yaml, document 1, line 1: it has no metadata.name"},
		"name is a number":  {content("a.yaml", object("Namespace", "1")), "ConfigMap eu/web, key a.yaml, document 1, line 1: metadata.name is not a string"},
		"in a list":         {content("a.yaml", "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Namespace}\n"), "ConfigMap eu/web, key a.yaml, document 1, line 1: items[0]: it has no metadata.name"},
		"in a template":     {templated, `expand ConfigMap eu/web, key a.yaml: line 1:11: at <.Cluster.metadata.labels.region>: map has no entry for key "region"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := renderManifests(test.content, templateContext())
			wantInvalid(t, err, test.want)
		})
	}
}

func TestHasSecret(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{
		object("Secret", "a"):    true,
		object("ConfigMap", "a"): false,
		"apiVersion: example.com/v1\nkind: Secret\nmetadata: {name: a}\n": false,
	} {
		objects, err := renderManifests(content("a", text), templateContext())
		if err != nil {
			t.Fatal(err)
		}
		if got := render.HasSecret(objects); got != want {
			t.Errorf("HasSecret is %v, want %v of:\n%s", got, want, text)
		}
	}
}

func TestValuesPrecedence(t *testing.T) {
	t.Parallel()
	plain := content("a", "source: a\nlist: [3]\nnested: {kept: false}\nonly: {a: 1}\n", "b", "source: b\n")
	templated := content("c", "source: c of {{ .ClusterName }}\n")
	templated.Template = true
	got, err := render.Values("source: inline\nlist: [1, 2]\nnested: {kept: true, also: '{{ .ClusterName }}'}\n",
		[]source.Content{templated, plain}, templateContext())
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"source": "c of eu-1",
		"list":   []any{float64(3)},
		"nested": map[string]any{"kept": false, "also": "eu-1"},
		"only":   map[string]any{"a": float64(1)},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("values differ (-want +got):\n%s", diff)
	}
}

func TestValuesNamesThePlaceOfAnError(t *testing.T) {
	t.Parallel()
	_, err := render.Values("a: [", nil, templateContext())
	wantInvalid(t, err, "parse values")
	_, err = render.Values("", []source.Content{content("a.yaml", "- a\n")}, templateContext())
	wantInvalid(t, err, "parse values in ConfigMap eu/web, key a.yaml")
	_, err = render.Values("{{ .Nothing }}", nil, templateContext())
	wantInvalid(t, err, "expand values", `"Nothing"`)
}

// wantInvalid checks that err is a phase.TerminalError with all texts.
func wantInvalid(t *testing.T, err error, texts ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("got no error")
	}
	if _, ok := errors.AsType[phase.TerminalError](err); !ok {
		t.Errorf("got %T, want phase.TerminalError", err)
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("got %q, want it to contain %q", err, text)
		}
	}
}

// TestManifestRendererSharesObjects renders content for two members. Only templates that read the cluster are expanded
// for each, and equal results are decoded once.
func TestManifestRendererSharesObjects(t *testing.T) {
	t.Parallel()
	renderer := render.NewManifestRenderer()
	plain := content("a", object("Namespace", "a"))
	plain.Digest = "sha256:plain"
	template := func(digest, text string) source.Content {
		templated := content("a", object("Namespace", text))
		templated.Digest, templated.Template = digest, true
		return templated
	}
	templated := template("sha256:templated", "{{ .ClusterName }}")
	equal := template("sha256:equal", `{{ "a" }}{{ with .ClusterNamespace }}{{ end }}`)
	shared := template("sha256:shared", `{{ $name := "a" }}{{ $name }}{{ if eq $name "b" }}-b{{ end }}`)
	expansions := 0
	render := func(content source.Content, cluster string) []*unstructured.Unstructured {
		t.Helper()
		tmplCtx := templateContext()
		tmplCtx.Name = cluster
		tmplCtx.Cluster = func() (map[string]any, error) {
			expansions++
			return map[string]any{}, nil
		}
		objects, documents, err := renderer.Render(content, tmplCtx)
		if err != nil {
			t.Fatal(err)
		}
		if documents == nil {
			t.Errorf("%s: documents are not cached", content.Digest)
		}
		return objects
	}
	for _, same := range []source.Content{plain, shared, equal} {
		if one, two := render(same, "one"), render(same, "two"); one[0] != two[0] {
			t.Errorf("%s was decoded twice", same.Digest)
		}
	}
	expansions = 0
	render(shared, "three")
	if expansions != 0 {
		t.Error("a template that does not read the cluster was expanded again")
	}
	if got := refs(append(render(templated, "one"), render(templated, "two")...)); !slices.Equal(got, []string{"Namespace one", "Namespace two"}) {
		t.Errorf("got %v", got)
	}
	changed := content("a", object("Namespace", "b"))
	changed.Digest = "sha256:changed"
	if got := refs(render(changed, "one")); !slices.Equal(got, []string{"Namespace b"}) {
		t.Errorf("after a change: got %v", got)
	}
}

// TestManifestRendererSharesAfterALackOfMemory renders a template first in a namespace without memory, and then in
// others.
func TestManifestRendererSharesAfterALackOfMemory(t *testing.T) {
	t.Parallel()
	renderer, memory := render.NewManifestRenderer(), kube.NewContentMemory(64<<20)
	templated := content("a", object("Namespace", `{{ "a" }}`)+"# "+strings.Repeat("x", 200_000)+"\n")
	templated.Digest, templated.Template = "sha256:a", true
	full := memory.Reserve("full")
	defer full.Release()
	if err := full.Add(32 << 20); err != nil {
		t.Fatal(err)
	}
	expansions := 0
	render := func(namespace string) error {
		of := templateContext()
		of.Sandbox, of.Namespace, of.Memory = pool, namespace, memory.Reserve(namespace)
		defer of.Memory.Release()
		of.Cluster = func() (map[string]any, error) {
			expansions++
			return map[string]any{}, nil
		}
		_, _, err := renderer.Render(templated, of)
		return err
	}
	if err := render("full"); !errors.Is(err, kube.ErrMemoryInUse) {
		t.Fatalf("got %v, want ErrMemoryInUse", err)
	}
	expansions = 0
	if err := errors.Join(render("one"), render("two")); err != nil || expansions != 1 {
		t.Errorf("%d expansions for two clusters, error %v", expansions, err)
	}
}

// TestManifestRendererSharesTemplatesThatReadResources renders content for two members with the same objects of the
// hub, and then with other ones. A template that reads only these objects, and a script, is expanded once for both
// members.
func TestManifestRendererSharesTemplatesThatReadResources(t *testing.T) {
	t.Parallel()
	renderer := render.NewManifestRenderer()
	template := content("a", object("Namespace", "{{ .MgmtResources.Web.metadata.name }}"))
	template.Digest, template.Template = "sha256:template", true
	script := content("a", `function evaluate() return {resources = "apiVersion: v1\nkind: Namespace\nmetadata: {name: " .. resources.Web.metadata.name .. "}\n"} end`)
	script.Digest, script.Lua = "sha256:script", true
	plain := content("a", object("Namespace", "web"))
	plain.Digest = "sha256:script"
	chartRequest := func(cluster, name string) source.TemplateContext {
		tmplCtx := templateContext()
		tmplCtx.Name = cluster
		tmplCtx.Resources = source.Resources{Digest: name, Objects: map[string]json.RawMessage{"Web": []byte(`{"metadata": {"name": "` + name + `"}}`)}}
		return tmplCtx
	}
	render := func(content source.Content, tmplCtx source.TemplateContext) *unstructured.Unstructured {
		t.Helper()
		objects, _, err := renderer.Render(content, tmplCtx)
		if err != nil || len(objects) != 1 {
			t.Fatalf("got %v, %v", objects, err)
		}
		return objects[0]
	}
	for name, content := range map[string]source.Content{"a template": template, "a script": script} {
		one := render(content, chartRequest("one", "web"))
		if two := render(content, chartRequest("two", "web")); one != two || one.GetName() != "web" {
			t.Errorf("%s: got %v and %v, want the same object", name, one, two)
		}
		if three := render(content, chartRequest("three", "shop")); three.GetName() != "shop" {
			t.Errorf("%s: got %v with another object of the hub", name, three)
		}
	}
	if got := render(plain, chartRequest("one", "web")); got == render(script, chartRequest("one", "web")) {
		t.Error("a script and a text with the same digest are the same")
	}
	script.Files[0].Data, script.Digest = []byte("function evaluate()\n  return {resources = resources.None.name}\nend"), "sha256:broken"
	_, _, err := renderer.Render(script, chartRequest("one", "web"))
	wantInvalid(t, err, "ConfigMap eu/web, key a", "line 2")
}

// TestRenderingsOfOtherObjects renders a template with two versions of an object of the hub, as two summaries see it.
func TestRenderingsOfOtherObjects(t *testing.T) {
	t.Parallel()
	renderer := render.NewManifestRenderer()
	template := content("a", object("ConfigMap", `{{ (getResource "Settings").data.name }}`))
	template.Template, template.Digest = true, "template"
	for _, name := range []string{"one", "two", "one"} {
		s := templateContext()
		s.Resources = source.Resources{
			Objects: map[string]json.RawMessage{"Settings": json.RawMessage(`{"data": {"name": "` + name + `"}}`)}, Digest: "digest of " + name,
		}
		got, _, err := renderer.Render(template, s)
		if diff := cmp.Diff([]string{"ConfigMap " + name}, refs(got)); err != nil || diff != "" {
			t.Errorf("%s: %v\n%s", name, err, diff)
		}
	}
}

// TestTextsOfManyValues has templates of a few bytes whose results would take gigabytes of memory when they are parsed
// in the process of the hub.
func TestTextsOfManyValues(t *testing.T) {
	t.Parallel()
	many := "a: [{{ range until 2000 }}{{ range until 2000 }}{},{{ end }}{{ end }}]"
	if _, err := render.Values(many, nil, templateContext()); err == nil || !strings.Contains(err.Error(), "parse values: it has more than 1000000 values") {
		t.Errorf("values: got error %v, want one about their number", err)
	}
	aliases := "a: &a {{ repeat 5000 `0123456789` }}\n---\nb: &b {{ repeat 5000 `0123456789` }}\nc: [{{ range until 500 }}*b, {{ end }}]"
	if _, err := render.Values(aliases, nil, templateContext()); err == nil || !strings.Contains(err.Error(), "parse values: aliases make it too large") {
		t.Errorf("values with aliases: got error %v, want one about their size", err)
	}
	aliases = "patch: &a " + strings.Repeat("x", 50<<10) + "\nb: [" + strings.Repeat("*a, ", 500) + "]"
	if _, err := render.DecodePatches("patches", aliases, nil); err == nil || !strings.Contains(err.Error(), "patches: aliases make it too large") {
		t.Errorf("patches with aliases: got error %v, want one about their size", err)
	}
	if _, err := render.DecodePatches("patches", "a: ["+strings.Repeat("{},", 1<<20)+"]", nil); err == nil || !strings.Contains(err.Error(), "patches: it has more than 1000000 values") {
		t.Errorf("patches: got error %v, want one about their number", err)
	}
}
