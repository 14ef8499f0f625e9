package engine_test

import (
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/bundle"
)

// dataKeys returns the keys of a ConfigMap's data, sorted.
func (c *cluster) dataKeys(name string) []string {
	c.t.Helper()
	data, _, err := unstructured.NestedStringMap(c.get(configMaps, c.ns, name).Object, "data")
	if err != nil {
		c.t.Fatal(err)
	}
	var keys []string
	for key := range data {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

func (c *cluster) withData(name string, keys ...string) *unstructured.Unstructured {
	obj := c.configMap(name, "")
	data := map[string]any{}
	for _, key := range keys {
		data[key] = "1"
	}
	obj.Object["data"] = data
	return obj
}

// createAs creates an object like a tool with client-side apply.
func (c *cluster) createAs(manager string, obj *unstructured.Unstructured) {
	c.t.Helper()
	_, err := c.objects.Resource(configMaps).Namespace(c.ns).Create(c.t.Context(), obj, metav1.CreateOptions{FieldManager: manager})
	if err != nil {
		c.t.Fatal(err)
	}
}

// mergeAs patches an object like a tool that changes it later.
func (c *cluster) mergeAs(manager, name, body string) {
	c.t.Helper()
	_, err := c.objects.Resource(configMaps).Namespace(c.ns).Patch(c.t.Context(), name, types.MergePatchType, []byte(body),
		metav1.PatchOptions{FieldManager: manager})
	if err != nil {
		c.t.Fatal(err)
	}
}

// applyAs applies an object like a tool with server-side apply.
func (c *cluster) applyAs(manager string, obj *unstructured.Unstructured) {
	c.t.Helper()
	_, err := c.objects.Resource(configMaps).Namespace(c.ns).Apply(c.t.Context(), obj.GetName(), obj,
		metav1.ApplyOptions{FieldManager: manager, Force: true})
	if err != nil {
		c.t.Fatal(err)
	}
}

// countPatches counts the requests that write an object.
func countPatches(lines []string, name string) int {
	n := 0
	for _, line := range lines {
		if strings.HasPrefix(line, "PATCH") && strings.Contains(line, "/configmaps/"+name+"?") {
			n++
		}
	}
	return n
}

func TestFieldsOfPastManagersAreTakenOver(t *testing.T) {
	t.Parallel()
	const lastApplied = "kubectl.kubernetes.io/last-applied-configuration"
	for name, test := range map[string]struct {
		write        func(*cluster)
		first        []string // after adoption with a and b
		then         []string // after b is dropped from the bundle
		countPatches int
	}{
		"kubectl apply": {func(c *cluster) {
			obj := c.withData("m", "a", "b", "c")
			obj.SetAnnotations(map[string]string{lastApplied: "{}"})
			c.createAs("kubectl-client-side-apply", obj)
		}, []string{"a", "b"}, []string{"a"}, 2},
		"kubectl create, then edit": {func(c *cluster) {
			c.createAs("kubectl-create", c.withData("m", "a", "b"))
			c.mergeAs("kubectl-edit", "m", `{"data":{"c":"1"}}`)
		}, []string{"a", "b"}, []string{"a"}, 2},
		"kubectl apply --server-side": {func(c *cluster) { c.applyAs("kubectl", c.withData("m", "a", "b", "c")) }, []string{"a", "b"}, []string{"a"}, 2},
		"helm 4":                      {func(c *cluster) { c.applyAs("helm", c.withData("m", "a", "b", "c")) }, []string{"a", "b"}, []string{"a"}, 2},
		"helm 3":                      {func(c *cluster) { c.createAs("helm", c.withData("m", "a", "b", "c")) }, []string{"a", "b"}, []string{"a"}, 2},
		"helm 3, then a controller": {func(c *cluster) {
			c.createAs("helm", c.withData("m", "a", "b"))
			c.mergeAs("controller", "m", `{"data":{"c":"1"}}`)
		}, []string{"a", "b", "c"}, []string{"a", "c"}, 2},
		"a controller": {func(c *cluster) {
			c.createAs("controller", c.withData("m", "a", "b", "c"))
		}, []string{"a", "b", "c"}, []string{"a", "b", "c"}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			test.write(c)
			uid := c.get(configMaps, c.ns, "m").GetUID()
			meter := &meter{}
			e := c.engine(meter)
			wantChanges(t, converge(t, e, c.bundle("one", c.withData("m", "a", "b"))).Changes, counts{bundle.Configured: 1})
			if diff := cmp.Diff(c.dataKeys("m"), test.first); diff != "" {
				t.Errorf("keys after adoption (-got +want):\n%s", diff)
			}
			if lines := meter.take(); countPatches(lines, "m") != test.countPatches {
				t.Errorf("adoption: want %d requests that write, got:\n%s", test.countPatches, strings.Join(lines, "\n"))
			}
			if got := c.get(configMaps, c.ns, "m").GetAnnotations()[lastApplied]; got != "" {
				t.Errorf("annotation of kubectl: got %q", got)
			}
			converge(t, e, c.bundle("one", c.withData("m", "a")))
			if diff := cmp.Diff(c.dataKeys("m"), test.then); diff != "" {
				t.Errorf("keys after one is dropped (-got +want):\n%s", diff)
			}
			if lines := meter.take(); countPatches(lines, "m") != 1 {
				t.Errorf("after adoption: want one request that writes, got:\n%s", strings.Join(lines, "\n"))
			}
			withdraw(t, e, bundle.Withdrawal{ID: c.bundle("one").ID})
			if got := c.get(configMaps, c.ns, "m"); got == nil || got.GetUID() != uid {
				t.Errorf("the adopted object after the withdrawal: got %v", got)
			}
		})
	}
}

// TestLaterChangesByKubectlStay adds a key with kubectl after the adoption of an object. The engine does not take this
// key over.
func TestLaterChangesByKubectlStay(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	c.createAs("kubectl-create", c.withData("m", "a"))
	converge(t, e, c.bundle("one", c.withData("m", "a")))
	c.mergeAs("kubectl-edit", "m", `{"data":{"c":"1"}}`)
	converge(t, e, c.bundle("one", c.withData("m", "a", "b")))
	if diff := cmp.Diff(c.dataKeys("m"), []string{"a", "b", "c"}); diff != "" {
		t.Errorf("keys (-got +want):\n%s", diff)
	}
}

// TestInterruptedAdoptionIsContinued changes the object before the request that takes the fields over, and cuts the
// connection between this request and the apply request.
func TestInterruptedAdoptionIsContinued(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.createAs("kubectl-client-side-apply", c.withData("m", "a", "b"))
	b := c.bundle("one", c.withData("m", "a"))
	plain, cut := c.cfg, false
	c.cfg = rest.CopyConfig(plain)
	c.cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if r.Method != http.MethodPatch || !strings.HasSuffix(r.URL.Path, "/configmaps/m") {
				return next.RoundTrip(r)
			}
			if r.Header.Get("Content-Type") == string(types.ApplyPatchType) {
				cut = true
				return nil, errCut
			}
			if len(c.get(configMaps, c.ns, "m").GetLabels()) == 0 {
				c.mergeAs("another", "m", `{"metadata":{"labels":{"changed":"meanwhile"}}}`)
			}
			return next.RoundTrip(r)
		})
	})
	wantConvergeError(t, c.engine(nil), b)
	if !cut {
		t.Fatal("the object was not applied")
	}
	if diff := cmp.Diff(c.dataKeys("m"), []string{"a", "b"}); diff != "" {
		t.Errorf("keys before the object is applied (-got +want):\n%s", diff)
	}
	c.cfg = plain
	converge(t, c.engine(nil), b)
	if diff := cmp.Diff(c.dataKeys("m"), []string{"a"}); diff != "" {
		t.Errorf("keys (-got +want):\n%s", diff)
	}
	withdraw(t, c.engine(nil), bundle.Withdrawal{ID: b.ID})
	if got := c.get(configMaps, c.ns, "m"); got == nil || got.GetLabels()["changed"] != "meanwhile" {
		t.Errorf("the adopted object after the withdrawal: got %v", got)
	}
}

// TestObjectCreatedMeanwhileIsTakenOver creates the object as another client right before the engine creates it.
func TestObjectCreatedMeanwhileIsTakenOver(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	plain, created := c.cfg, false
	c.cfg = rest.CopyConfig(plain)
	c.cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if r.Method == http.MethodPatch && strings.HasSuffix(r.URL.Path, "/configmaps/m") && !created {
				created = true
				c.createAs("helm", c.withData("m", "a", "b"))
			}
			return next.RoundTrip(r)
		})
	})
	converge(t, c.engine(nil), c.bundle("one", c.withData("m", "a")))
	if diff := cmp.Diff(c.dataKeys("m"), []string{"a"}); diff != "" {
		t.Errorf("keys (-got +want):\n%s", diff)
	}
}

// TestAllocatedAndDefaultedFieldsSurviveAdoption has objects whose creator owns fields that the API server has set.
func TestAllocatedAndDefaultedFieldsSurviveAdoption(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	const manifest = `
apiVersion: v1
kind: Service
metadata: {name: web, namespace: NS}
spec: {selector: {app: web}, ports: [{port: 80}], type: NodePort}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: web, namespace: NS}
spec: {accessModes: [ReadWriteOnce], storageClassName: none, resources: {requests: {storage: 1Gi}}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: NS}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: web, image: example.com/web:v1}]}
`
	services := schema.GroupVersionResource{Version: "v1", Resource: "services"}
	resources := []schema.GroupVersionResource{
		services, {Version: "v1", Resource: "persistentvolumeclaims"}, {Group: "apps", Version: "v1", Resource: "deployments"},
	}
	objects := decode(t, strings.ReplaceAll(manifest, "NS", c.ns))
	var specs []any
	for i, gvr := range resources {
		_, err := c.objects.Resource(gvr).Namespace(c.ns).Create(t.Context(), objects[i], metav1.CreateOptions{FieldManager: "kubectl-client-side-apply"})
		if err != nil {
			t.Fatal(err)
		}
		// The manager "before-first-apply" owns all fields with values of the API server.
		obj := c.get(gvr, c.ns, "web")
		obj.SetManagedFields([]metav1.ManagedFieldsEntry{{}})
		obj.SetResourceVersion("") // controllers change the status meanwhile
		if _, err := c.objects.Resource(gvr).Namespace(c.ns).Update(t.Context(), obj, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		specs = append(specs, c.get(gvr, c.ns, "web").Object["spec"])
	}
	for i, gvr := range resources {
		_, err := c.objects.Resource(gvr).Namespace(c.ns).Apply(t.Context(), "web", objects[i], metav1.ApplyOptions{FieldManager: "kubectl", Force: true})
		if err != nil {
			t.Fatal(err)
		}
	}
	wantChanges(t, converge(t, c.engine(nil), c.bundle("one", objects...)).Changes, counts{bundle.Configured: 3})
	for i, gvr := range resources {
		obj := c.get(gvr, c.ns, "web")
		if diff := cmp.Diff(obj.Object["spec"], specs[i]); diff != "" {
			t.Errorf("spec of %s (-got +want):\n%s", gvr.Resource, diff)
		}
		for _, entry := range obj.GetManagedFields() {
			if entry.Manager == "kubectl" || entry.Manager == "before-first-apply" {
				t.Errorf("%s still has the manager %s", gvr.Resource, entry.Manager)
			}
		}
	}
}
