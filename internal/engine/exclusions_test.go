package engine_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
)

var deployments = schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}

// Contents: N stands for a number that each delivery increases.
const (
	excludedConfigMap = `
apiVersion: v1
kind: ConfigMap
metadata: {name: it, annotations: {note: "N", more: "N"}}
data: {key: "N", other: "N"}
`
	excludedOnlyKey = `
apiVersion: v1
kind: ConfigMap
metadata: {name: it, annotations: {note: "N"}}
data: {key: "N"}
`
	excludedFinalizers = `
apiVersion: v1
kind: ConfigMap
metadata: {name: it, finalizers: [example.com/a, example.com/bN]}
data: {other: "N"}
`
	excludedDeployment = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: it}
spec:
  replicas: N
  selector: {matchLabels: {app: it}}
  template:
    metadata: {labels: {app: it}}
    spec:
      containers:
      - {name: side, image: "side:N"}
      - {name: web, image: "web:N", args: ["N", "N"], ports: [{containerPort: 80, name: pN}]}
`
	sideImage = "/spec/template/spec/containers/0/image"
	webImage  = "/spec/template/spec/containers/1/image"
	webArgs   = "/spec/template/spec/containers/1/args"
)

// excludedCase is one exclusion, and a change of another client.
type excludedCase struct {
	content string
	paths   []string
	// change has the JSON 6902 operations of the other client.
	change string
	// corrected are the values after the change, second after the next delivery, third after a delivery without
	// exclusions. A pointer to a missing value has the value "<nil>".
	corrected, second, third map[string]string
}

func excludedCases() map[string]excludedCase {
	scale := `[{"op":"replace","path":"/spec/replicas","value":5},{"op":"replace","path":"` + sideImage + `","value":"theirs"}]`
	return map[string]excludedCase{
		"a key": {
			excludedConfigMap, []string{"/data/key"}, `[{"op":"replace","path":"/data/key","value":"theirs"},{"op":"replace","path":"/data/other","value":"theirs"}]`,
			map[string]string{"/data/key": "theirs", "/data/other": "1"}, map[string]string{"/data/key": "theirs", "/data/other": "2"}, map[string]string{"/data/key": "3", "/data/other": "3"},
		},
		"a key that is removed": {
			excludedConfigMap, []string{"/data/key"}, `[{"op":"remove","path":"/data/key"},{"op":"replace","path":"/data/other","value":"theirs"}]`,
			map[string]string{"/data/key": "<nil>", "/data/other": "1"}, map[string]string{"/data/key": "<nil>", "/data/other": "2"}, map[string]string{"/data/key": "3"},
		},
		"a key that no client changes": {
			excludedConfigMap, []string{"/data/key"}, `[{"op":"replace","path":"/data/other","value":"theirs"}]`,
			map[string]string{"/data/key": "1", "/data/other": "1"}, map[string]string{"/data/key": "1", "/data/other": "2"}, map[string]string{"/data/key": "3"},
		},
		"a map": {
			excludedConfigMap, []string{"/data"}, `[{"op":"replace","path":"/data/key","value":"theirs"},{"op":"replace","path":"/metadata/annotations/note","value":"theirs"}]`,
			map[string]string{"/data/key": "theirs", "/data/other": "1", "/metadata/annotations/note": "1"},
			map[string]string{"/data/key": "theirs", "/data/other": "1", "/metadata/annotations/note": "2"}, map[string]string{"/data/key": "3", "/data/other": "3"},
		},
		"annotations": {
			excludedConfigMap, []string{"/metadata/annotations"}, `[{"op":"replace","path":"/metadata/annotations/note","value":"theirs"},{"op":"replace","path":"/data/key","value":"theirs"}]`,
			map[string]string{"/metadata/annotations/note": "theirs", "/metadata/annotations/more": "1", "/data/key": "1"},
			map[string]string{"/metadata/annotations/note": "theirs", "/metadata/annotations/more": "1", "/data/key": "2"}, map[string]string{"/metadata/annotations/note": "3"},
		},
		"replicas": {
			excludedDeployment, []string{"/spec/replicas"}, scale,
			map[string]string{"/spec/replicas": "5", sideImage: "side:1"}, map[string]string{"/spec/replicas": "5", sideImage: "side:2"}, map[string]string{"/spec/replicas": "3"},
		},
		// Without a value in the request, the API server would set the default.
		"replicas that no client changes": {
			excludedDeployment, []string{"/spec/replicas"}, `[{"op":"replace","path":"/spec/replicas","value":1},{"op":"replace","path":"/spec/replicas","value":1}]`,
			map[string]string{"/spec/replicas": "1"}, map[string]string{"/spec/replicas": "1", sideImage: "side:2"}, map[string]string{"/spec/replicas": "3"},
		},
		"an item of a list with keys": {
			excludedDeployment, []string{webImage},
			`[{"op":"replace","path":"` + webImage + `","value":"theirs"},{"op":"replace","path":"` + sideImage + `","value":"theirs"}]`,
			map[string]string{webImage: "theirs", sideImage: "side:1"}, map[string]string{webImage: "theirs", sideImage: "side:2", webArgs + "/0": "2"}, map[string]string{webImage: "web:3"},
		},
		"an item after an added one": {
			excludedDeployment, []string{webImage},
			`[{"op":"replace","path":"` + webImage + `","value":"theirs"},{"op":"add","path":"/spec/template/spec/containers/0","value":{"name":"injected","image":"injected"}},{"op":"replace","path":"/spec/replicas","value":7}]`,
			map[string]string{"/spec/replicas": "1", "image of web": "theirs", "image of side": "side:1", "image of injected": "injected"},
			map[string]string{"/spec/replicas": "2", "image of web": "theirs", "image of side": "side:2", "image of injected": "injected"}, map[string]string{"image of web": "web:3"},
		},
		"all containers": {
			excludedDeployment, []string{"/spec/template/spec/containers"},
			`[{"op":"replace","path":"` + webImage + `","value":"theirs"},{"op":"replace","path":"/spec/replicas","value":7}]`,
			map[string]string{"/spec/replicas": "1", webImage: "theirs", sideImage: "side:1", webArgs + "/0": "1"},
			map[string]string{"/spec/replicas": "2", webImage: "theirs", sideImage: "side:1", webArgs + "/0": "1"}, map[string]string{webImage: "web:3", sideImage: "side:3"},
		},
		"an item of a list without keys": {
			excludedDeployment, []string{webArgs + "/1"},
			`[{"op":"replace","path":"` + webArgs + `/1","value":"theirs"},{"op":"replace","path":"` + webArgs + `/0","value":"theirs"}]`,
			map[string]string{webArgs + "/0": "1", webArgs + "/1": "theirs"}, map[string]string{webArgs + "/0": "2", webArgs + "/1": "theirs"}, map[string]string{webArgs + "/1": "3"},
		},
		"the only key, that is removed": {
			excludedOnlyKey, []string{"/data/key"}, `[{"op":"remove","path":"/data"},{"op":"replace","path":"/metadata/annotations/note","value":"theirs"}]`,
			map[string]string{"/data": "<nil>", "/metadata/annotations/note": "1"}, map[string]string{"/data": "<nil>", "/metadata/annotations/note": "2"}, map[string]string{"/data/key": "3"},
		},
		"the only key, that no client changes": {
			excludedOnlyKey, []string{"/data/key"}, `[{"op":"replace","path":"/metadata/annotations/note","value":"theirs"}]`,
			map[string]string{"/data/key": "1", "/metadata/annotations/note": "1"}, map[string]string{"/data/key": "1", "/metadata/annotations/note": "2"}, map[string]string{"/data/key": "3"},
		},
		"an item that is removed": {
			excludedDeployment, []string{"/spec/template/spec/containers/1"},
			`[{"op":"remove","path":"/spec/template/spec/containers/1"},{"op":"replace","path":"` + sideImage + `","value":"theirs"}]`,
			map[string]string{"image of web": "<nil>", "image of side": "side:1"}, map[string]string{"image of web": "<nil>", "image of side": "side:2"},
			map[string]string{"image of web": "web:3", "image of side": "side:3"},
		},
		// An item without its image would be invalid.
		"a field of an item that is removed": {
			excludedDeployment, []string{webImage}, `[{"op":"remove","path":"/spec/template/spec/containers/1"}]`,
			map[string]string{"image of web": "web:1"}, map[string]string{"image of web": "web:1", "image of side": "side:2"}, map[string]string{"image of web": "web:3"},
		},
		"an item of a list without keys that is removed": {
			excludedDeployment, []string{webArgs + "/1"}, `[{"op":"remove","path":"` + webArgs + `/1"},{"op":"replace","path":"` + sideImage + `","value":"theirs"}]`,
			map[string]string{webArgs + "/0": "1", webArgs + "/1": "<nil>", sideImage: "side:1"},
			map[string]string{webArgs + "/0": "2", webArgs + "/1": "<nil>", sideImage: "side:2"}, map[string]string{webArgs + "/1": "3"},
		},
		"the items of a list that is removed": {
			excludedDeployment, []string{webArgs + "/0", webArgs + "/1"}, `[{"op":"remove","path":"` + webArgs + `"},{"op":"replace","path":"` + sideImage + `","value":"theirs"}]`,
			map[string]string{webArgs: "<nil>", sideImage: "side:1"}, map[string]string{webArgs: "<nil>", sideImage: "side:2"}, map[string]string{webArgs + "/1": "3"},
		},
		"an item of a set that is removed": {
			excludedFinalizers, []string{"/metadata/finalizers/0"}, `[{"op":"remove","path":"/metadata/finalizers/0"},{"op":"replace","path":"/data/other","value":"theirs"}]`,
			map[string]string{"/metadata/finalizers": "[example.com/b1]", "/data/other": "1"}, map[string]string{"/metadata/finalizers": "[example.com/b2]", "/data/other": "2"},
			map[string]string{"/data/other": "3"},
		},
		"an item of a set after an added one": {
			excludedFinalizers, []string{"/metadata/finalizers/1"},
			`[{"op":"replace","path":"/metadata/finalizers","value":["example.com/theirs","example.com/b1"]},{"op":"replace","path":"/data/other","value":"theirs"}]`,
			map[string]string{"finalizers": "[example.com/a example.com/b1 example.com/theirs]", "/data/other": "1"},
			map[string]string{"finalizers": "[example.com/a example.com/b1 example.com/theirs]", "/data/other": "2"},
			map[string]string{"/data/other": "3"},
		},
	}
}

// TestExcludedFieldsStay applies an object, changes it as another client, and delivers it again. Drift correction,
// deliveries and a restart do not change excluded fields. Other fields are corrected.
func TestExcludedFieldsStay(t *testing.T) {
	t.Parallel()
	for name, excluded := range excludedCases() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			resource, kind := configMaps, "ConfigMap"
			if strings.Contains(excluded.content, "Deployment") {
				resource, kind = deployments, "Deployment"
			}
			delivery := func(number string, paths []string) bundle.Bundle {
				b := c.bundle("one", c.parseObject(strings.ReplaceAll(excluded.content, "N", number)))
				if len(paths) > 0 {
					b.Options.DriftExclusions = []libv1beta1.DriftExclusion{{Paths: paths, Target: &libv1beta1.PatchSelector{Kind: kind, Name: "i."}}}
				}
				return b
			}
			t.Cleanup(func() { c.removeFinalizers(resource) })
			converge(t, c.engine(nil), delivery("1", excluded.paths))
			c.applyJSONPatch(resource, "it", excluded.change)
			h := c.runEngine(t, nil)
			c.awaitValues(resource, "corrected", excluded.corrected)
			if changes := converge(t, h.Engine, delivery("1", excluded.paths)).Changes; len(changes) != 1 || changes[0].Action != bundle.Unchanged {
				t.Errorf("changes of the same delivery: %v", changes)
			}
			c.awaitValues(resource, "after the same delivery", excluded.corrected)
			eventually(t, "second delivery, after a restart", func() bool {
				// The first Engine still runs, and may write the record meanwhile.
				_, err := c.engine(nil).Converge(t.Context(), delivery("2", excluded.paths))
				return !apierrors.IsConflict(err)
			})
			c.awaitValues(resource, "after the second delivery", excluded.second)
			converge(t, h.Engine, delivery("3", nil))
			c.awaitValues(resource, "without exclusions", excluded.third)
		})
	}
}

// TestExclusionsAreForTheirTargets corrects objects that no exclusion selects, and creates a deleted object with all
// its fields.
func TestExclusionsAreForTheirTargets(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.bundle("one", c.configMap("excluded", "1"), c.configMap("corrected", "1"))
	b.Options.DriftExclusions = []libv1beta1.DriftExclusion{
		{Paths: []string{"/data/key"}, Target: &libv1beta1.PatchSelector{Name: "excl"}},
		{Paths: []string{"/data/key"}, Target: &libv1beta1.PatchSelector{Name: "excluded", Namespace: c.ns}},
		{Paths: []string{"/data/key"}, Target: &libv1beta1.PatchSelector{Name: "corrected", Kind: "Secret"}},
		{Paths: []string{"/data/key"}, Target: &libv1beta1.PatchSelector{LabelSelector: "a=b"}},
	}
	h := c.runEngine(t, nil)
	converge(t, h.Engine, b)
	c.patch(configMaps, "excluded", `{"data":{"key":"2"}}`)
	c.patch(configMaps, "corrected", `{"data":{"key":"2"}}`)
	eventually(t, "corrected", func() bool { return c.value("corrected") == "1" })
	if got := c.value("excluded"); got != "2" {
		t.Errorf("excluded: got %q", got)
	}
	c.delete(configMaps, "excluded")
	eventually(t, "created again", func() bool { return c.value("excluded") == "1" })
}

// TestExclusionsOfAdoptedObject does not change the excluded field of an existing object.
func TestExclusionsOfAdoptedObject(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	existing := c.configMap("it", "theirs")
	existing.Object["data"].(map[string]any)["other"] = "theirs"
	c.create(configMaps, existing)
	desired := c.configMap("it", "1")
	desired.Object["data"].(map[string]any)["other"] = "1"
	b := c.bundle("one", desired)
	b.Options.DriftExclusions = []libv1beta1.DriftExclusion{{Paths: []string{"/data/key"}}}
	converge(t, c.engine(nil), b)
	c.awaitValues(configMaps, "adopted", map[string]string{"/data/key": "theirs", "/data/other": "1"})
}

// TestExcludedFieldsAreNotOwned delivers content without an excluded field, which stays on the member. Then another
// client applies the field without force, and deletes it.
func TestExcludedFieldsAreNotOwned(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	delivery := func(keys ...string) bundle.Bundle {
		b := c.bundle("one", c.withData("it", keys...))
		b.Options.DriftExclusions = []libv1beta1.DriftExclusion{{Paths: []string{"/data/key"}}}
		return b
	}
	converge(t, e, delivery("key", "a"))
	converge(t, e, delivery("b"))
	if diff := cmp.Diff([]string{"b", "key"}, c.dataKeys("it")); diff != "" {
		t.Errorf("keys (-want +got):\n%s", diff)
	}
	theirs := c.configMap("it", "theirs")
	apply := func() {
		t.Helper()
		_, err := c.objects.Resource(configMaps).Namespace(c.ns).Apply(t.Context(), "it", theirs, metav1.ApplyOptions{FieldManager: "another"})
		if err != nil {
			t.Fatal(err)
		}
	}
	apply()
	converge(t, e, delivery("key", "b", "c"))
	if got := c.value("it"); got != "theirs" {
		t.Errorf("got %q", got)
	}
	delete(theirs.Object, "data")
	apply()
	if diff := cmp.Diff([]string{"b", "c"}, c.dataKeys("it")); diff != "" {
		t.Errorf("keys (-want +got):\n%s", diff)
	}
}

// TestExclusionsOfObjectsOfPastManagers adopts objects of kubectl. The engine takes over its fields but the excluded
// one.
func TestExclusionsOfObjectsOfPastManagers(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.createAs("kubectl-client-side-apply", c.withData("has", "key", "old"))
	c.createAs("kubectl-client-side-apply", c.withData("lacks", "old"))
	b := c.bundle("one", c.withData("has", "new"), c.withData("lacks", "key", "new"))
	b.Options.DriftExclusions = []libv1beta1.DriftExclusion{{Paths: []string{"/data/key"}}}
	converge(t, c.engine(nil), b)
	for name, want := range map[string][]string{"has": {"key", "new"}, "lacks": {"new"}} {
		if diff := cmp.Diff(want, c.dataKeys(name)); diff != "" {
			t.Errorf("keys of %s (-want +got):\n%s", name, diff)
		}
	}
}

// TestExclusionsOfObjectChangedMeanwhile creates or replaces an object as another client right before it is applied:
// its excluded field stays. Force creates the object again, with the delivered value.
func TestExclusionsOfObjectChangedMeanwhile(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		exists, force bool
		meanwhile     func(c *cluster)
		want          string
	}{
		"created":  {meanwhile: func(c *cluster) { c.create(configMaps, c.configMap("it", "theirs")) }, want: "theirs"},
		"replaced": {exists: true, meanwhile: func(c *cluster) { c.delete(configMaps, "it"); c.create(configMaps, c.configMap("it", "theirs")) }, want: "theirs"},
		"deleted":  {exists: true, meanwhile: func(c *cluster) { c.delete(configMaps, "it") }, want: "2"},
		"made immutable": {exists: true, force: true, meanwhile: func(c *cluster) {
			c.patch(configMaps, "it", `{"immutable":true,"data":{"key":"theirs"}}`)
		}, want: "2"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			delivery := func(value string) bundle.Bundle {
				object := c.configMap("it", value)
				object.Object["data"].(map[string]any)["other"] = value
				b := c.bundle("one", object)
				b.Items[0].Force = test.force
				b.Options.DriftExclusions = []libv1beta1.DriftExclusion{{Paths: []string{"/data/key"}}}
				return b
			}
			if test.exists {
				converge(t, c.engine(nil), delivery("1"))
			}
			changed := false
			c.beforePatch("/configmaps/it", func() { changed = true; test.meanwhile(c) })
			converge(t, c.engine(nil), delivery("2"))
			c.awaitValues(configMaps, "applied", map[string]string{"/data/key": test.want, "/data/other": "2"})
			if !changed {
				t.Error("the object was not applied")
			}
		})
	}
}

func TestInvalidExclusions(t *testing.T) {
	t.Parallel()
	for path, invalid := range map[string]libv1beta1.DriftExclusion{
		"is not a JSON pointer":  {Paths: []string{"spec/replicas"}},
		"identifies the object":  {Paths: []string{"/metadata/name"}},
		"target: error parsing":  {Paths: []string{"/spec"}, Target: &libv1beta1.PatchSelector{Name: "("}},
		"target.labelSelector: ": {Paths: []string{"/spec"}, Target: &libv1beta1.PatchSelector{LabelSelector: "a in"}},
	} {
		err := engine.CheckDriftExclusions([]libv1beta1.DriftExclusion{{Paths: []string{"/spec/replicas"}}, invalid})
		if err == nil || !strings.HasPrefix(err.Error(), "driftExclusions[1]: ") || !strings.Contains(err.Error(), path) {
			t.Errorf("got error %v, want %q", err, path)
		}
	}
	c := newCluster(t)
	b := c.bundle("one", c.configMap("it", "1"))
	b.Options.DriftExclusions = []libv1beta1.DriftExclusion{{Paths: []string{"data"}}}
	if report := wantConvergeError(t, c.engine(nil), b); !strings.Contains(report.Message, "driftExclusions[0]") {
		t.Errorf("message: %s", report.Message)
	}
	c.wantNames(configMaps)
}

// parseObject decodes an object in the namespace of the test.
func (c *cluster) parseObject(text string) *unstructured.Unstructured {
	c.t.Helper()
	object := &unstructured.Unstructured{}
	raw, err := yaml.YAMLToJSON([]byte(text))
	if err == nil {
		err = object.UnmarshalJSON(raw)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	object.SetNamespace(c.ns)
	return object
}

// applyJSONPatch applies JSON 6902 operations as another client.
func (c *cluster) applyJSONPatch(gvr schema.GroupVersionResource, name, operations string) {
	c.t.Helper()
	_, err := c.objects.Resource(gvr).Namespace(c.ns).Patch(c.t.Context(), name, types.JSONPatchType, []byte(operations), metav1.PatchOptions{FieldManager: "another"})
	if err != nil {
		c.t.Fatal(err)
	}
}

// removeFinalizers removes the finalizers of the object "it".
func (c *cluster) removeFinalizers(gvr schema.GroupVersionResource) {
	_, err := c.objects.Resource(gvr).Namespace(c.ns).Patch(context.WithoutCancel(c.t.Context()), "it", types.MergePatchType,
		[]byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		c.t.Error(err)
	}
}

// awaitValues waits until the object "it" has the values at JSON pointers. "image of web" is a container's image, and
// "finalizers" are the finalizers in alphabetical order.
func (c *cluster) awaitValues(gvr schema.GroupVersionResource, what string, want map[string]string) {
	c.t.Helper()
	got := map[string]string{}
	defer func() {
		if c.t.Failed() {
			c.t.Logf("%s: got %v, want %v", what, got, want)
		}
	}()
	eventually(c.t, what, func() bool {
		object := c.get(gvr, c.ns, "it")
		for pointer := range want {
			got[pointer] = c.valueAt(object, pointer)
		}
		return maps.Equal(got, want)
	})
}

func (c *cluster) valueAt(object *unstructured.Unstructured, pointer string) string {
	c.t.Helper()
	if pointer == "finalizers" {
		return fmt.Sprint(slices.Sorted(slices.Values(object.GetFinalizers())))
	}
	if name, ok := strings.CutPrefix(pointer, "image of "); ok {
		containers, _, _ := unstructured.NestedSlice(object.Object, "spec", "template", "spec", "containers")
		i := slices.IndexFunc(containers, func(item any) bool { return item.(map[string]any)["name"] == name })
		pointer = fmt.Sprintf("/spec/template/spec/containers/%d/image", i)
	}
	var value any = object.Object
	for token := range strings.SplitSeq(strings.TrimPrefix(pointer, "/"), "/") {
		switch parent := value.(type) {
		case map[string]any:
			value = parent[token]
		case []any:
			var index int
			if _, err := fmt.Sscan(token, &index); err != nil || index < 0 || index >= len(parent) {
				return "<nil>"
			}
			value = parent[index]
		}
	}
	return fmt.Sprint(value)
}
