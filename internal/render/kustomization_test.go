package render_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/sandbox"
	"github.com/towline/towline/internal/source"
)

// archived returns a kustomization in a ConfigMap with a tar.gz of tree and of headers.
func archived(t *testing.T, tree files, headers ...tar.Header) render.Kustomization {
	t.Helper()
	var packed bytes.Buffer
	compressed := gzip.NewWriter(&packed)
	writer := tar.NewWriter(compressed)
	for _, name := range slices.Sorted(maps.Keys(tree)) {
		headers = append(headers, tar.Header{Name: name, Size: int64(len(tree[name])), Mode: 0o600})
	}
	for _, header := range headers {
		if err := writer.WriteHeader(&header); err != nil {
			t.Fatal(err)
		}
		text := tree[header.Name]
		if text == "" {
			text = strings.Repeat("\x00", int(header.Size))
		}
		if _, err := writer.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(writer.Close(), compressed.Close()); err != nil {
		t.Fatal(err)
	}
	return render.Kustomization{Content: source.Content{
		Reference: source.Reference{Kind: "ConfigMap", Namespace: "eu", Name: "web"},
		Files:     []source.File{{Name: "kustomize.tar.gz", Data: packed.Bytes()}},
		Digest:    fmt.Sprintf("%x", packed.Bytes()),
	}}
}

func TestKustomizationsAreReadFromArchivesAndKeys(t *testing.T) {
	t.Parallel()
	want := []string{"ConfigMap a", "ConfigMap b"}
	tree := files{"kustomization.yaml": "resources: [a.yaml, b.yaml]\n", "a.yaml": object("ConfigMap", "a"), "b.yaml": object("ConfigMap", "b")}
	keys := archived(t, nil)
	keys.Content.Files = kustomizationOf("", tree).Content.Files
	other := archived(t, tree)
	other.Content.Files[0].Name = "app.tgz"
	for name, k := range map[string]render.Kustomization{
		"kustomize.tar.gz": archived(t, tree), "an archive with another name": other, "keys": keys,
	} {
		objects, err := buildKustomization(k)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(want, refs(objects)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestPathComponentsAndNamespaceChangeTheBuild(t *testing.T) {
	t.Parallel()
	k := kustomizationOf("./overlays/prod/", with(base(""), files{
		"overlays/prod/kustomization.yaml":      "resources: [../../base]\nnamePrefix: prod-\n",
		"components/replicas/kustomization.yml": "apiVersion: kustomize.config.k8s.io/v1alpha1\nkind: Component\nreplicas: [{name: web, count: 4}]\nresources: [role.yaml]\n",
		"components/replicas/role.yaml":         "apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRole\nmetadata: {name: role}\n",
	}))
	k.Components, k.Namespace = []string{"../../components/replicas"}, "shop"
	objects, err := buildKustomization(k)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"ConfigMap shop/prod-settings-ck88bd7b2h", "Deployment apps shop/prod-web", "Service shop/prod-web",
		"ClusterRole rbac.authorization.k8s.io prod-role", "Secret shop/prod-login-m4d885dchh",
	}
	got := refs(objects)
	slices.Sort(got)
	slices.Sort(want)
	if len(got) == len(want) { // the hash is compared with kubectl's in another test
		want[1] = got[1]
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("objects (-want +got):\n%s", diff)
	}
	replicas := fieldsByRef(objects)["Deployment apps shop/prod-web"]["spec"].(map[string]any)["replicas"]
	if replicas != int64(4) {
		t.Errorf("%v replicas, want 4 of the component", replicas)
	}
}

func TestValuesOfKustomizations(t *testing.T) {
	t.Parallel()
	s := templateContext()
	s.Sandbox = pool
	k := kustomizationOf("", files{
		"kustomization.yaml": "resources: [a.yaml]\n",
		"a.yaml":             "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: 'a-{{ .name }}'}\ndata: {region: '{{ .region | default \"west\" }}', again: '{{ index . \"a-b\" }}'}\n---\n" + object("ConfigMap", "b"),
	})
	ref := configv1beta1.KustomizationRef{Values: map[string]string{"name": "{{ .ClusterName }}", "region": "x", "a-b": "inline"}}
	plain := content("region", "east", "a-b", "{{ no template }}")
	template := content("region", "{{ .Cluster.metadata.labels.env }}")
	template.Template = true
	renderer := render.NewKustomizationRenderer(pool)
	for name, test := range map[string]struct {
		from []source.Content
		want map[string]any
	}{
		"inline":             {nil, map[string]any{"region": "x", "again": "inline"}},
		"valuesFrom":         {[]source.Content{plain}, map[string]any{"region": "east", "again": "{{ no template }}"}},
		"a later one wins":   {[]source.Content{plain, template}, map[string]any{"region": "test", "again": "{{ no template }}"}},
		"an earlier one not": {[]source.Content{template, plain}, map[string]any{"region": "east", "again": "{{ no template }}"}},
	} {
		withValues, err := render.NewKustomization(k.Content, ref, test.from, s)
		if err != nil {
			t.Fatal(err)
		}
		objects, documents, err := renderer.Render(withValues, s)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{"ConfigMap a-eu-1", "ConfigMap b"}, refs(objects)); diff != "" {
			t.Errorf("%s: objects (-want +got):\n%s", name, diff)
		}
		if diff := cmp.Diff(test.want, fieldsByRef(objects)["ConfigMap a-eu-1"]["data"]); diff != "" {
			t.Errorf("%s: data (-want +got):\n%s", name, diff)
		}
		if encoded, err := documents.Encode(objects); err != nil || !bytes.Contains(encoded[0], []byte("a-eu-1")) {
			t.Errorf("%s: documents %s, error %v", name, encoded, err)
		}
	}
	// Without values, "{{" is text.
	objects, _, err := renderer.Render(k, s)
	if err != nil || fieldsByRef(objects)["ConfigMap a-{{ .name }}"] == nil {
		t.Errorf("without values: %v, error %v", refs(objects), err)
	}
	k.Values = map[string]string{"name": "one"}
	_, _, err = renderer.Render(k, s)
	wantInvalidKustomization(t, err, "GitRepository flux/apps", "ConfigMap a-{{ .name }}", "line ", `"region"`)
	k.Values = map[string]string{"name": "one", "region": "'\n'", "a-b": ""}
	_, _, err = renderer.Render(k, s)
	wantInvalidKustomization(t, err, "GitRepository flux/apps", "ConfigMap a-{{ .name }} with its values")
}

// TestFilesAnywhereInTheTreeAreRead builds a kustomization that `kubectl kustomize` builds with --load-restrictor
// LoadRestrictionsNone only.
func TestFilesAnywhereInTheTreeAreRead(t *testing.T) {
	t.Parallel()
	objects, err := buildKustomization(kustomizationOf("app", files{
		"app/kustomization.yaml": "resources: [../shared/a.yaml]\npatches: [{path: ../shared/p.yaml}]\n",
		"shared/a.yaml":          object("ConfigMap", "a"), "shared/p.yaml": object("ConfigMap", "a") + "data: {from: patch}\n",
	}))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]any{"from": "patch"}, fieldsByRef(objects)["ConfigMap a"]["data"]); diff != "" {
		t.Errorf("data (-want +got):\n%s", diff)
	}
}

// TestBuildsAreShared builds a kustomization once for two template contexts, and again for other inputs.
func TestBuildsAreShared(t *testing.T) {
	t.Parallel()
	renderer := render.NewKustomizationRenderer(pool)
	render := func(k render.Kustomization) any {
		t.Helper()
		s := templateContext()
		s.Sandbox = pool
		objects, _, err := renderer.Render(k, s)
		if err != nil {
			t.Fatal(err)
		}
		return objects[0]
	}
	k := archived(t, files{"a/kustomization.yaml": "resources: [a.yaml]\n", "a/a.yaml": object("ConfigMap", "a"), "b/kustomization.yaml": "resources: [../a]\n"})
	k.Path = "a"
	first := render(k)
	if again := render(k); again != first {
		t.Error("the same inputs were built twice")
	}
	k.Path = "./a/"
	if again := render(k); again != first {
		t.Error("the same path in another form was built twice")
	}
	k.Path = "b"
	if other := render(k); other == first {
		t.Error("another path has the result of the first one")
	}
	k.Path, k.Namespace = "a", "n"
	if other := render(k); other == first {
		t.Error("another namespace has the result of the first one")
	}
}

// TestFailedBuildsAreShared builds a kustomization with an error once for all clusters, and again with other content.
func TestFailedBuildsAreShared(t *testing.T) {
	t.Parallel()
	renderer := render.NewKustomizationRenderer(pool)
	s := templateContext()
	s.Sandbox = pool
	k := archived(t, files{"kustomization.yaml": "resources: [gone.yaml]\n"})
	render := func(k render.Kustomization, want string) {
		t.Helper()
		objects, _, err := renderer.Render(k, s)
		if err == nil || !strings.Contains(err.Error(), want) || objects != nil {
			t.Errorf("got %d objects, %v, want %s", len(objects), err, want)
		}
	}
	missing := `"gone.yaml" does not exist`
	render(k, missing)
	// The same digest stands for the same files: other files show whether it is built again.
	k.Content.Files = archived(t, files{"kustomization.yaml": "resources: [other.yaml]\n"}).Content.Files
	render(k, missing)
	k.Content.Sensitive = true
	render(k, "details are not shown")
	k.Content.Digest = "other"
	k.Content.Sensitive = false
	render(k, `"other.yaml" does not exist`)
}

func wantInvalidKustomization(t *testing.T, err error, texts ...string) {
	t.Helper()
	if _, ok := errors.AsType[phase.TerminalError](err); !ok {
		t.Errorf("got %v, want a phase.TerminalError", err)
		return
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("got %q, want it to contain %q", err, text)
		}
	}
	if strings.Contains(err.Error(), "@tree") || strings.Contains(err.Error(), "\n") || len(err.Error()) > 2000 {
		t.Errorf("%q has an internal path or is too long", err)
	}
	t.Log(err)
}

// TestBrokenKustomizations wants one error that names the content, the path and the entry.
func TestBrokenKustomizations(t *testing.T) {
	t.Parallel()
	requests := 0
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { requests++ }))
	t.Cleanup(func() {
		server.Close()
		if requests > 0 {
			t.Errorf("kustomize sent %d requests", requests)
		}
	})
	url := server.URL + "/a.yaml"
	started := filepath.Join(t.TempDir(), "started")
	program := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(program, []byte("#!/bin/sh\ntouch "+started+"\n"), 0o700); err != nil { //nolint:gosec // it is a program
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := os.Stat(started); err == nil {
			t.Error("kustomize started a program")
		}
	})
	pluginOf := func(function string) string {
		return "apiVersion: v1\nkind: Fn\nmetadata: {name: t, annotations: {config.kubernetes.io/function: '" + function + "'}}\n"
	}
	ofRoot := func(text string) files { return files{"kustomization.yaml": text, "a.yaml": object("ConfigMap", "a")} }
	for name, test := range map[string]struct {
		path string
		tree files
		want []string
	}{
		"no kustomization":        {"sub", files{"sub/a.yaml": "x"}, []string{"path sub", "kustomization.yaml"}},
		"no directory":            {"nowhere", files{"kustomization.yaml": "x"}, []string{"path nowhere", "does not exist"}},
		"two kustomizations":      {"", files{"kustomization.yaml": "{}", "Kustomization": "{}"}, []string{"multiple kustomization files"}},
		"no YAML":                 {"", ofRoot("resources: [a"), []string{"line 1"}},
		"an unknown field":        {"", ofRoot("resorces: [a.yaml]"), []string{`"resorces"`}},
		"a missing resource":      {"over", files{"over/kustomization.yaml": "resources: [../base]", "base/kustomization.yaml": "resources: [gone.yaml]"}, []string{"path over", "base/kustomization.yaml", `resources: "gone.yaml" does not exist`}},
		"a missing component":     {"", ofRoot("resources: [a.yaml]\ncomponents: [gone]"), []string{`components: "gone" does not exist`}},
		"a component in a file":   {"", ofRoot("components: [a.yaml]"), []string{`components: "a.yaml" is not a directory`}},
		"no component":            {"", with(ofRoot("components: [c]"), files{"c/kustomization.yaml": "resources: []\nnamePrefix: a"}), []string{"Component", "'c'"}},
		"an invalid object":       {"", with(ofRoot("resources: [b.yaml]"), files{"b.yaml": "kind: ConfigMap\n"}), []string{"accumulating resources: accumulating resources from 'b.yaml': missing metadata.name"}},
		"an invalid patch":        {"", ofRoot("resources: [a.yaml]\npatches: [{patch: 'not: [a patch'}]"), []string{"not: [a patch"}},
		"a missing patch":         {"", ofRoot("resources: [a.yaml]\npatches: [{path: gone.yaml}]"), []string{"gone.yaml"}},
		"a patch without target":  {"", ofRoot("resources: [a.yaml]\npatches: [{patch: '{apiVersion: v1, kind: Secret, metadata: {name: b}}'}]"), []string{"Secret", "b"}},
		"a missing file":          {"", ofRoot("configMapGenerator: [{name: a, files: [gone.txt]}]"), []string{"gone.txt"}},
		"a cycle":                 {"a", files{"a/kustomization.yaml": "resources: [../b]", "b/kustomization.yaml": "resources: [../a]"}, []string{"path a: accumulating resources: recursed accumulation of path 'b': accumulating resources: cycle detected"}},
		"itself":                  {"a", files{"a/kustomization.yaml": "resources: [.]"}, []string{`a/kustomization.yaml: resources: "." contains the kustomization itself: a cycle`}},
		"the same object twice":   {"", ofRoot("resources: [a.yaml, ./a.yaml]"), []string{"a.yaml", "ConfigMap"}},
		"nothing":                 {"", ofRoot(""), []string{"kustomization.yaml is empty"}},
		"too many ..":             {"a", files{"a/kustomization.yaml": "resources: [../../etc/passwd]"}, []string{"a/kustomization.yaml", `resources: "../../etc/passwd" is outside of the source`}},
		"an absolute path":        {"", ofRoot("resources: [/etc/passwd]"), []string{`"/etc/passwd" is outside of the source`}},
		"a file outside":          {"", ofRoot("configMapGenerator: [{name: a, files: [../../../../etc/passwd]}]"), []string{"etc/passwd"}},
		"an absolute file":        {"", ofRoot("configMapGenerator: [{name: a, files: [/etc/passwd]}]"), []string{"/etc/passwd"}},
		"a path outside":          {"../..", ofRoot("resources: [a.yaml]"), []string{"path", `"../.." is not a path below the root`}},
		"a remote resource":       {"", ofRoot("resources: [" + url + "]"), []string{"kustomization.yaml: resources", url, "without a network"}},
		"a remote base":           {"", ofRoot("bases: ['github.com/owner/repo//base?ref=v1']"), []string{"github.com/owner/repo//base?ref=v1", "without a network"}},
		"a remote repository":     {"", ofRoot("resources: ['git@example.com:owner/repo']"), []string{"git@example.com:owner/repo", "without a network"}},
		"a remote component":      {"", ofRoot("components: ['https://example.com/repo.git']"), []string{"components", "https://example.com/repo.git", "without a network"}},
		"a remote patch":          {"", ofRoot("resources: [a.yaml]\npatches: [{path: '" + url + "'}]"), []string{"patches", url, "without a network"}},
		"a remote generator file": {"", ofRoot("configMapGenerator: [{name: a, files: ['k=" + url + "']}]"), []string{"configMapGenerator", url, "without a network"}},
		"a remote file of a transformer": {"", with(ofRoot("resources: [a.yaml]\ntransformers: [t.yaml]"), files{"t.yaml": "apiVersion: builtin\nkind: PatchTransformer\nmetadata: {name: t}\npath: " + url + "\n"}),
			[]string{"there is no network"}},
		"a remote generator":            {"", ofRoot("generators: ['" + url + "']"), []string{"generators", url, "without a network"}},
		"a remote transformer":          {"", ofRoot("resources: [a.yaml]\ntransformers: ['" + url + "']"), []string{"transformers", url, "without a network"}},
		"a remote validator":            {"", ofRoot("resources: [a.yaml]\nvalidators: ['" + url + "']"), []string{"validators", url, "without a network"}},
		"a transformer in a repository": {"", ofRoot("resources: [a.yaml]\ntransformers: ['github.com/owner/repo//t?ref=v1']"), []string{"transformers", "github.com/owner/repo//t?ref=v1", "without a network"}},
		"a remote transformer in a directory": {"", with(ofRoot("resources: [a.yaml]\ntransformers: [t]"), files{"t/kustomization.yaml": "resources: ['" + url + "']\n"}),
			[]string{"t/kustomization.yaml: resources", url, "without a network"}},
		"a validator as a function":  {"", with(ofRoot("resources: [a.yaml]\nvalidators: [t.yaml]"), files{"t.yaml": pluginOf("{container: {image: example.com/x, network: true}}")}), []string{"plugin", "Fn"}},
		"a validator as a program":   {"", with(ofRoot("resources: [a.yaml]\nvalidators: [t.yaml]"), files{"t.yaml": pluginOf("{exec: {path: " + program + "}}")}), []string{"plugin", "Fn"}},
		"a generator as a function":  {"", with(ofRoot("generators: [t.yaml]"), files{"t.yaml": pluginOf("{container: {image: example.com/x, network: true}}")}), []string{"plugin", "Fn"}},
		"a transformer as a program": {"", with(ofRoot("resources: [a.yaml]\ntransformers: [t.yaml]"), files{"t.yaml": pluginOf("{exec: {path: " + program + "}}")}), []string{"plugin", "Fn"}},
		"a program in Starlark":      {"", with(ofRoot("resources: [a.yaml]\ntransformers: [t.yaml]"), files{"t.yaml": pluginOf("{starlark: {url: " + url + "}}")}), []string{"plugin", "Fn"}},
		"an inline program":          {"", ofRoot("generators:\n- |-\n  " + strings.ReplaceAll(strings.TrimSpace(pluginOf("{exec: {path: "+program+"}}")), "\n", "\n  ")), []string{"plugin", "Fn"}},
		"a chart":                    {"", ofRoot("helmCharts: [{name: a, repo: 'https://example.com'}]"), []string{"kustomization.yaml: helmCharts", "spec.helmCharts"}},
		"a function":                 {"", with(ofRoot("resources: [a.yaml]\ntransformers: [t.yaml]"), files{"t.yaml": pluginOf("{container: {image: example.com/x}}")}), []string{"plugin", "Fn"}},
		"a program":                  {"", with(ofRoot("generators: [t.yaml]"), files{"t.yaml": pluginOf("{exec: {path: " + program + "}}")}), []string{"plugin", "Fn"}},
		"a long error":               {"", ofRoot("resources: [a.yaml]\npatches: [{patch: '[" + strings.Repeat("long ", 10_000) + "'}]"), []string{"[long", " ..."}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := buildKustomization(kustomizationOf(test.path, test.tree))
			wantInvalidKustomization(t, err, append(test.want, "GitRepository flux/apps")...)
		})
	}
}

func TestHostileKustomizations(t *testing.T) {
	t.Parallel()
	var laughs strings.Builder
	laughs.WriteString("a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n")
	for i := range 12 {
		fmt.Fprintf(&laughs, "a%[1]d: &a%[1]d [*a%[2]d, *a%[2]d, *a%[2]d, *a%[2]d, *a%[2]d, *a%[2]d, *a%[2]d, *a%[2]d, *a%[2]d]\n", i+1, i)
	}
	large := files{"kustomization.yaml": "configMapGenerator:\n", "large": strings.Repeat("x", 1<<20)}
	for i := range 17 {
		large["kustomization.yaml"] += fmt.Sprintf("- {name: a%d, files: [large]}\n", i)
	}
	noArchive := archived(t, nil)
	noArchive.Content.Files[0].Data = []byte("this is not an archive")
	root := files{"kustomization.yaml": "resources: [a.yaml]\n"}
	for name, test := range map[string]struct {
		kustomization render.Kustomization
		want          []string
	}{
		"64 MiB":          {archived(t, root, tar.Header{Name: "large", Size: 64 << 20}), []string{"kustomize.tar.gz", "more than 32 MiB", `"large"`}},
		"a symlink":       {archived(t, root, tar.Header{Name: "a.yaml", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd"}), []string{"kustomize.tar.gz", `"a.yaml" is a link`}},
		"a path":          {archived(t, root, tar.Header{Name: "../../etc/passwd"}), []string{"kustomize.tar.gz", `"../../etc/passwd" is not a path below the root`}},
		"large objects":   {kustomizationOf("", large), []string{"the objects have more than 16 MiB"}},
		"no archive":      {noArchive, []string{"key kustomize.tar.gz", "neither a tar nor a zip archive"}},
		"aliases":         {archived(t, files{"kustomization.yaml": laughs.String() + "resources: []\n"}), []string{"aliasing"}},
		"aliases in data": {archived(t, with(root, files{"a.yaml": object("ConfigMap", "a") + laughs.String()})), nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := buildKustomization(test.kustomization)
			if _, ok := errors.AsType[*sandbox.LimitError](err); ok && test.want == nil {
				t.Log(err)
				return
			}
			wantInvalidKustomization(t, err, append(test.want, test.kustomization.Content.Reference.String())...)
		})
	}
}
