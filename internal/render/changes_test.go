package render_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/render"
)

const toPatch = `
apiVersion: apps/v1
kind: Deployment
metadata: {namespace: site, name: web, labels: {app: web}, annotations: {team: a}}
spec:
  replicas: 1
  template:
    spec:
      containers:
      - {name: side, image: side:1}
      - {name: web, image: web:1, args: ["yes", "0777", "1_000", "~", "null", "2026-01-01", "1e3", "|\n x\t \n\n"]}
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: site, name: settings}
data: {big: "9007199254740993"}
---
apiVersion: example.org/v1
kind: Widget
metadata: {name: web}
spec: {big: 9007199254740993, half: 0.5, none: null, list: [1, 2], quoted: "on"}
`

func objectsToPatch(t *testing.T) []*unstructured.Unstructured {
	t.Helper()
	objects, err := kube.DecodeManifest([]byte(toPatch))
	if err != nil {
		t.Fatal(err)
	}
	return objects
}

func target(kind, name string) *libv1beta1.PatchSelector {
	return &libv1beta1.PatchSelector{Kind: kind, Name: name}
}

// change applies changes, and returns the objects that differ: JSON pointers would hide what else was changed.
func change(t *testing.T, changes render.Changes, unpatched ...int) (map[string]map[string]any, render.Changed, error) {
	t.Helper()
	objects := objectsToPatch(t)
	changed, err := render.NewChanger(pool).Change(objects, kube.NewDocuments(objects), changes, unpatched)
	differing := map[string]map[string]any{}
	for i, object := range changed.Objects {
		before := objects[changed.Indexes[i]]
		if !cmp.Equal(before.Object, object.Object) {
			differing[object.GetKind()] = object.Object
		}
	}
	if diff := cmp.Diff(objectsToPatch(t), objects); diff != "" {
		t.Errorf("the rendered objects were changed (-want +got):\n%s", diff)
	}
	return differing, changed, err
}

func TestPatches(t *testing.T) {
	t.Parallel()
	const scale = "- {op: replace, path: /spec/replicas, value: 3}"
	want := func(edits ...func(map[string]any)) map[string]any {
		object := objectsToPatch(t)[0].Object
		for _, edit := range edits {
			edit(object)
		}
		return object
	}
	set := func(value any, path ...string) func(map[string]any) {
		return func(object map[string]any) {
			if err := unstructured.SetNestedField(object, value, path...); err != nil {
				t.Fatal(err)
			}
		}
	}
	scaled := map[string]map[string]any{"Deployment": want(set(int64(3), "spec", "replicas"))}
	imaged := map[string]map[string]any{"Deployment": want(func(object map[string]any) {
		spec := object["spec"].(map[string]any)["template"].(map[string]any)["spec"].(map[string]any)
		containers := spec["containers"].([]any)
		containers[1].(map[string]any)["image"] = "web:2"
		spec["containers"] = []any{containers[1], containers[0]} // kustomize puts the containers of the patch first
	})}
	widget := objectsToPatch(t)[2].Object
	widget["spec"].(map[string]any)["list"] = []any{int64(1), int64(2), int64(3)}
	for name, c := range map[string]struct {
		patches []render.Patch
		want    map[string]map[string]any
		error   string
	}{
		"operations":              {[]render.Patch{{Text: scale, Target: target("Deployment", "")}}, scaled, ""},
		"operations in JSON":      {[]render.Patch{{Text: `[{"op":"replace","path":"/spec/replicas","value":3}]`, Target: target("Deployment", "")}}, scaled, ""},
		"name as a regex":         {[]render.Patch{{Text: scale, Target: target("Deploy.*", "w.b")}}, scaled, ""},
		"anchored name":           {[]render.Patch{{Text: scale, Target: target("Deployment", "we")}}, nil, ""},
		"group and version":       {[]render.Patch{{Text: scale, Target: &libv1beta1.PatchSelector{Group: "apps", Version: "v1"}}}, scaled, ""},
		"other namespace":         {[]render.Patch{{Text: scale, Target: &libv1beta1.PatchSelector{Kind: "Deployment", Namespace: "default"}}}, nil, ""},
		"namespace":               {[]render.Patch{{Text: scale, Target: &libv1beta1.PatchSelector{Kind: "Deployment", Namespace: "si.*"}}}, scaled, ""},
		"labels":                  {[]render.Patch{{Text: scale, Target: &libv1beta1.PatchSelector{LabelSelector: "app in (web)"}}}, scaled, ""},
		"annotations":             {[]render.Patch{{Text: scale, Target: &libv1beta1.PatchSelector{AnnotationSelector: "team=a"}}}, scaled, ""},
		"other annotations":       {[]render.Patch{{Text: scale, Target: &libv1beta1.PatchSelector{AnnotationSelector: "team!=a", Kind: "Deployment"}}}, nil, ""},
		"merge with a target":     {[]render.Patch{{Text: "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: any}\nspec: {template: {spec: {containers: [{name: web, image: web:2}]}}}", Target: target("Deployment", "")}}, imaged, ""},
		"merge by name":           {[]render.Patch{{Text: "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web, namespace: site}\nspec: {replicas: 3}"}}, scaled, ""},
		"merge by other name":     {[]render.Patch{{Text: "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\nspec: {replicas: 3}"}}, nil, ""},
		"delete":                  {[]render.Patch{{Text: "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: any}\n$patch: delete", Target: target("Deployment", "")}}, nil, ""},
		"custom resource":         {[]render.Patch{{Text: "- {op: add, path: /spec/list/-, value: 3}", Target: target("Widget", "")}}, map[string]map[string]any{"Widget": widget}, ""},
		"merge a custom resource": {[]render.Patch{{Text: "apiVersion: example.org/v1\nkind: Widget\nmetadata: {name: web}\nspec: {list: [1, 2, 3]}"}}, map[string]map[string]any{"Widget": widget}, ""},
		"one after the other":     {[]render.Patch{{Text: "- {op: add, path: /metadata/labels/more, value: x}", Target: target("Deployment", "")}, {Text: scale, Target: &libv1beta1.PatchSelector{LabelSelector: "more=x"}}}, map[string]map[string]any{"Deployment": want(set(int64(3), "spec", "replicas"), set("x", "metadata", "labels", "more"))}, ""},
		"missing path":            {[]render.Patch{{Origin: "patches[0]", Text: "- {op: remove, path: /spec/nothing}", Target: target("Deployment", "")}}, nil, "patches[0]: it cannot be applied to Deployment apps site/web"},
		"no target":               {[]render.Patch{{Origin: "patches[0]", Text: scale}}, nil, "patches[0]: a JSON 6902 patch needs a target"},
		"no patch":                {[]render.Patch{{Origin: "patches[0]", Text: "text"}}, nil, "patches[0]: "},
		"unknown operation":       {[]render.Patch{{Origin: "patches[0]", Text: "- {op: double, path: /spec/replicas}", Target: target("Deployment", "")}}, nil, "patches[0]: invalid operation"},
		"broken YAML":             {[]render.Patch{{Origin: "patches[1]", Text: "kind: [", Target: target("", "")}}, nil, "patches[1]: "},
		"empty":                   {[]render.Patch{{Origin: "patches[0]", Text: " ", Target: target("", "")}}, nil, "patches[0]: it is empty"},
		"broken regex":            {[]render.Patch{{Origin: "patches[0]", Text: scale, Target: target("(", "")}}, nil, "patches[0]: target: "},
		"broken selector":         {[]render.Patch{{Origin: "patches[0]", Text: scale, Target: &libv1beta1.PatchSelector{LabelSelector: "a in"}}}, nil, "patches[0]: target.labelSelector: "},
		"several with target":     {[]render.Patch{{Origin: "patches[0]", Text: "apiVersion: v1\nkind: A\nmetadata: {name: a}\n---\napiVersion: v1\nkind: B\nmetadata: {name: b}\n", Target: target("A", "")}}, nil, "patches[0]: a patch with several documents"},
		"no object of the set":    {[]render.Patch{{Text: scale, Target: target("StatefulSet", "")}}, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, changed, err := change(t, render.Changes{Patches: c.patches})
			if c.error != "" {
				var invalid phase.TerminalError
				if !errors.As(err, &invalid) || !strings.Contains(fmt.Sprint(err), c.error) {
					t.Fatalf("got error %v, want a phase.TerminalError with %q", err, c.error)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if c.want == nil {
				c.want = map[string]map[string]any{}
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			wantIndexes := []int{0, 1, 2}
			if name == "delete" {
				wantIndexes = []int{1, 2}
			}
			if diff := cmp.Diff(wantIndexes, changed.Indexes); diff != "" {
				t.Errorf("indexes (-want +got):\n%s", diff)
			}
		})
	}
}

// TestPatchesOmitObjects does not patch the objects that the caller excludes, but sets their labels.
func TestPatchesOmitObjects(t *testing.T) {
	t.Parallel()
	changes := render.Changes{
		Patches:     []render.Patch{{Text: "- {op: add, path: /metadata/labels, value: {patched: x, set: patch}}", Target: target("", "")}},
		Labels:      map[string]string{"set": "profile"},
		Annotations: map[string]string{"note": "{{ kept }}"},
	}
	got, _, err := change(t, changes, 0)
	if err != nil {
		t.Fatal(err)
	}
	for kind, want := range map[string]map[string]any{
		"Deployment": {"app": "web", "set": "profile"},
		"ConfigMap":  {"patched": "x", "set": "profile"},
		"Widget":     {"patched": "x", "set": "profile"},
	} {
		metadata := got[kind]["metadata"].(map[string]any)
		if diff := cmp.Diff(want, metadata["labels"]); diff != "" {
			t.Errorf("labels of the %s (-want +got):\n%s", kind, diff)
		}
		if note := metadata["annotations"].(map[string]any)["note"]; note != "{{ kept }}" {
			t.Errorf("annotation of the %s: got %q", kind, note)
		}
	}
	template := got["Deployment"]["spec"].(map[string]any)["template"].(map[string]any)
	if template["metadata"] != nil {
		t.Errorf("the pod template has metadata: %v", template["metadata"])
	}
}

// TestChangesAreShared changes the same objects once for all members, so that bundles encode them once.
func TestChangesAreShared(t *testing.T) {
	t.Parallel()
	changer := render.NewChanger(pool)
	changes := render.Changes{Labels: map[string]string{"a": "b"}}
	var documents []*kube.Documents
	for _, c := range []render.Changes{changes, changes, {Labels: map[string]string{"a": "c"}}} {
		objects := objectsToPatch(t)
		changed, err := changer.Change(objects, kube.NewDocuments(objects), c, nil)
		if err != nil {
			t.Fatal(err)
		}
		documents = append(documents, changed.Documents)
	}
	if documents[0] != documents[1] || documents[0] == documents[2] {
		t.Errorf("got %v, want the first two equal, and the last one different", documents)
	}
}

// TestGrowingPatchIsStopped doubles a value again and again.
func TestGrowingPatchIsStopped(t *testing.T) {
	t.Parallel()
	var text strings.Builder
	text.WriteString("- {op: add, path: /c, value: [x, x]}\n")
	for range 60 {
		text.WriteString("- {op: copy, from: /c, path: /c/-}\n")
	}
	_, _, err := change(t, render.Changes{Patches: []render.Patch{{Origin: "patches[0]", Text: text.String(), Target: target("ConfigMap", "")}}})
	if err == nil || !strings.Contains(err.Error(), "exceeding the limit") {
		t.Fatalf("got error %v", err)
	}
}

func TestDecodePatches(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		text  string
		want  []render.Patch
		error string
	}{
		"one":     {"patch: x\ntarget: {kind: Deployment}", []render.Patch{{Origin: "it", Text: "x", Target: target("Deployment", "")}}, ""},
		"list":    {"- patch: x\n- {patch: z, target: {name: b}}", []render.Patch{{Origin: "it[0]", Text: "x"}, {Origin: "it[1]", Text: "z", Target: target("", "b")}}, ""},
		"merge":   {"kind: A\nmetadata: {name: b}", []render.Patch{{Origin: "it", Text: "kind: A\nmetadata: {name: b}"}}, ""},
		"nothing": {"a: b", nil, "it: it has no field patch"},
		"op":      {"- {op: remove, path: /a}", nil, "it: it has no field patch"},
		"broken":  {"a: [", nil, "it: "},
	} {
		got, err := render.DecodePatches("it", c.text, nil)
		if (err != nil) != (c.error != "") || !strings.Contains(fmt.Sprint(err), c.error) {
			t.Errorf("%s: got error %v, want %q", name, err, c.error)
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestChangesValidate(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		changes render.Changes
		error   string
	}{
		"valid":             {render.Changes{Labels: map[string]string{"example.org/a": "b"}, Annotations: map[string]string{"a": "any text"}}, ""},
		"ownership":         {render.Changes{Labels: map[string]string{kube.LabelReason: "x"}}, "extraLabels: only Towline sets projectsveltos.io/reason"},
		"own annotation":    {render.Changes{Annotations: map[string]string{kube.AnnotationRequestor: "x"}}, "extraAnnotations: only Towline sets towline.dev/requestor"},
		"drift of Sveltos":  {render.Changes{Annotations: map[string]string{kube.AnnotationDriftIgnore: "true"}}, ""},
		"invalid value":     {render.Changes{Labels: map[string]string{"a": "b c"}}, "extraLabels: a: "},
		"invalid key":       {render.Changes{Annotations: map[string]string{"a b": "c"}}, "extraAnnotations: a b: "},
		"empty label value": {render.Changes{Labels: map[string]string{"a": ""}}, ""},
	} {
		err := c.changes.Validate()
		if (err != nil) != (c.error != "") || !strings.Contains(fmt.Sprint(err), c.error) {
			t.Errorf("%s: got error %v, want %q", name, err, c.error)
		}
	}
}
