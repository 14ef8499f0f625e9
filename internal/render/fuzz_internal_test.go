package render

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/source"
	"github.com/towline/towline/test/fuzzing"
)

// FuzzDecodePatches reads patches in ConfigMaps and Secrets.
func FuzzDecodePatches(f *testing.F) {
	f.Add("- patch: |\n    - {op: remove, path: /spec}\n  target: {kind: Deployment}\n- patch: x\n")
	f.Add("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n")
	f.Add("patch: ''")
	f.Add("[]")
	f.Fuzz(func(t *testing.T, text string) {
		var patches []Patch
		var err error
		fuzzing.Within(t, 64<<20+uint64(len(text))*20_000, func() { patches, err = DecodePatches("ConfigMap a/b, key c", text, nil) })
		fuzzing.OneLine(t, err)
		for _, patch := range patches {
			if patch.Text == "" || !strings.HasPrefix(patch.Origin, "ConfigMap a/b, key c") {
				t.Errorf("got patch %+v", patch)
			}
		}
	})
}

// FuzzApplyPatches applies patches of profiles. Objects that they do not select stay, and others are within the limit.
func FuzzApplyPatches(f *testing.F) {
	for _, text := range []string{
		"- {op: replace, path: /data/a, value: 1}", "- {op: copy, from: /data, path: /data/b}\n- {op: copy, from: /data, path: /data/c}", "- {op: add, path: /data/-1, value: x}", "- {op: test, path: /kind, value: X}", "- {op: move, from: '', path: /a}",
		"data: {a: null}", "$patch: delete\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}", "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: b}\nspec: {template: {spec: {containers: [{name: c, $patch: delete}]}}}", "metadata: {name: &a x, labels: {a: *a}}",
	} {
		f.Add(text, "ConfigMap|Deployment", "a|b", "", true)
		f.Add(text, "", "(", "a in (b)", false)
	}
	docs := []json.RawMessage{
		json.RawMessage(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a","labels":{"a":"b"}},"data":{"a":"b"}}`),
		json.RawMessage(`{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"b"},"spec":{"template":{"spec":{"containers":[{"name":"c","args":["x"]}]}}}}`),
		json.RawMessage(`{"apiVersion":"v1","kind":"Service","metadata":{"name":"never-patched"}}`),
	}
	f.Fuzz(func(t *testing.T, text, kind, name, selector string, hasTarget bool) {
		patch := Patch{Origin: "patches[0]", Text: text}
		if hasTarget {
			patch.Target = &libv1beta1.PatchSelector{Kind: kind, Name: name, LabelSelector: selector}
		}
		var changed map[int]json.RawMessage
		var err error
		fuzzing.Within(t, 256<<20+uint64(len(text))*20_000, func() {
			changed, err = applyPatches(patchInput{Objects: docs, Patches: []Patch{patch}, Unpatched: []int{2}})
		})
		if _, isChanged := changed[2]; isChanged {
			t.Error("an object that must not be patched is changed")
		}
		for i, raw := range changed {
			if !json.Valid(raw) || len(raw) > 2*maxPatched {
				t.Errorf("object %d has %d bytes", i, len(raw))
			}
		}
		if err != nil && !strings.HasPrefix(err.Error(), "patches[0]: ") {
			t.Errorf("the error does not name the patch: %v", err)
		}
	})
}

// FuzzKustomization builds a kustomization. It has the files of its tree only, and needs no network.
func FuzzKustomization(f *testing.F) {
	const object = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {a: b}\n"
	for _, text := range []string{
		"resources: [a.yaml]\nnamePrefix: x-\nlabels: [{pairs: {a: b}, includeSelectors: true}]\n", "resources: [https://example.com/a]", "resources: [../../etc/passwd]", "resources: [base]\npatches: [{path: a.yaml}]", "resources: [.]", "bases: [git@example.com:a/b]",
		"configMapGenerator: [{name: g, files: [a.yaml, x=/etc/passwd], envs: [http://example.com], literals: [a=b]}]", "helmCharts: [{name: a, repo: https://example.com}]", "generators: [a.yaml]\ntransformers: [a.yaml]", "replacements: [{source: {kind: ConfigMap, fieldPath: data.a}, targets: [{select: {kind: ConfigMap}, fieldPaths: ['data.[a=b].c'], options: {create: true}}]}]\nresources: [a.yaml]",
		"openapi: {path: https://example.com}\nresources: [a.yaml]", "images: [{name: a, newTag: b}]\nreplicas: [{name: a, count: 1}]\nresources: [a.yaml]\nbuildMetadata: [originAnnotations, managedByLabel]", "vars: [{name: V, objref: {kind: ConfigMap, name: a, apiVersion: v1}}]\nresources: [a.yaml]",
	} {
		f.Add(text, object)
	}
	f.Add("resources: [a.yaml]", "apiVersion: builtin\nkind: NamespaceTransformer\nmetadata: {name: a, namespace: b}\n---\nkind: List\nitems: [1]")
	f.Fuzz(func(t *testing.T, root, file string) {
		files := map[string]string{"kustomization.yaml": root, "a.yaml": file, "base/kustomization.yaml": "resources: [../a.yaml]", "sub/a.yaml": file}
		var names []string
		for name := range files {
			names = append(names, name)
		}
		tree := newSourceTree(names, func(name string) ([]byte, error) {
			content, exists := files[name]
			if !exists {
				t.Errorf("it reads %q, which is not in the tree", name)
			}
			return []byte(content), nil
		})
		var output kustomizationOutput
		var err error
		fuzzing.Within(t, 512<<20+uint64(len(root)+len(file))*50_000, func() { output, err = tree.build(kustomizationInput{}) })
		if err != nil {
			if len(err.Error()) > 4*maxBuildMessage {
				t.Errorf("the error has %d bytes", len(err.Error()))
			}
			return
		}
		var objects []unstructured.Unstructured
		if len(output.Objects) > maxBuildOutput || json.Unmarshal(output.Objects, &objects) != nil && string(output.Objects) != "[]" {
			t.Errorf("%d bytes of objects: %.200s", len(output.Objects), output.Objects)
		}
		for _, object := range objects {
			if ref := kube.RefOf(&object); ref.Kind == "" || ref.Name == "" {
				t.Errorf("an object without an identity: %v", object.Object)
			}
		}
	})
}

// FuzzValues merges inline values with the values in a ConfigMap, and checks that memory for the result is reserved.
func FuzzValues(f *testing.F) {
	for _, text := range []string{
		"a: 1\nb: {c: [x, {d: null}]}\n", "b: null\n", "{\"a\": {\"b\": 1e999}}", "- a\n", "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "? [a]\n: b\n",
		"a: 1\na: 2\n", "1: x\ntrue: y\n", "---\na: b\n---\nc: d\n", "<<: {a: b}\n", "a: !!binary aGk=\nb: 2026-01-01\nc: .inf\n", "\"a\\n\": {",
	} {
		f.Add(text, "b: {c: 2}\n")
		f.Add("b: {c: {d: e}}\n", text)
	}
	f.Fuzz(func(t *testing.T, inline, file string) {
		if strings.Contains(inline, "{{") {
			t.Skip("FuzzExpand has templates")
		}
		const maxMemory = 64<<20 + 512<<10 // half of the total, and what needs no reservation
		reserved := kube.NewContentMemory(128 << 20).Reserve("eu")
		defer reserved.Release()
		content := source.Content{Reference: source.Reference{Kind: "ConfigMap", Namespace: "a", Name: "b"}, Files: []source.File{{Name: "c", Data: []byte(file)}}}
		var values map[string]any
		var err error
		fuzzing.Within(t, 64<<20+uint64(len(inline)+len(file))*2_000, func() {
			values, err = Values(inline, []source.Content{content}, source.TemplateContext{Memory: reserved})
		})
		fuzzing.OneLine(t, err)
		if err != nil {
			return
		}
		if _, err := json.Marshal(values); err != nil {
			t.Errorf("the values have no JSON: %v", err)
		}
		const smallMap = 1 << 10 // two nodes of YAML can need a little more than their estimate
		if reserved.Add(maxMemory-kube.MemoryOfValue(values)+smallMap) == nil {
			t.Errorf("less is reserved than the %d bytes that the values need", kube.MemoryOfValue(values))
		}
	})
}

// FuzzReleaseManifest reads rendered templates of charts.
func FuzzReleaseManifest(f *testing.F) {
	f.Add("---apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a, annotations: {a: 1, b: true, c: null}}\n---\nkind: Job\napiVersion: batch/v1\nmetadata: {name: h, annotations: {helm.sh/hook: 'pre-install,unknown'}}", true)
	f.Add("apiVersion: v1\nkind: Pod\nmetadata: {name: h, annotations: {helm.sh/hook: test}}\ndata: |\n  x\n\n", false)
	f.Fuzz(func(t *testing.T, text string, disableHooks bool) {
		builder := &releaseBuilder{}
		var err error
		fuzzing.Within(t, 128<<20+uint64(len(text))*40_000, func() { err = builder.addTemplate("chart/templates/a.yaml", text, disableHooks) })
		fuzzing.OneLine(t, err)
		if err != nil {
			return
		}
		release := builder.build()
		if len(release.Objects) != len(release.Paths) {
			t.Errorf("%d objects and %d paths", len(release.Objects), len(release.Paths))
		}
		for i, object := range release.Objects {
			if ref := kube.RefOf(object); ref.Kind == "" || ref.Name == "" || object.GetAPIVersion() == "" {
				t.Errorf("object %d has no identity: %v", i, object.Object)
			}
		}
		if disableHooks && len(builder.hooks) > 0 {
			t.Errorf("%d hooks although they are disabled", len(builder.hooks))
		}
	})
}

// FuzzChart renders untrusted charts. It skips templates that take much time or memory because of a number: only the
// sandbox limits them.
func FuzzChart(f *testing.F) {
	const chart = "apiVersion: v2\nname: web\nversion: 1.0.0\n"
	const object = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ .Release.Name }}}\ndata: {a: {{ .Values.a | quote }}}\n"
	f.Add(chart, "a: b", object, "templates/NOTES.txt", "{{ .Chart.Name }}")
	f.Add(chart+"dependencies: [null]\nmaintainers: [null]\n", "a: [", "{{ .Values.a.b.c }}", "values.schema.json", `{"type":"object","properties":{"a":{"$ref":"https://example.com/a.json"}}}`)
	f.Add(chart+"kubeVersion: '>=1.99'\ntype: library\n", "global: null\nweb: 1\n", `{{ lookup "v1" "Secret" "a" "b" }}{{ randAlphaNum 5 }}`, "crds/a.yaml", "kind: CustomResourceDefinition\nspec: []\n")
	f.Add(chart+"dependencies: [{name: sub, version: 1.0.0, condition: a.b, import-values: [1], alias: ../x}]", "", "{{ include \"x\" . }}{{ define \"x\" }}{{ include \"x\" . }}{{ end }}", "charts/sub/Chart.yaml", "name: sub\nversion: 1.0.0\napiVersion: v2\n")
	f.Add(chart, "", "{{ .Files.Get \"/etc/passwd\" }}{{ .Files.Glob \"**\" }}{{ tpl .Values.x . }}{{ .Capabilities.APIVersions.Has \"v1\" }}", "../../x", "a")
	f.Fuzz(func(t *testing.T, metadata, values, text, name, content string) {
		if isCostly(text + content + values) {
			t.Skip("the sandbox stops such a template")
		}
		files := map[string]string{"web/Chart.yaml": metadata, "web/values.yaml": values, "web/templates/a.yaml": text, "web/" + name: content}
		archived := chartArchive(t, files)
		path := filepath.Join(t.TempDir(), "chart.tgz")
		if err := os.WriteFile(path, archived, 0o600); err != nil {
			t.Fatal(err)
		}
		request := ChartRequest{
			Chart: source.Chart{Name: "web", Version: "1.0.0", Path: path, Digest: "a"}, Name: "release", Namespace: "site",
			KubeVersion: "v1.36.3", APIVersions: []string{"v1", "apps/v1"}, Owner: "a",
		}
		var release Release
		var err error
		fuzzing.Within(t, 512<<20+uint64(len(archived))*50_000, func() { release, err = NewCharts(nil).Render(t.Context(), request) })
		fuzzing.OneLine(t, err)
		if err != nil {
			return
		}
		if len(release.Objects) != len(release.Paths) {
			t.Errorf("%d objects and %d paths", len(release.Objects), len(release.Paths))
		}
		for i, object := range release.Objects {
			if ref := kube.RefOf(object); ref.Kind == "" || ref.Name == "" || object.GetAPIVersion() == "" {
				t.Errorf("object %d has no identity: %v", i, object.Object)
			}
		}
	})
}

// isCostly returns whether a template can take much time or memory by a number in it, or by a costly function.
func isCostly(text string) bool {
	return regexp.MustCompile(`[0-9]{4}|[0-9][xXeE_]|mul|repeat|until|seq|gen|derivePassword|bcrypt|htpasswd|encryptAES|pow`).MatchString(text)
}

func chartArchive(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var raw bytes.Buffer
	zipped := gzip.NewWriter(&raw)
	writer := tar.NewWriter(zipped)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if err := writer.WriteHeader(&tar.Header{Name: name, Size: int64(len(files[name])), Mode: 0o600, Typeflag: tar.TypeReg}); err != nil {
			t.Skip("the name cannot be written")
		}
		if _, err := writer.Write([]byte(files[name])); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(writer.Close(), zipped.Close()); err != nil {
		t.Fatal(err)
	}
	return raw.Bytes()
}
