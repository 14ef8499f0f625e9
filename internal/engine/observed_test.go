package engine_test

import (
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
)

func TestObserveReadsWhatChanged(t *testing.T) {
	t.Parallel()
	const claims = 20
	c := newCluster(t)
	resource := schema.GroupVersionResource{Version: "v1", Resource: "persistentvolumeclaims"}
	api := c.objects.Resource(resource).Namespace(c.ns)
	var objects []*unstructured.Unstructured
	for i := range claims {
		objects = append(objects, decode(t, fmt.Sprintf(`
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: c-%02d, namespace: %s}
spec: {accessModes: [ReadWriteOnce], storageClassName: none, resources: {requests: {storage: 1Gi}}}
`, i, c.ns))...)
	}
	b := c.bundle("one", objects...)
	meter := &meter{}
	e := c.engine(meter)
	converge(t, e, b)
	meter.take()
	// observe returns the observations by name, and fails the test if they need more than want requests.
	observe := func(what string, want int) map[string]engine.Observation {
		t.Helper()
		all, err := e.Observe(t.Context(), b.ID)
		if err != nil || len(all) != claims {
			t.Fatalf("%s: got %d observations, error %v", what, len(all), err)
		}
		if lines := meter.take(); len(lines) > want {
			t.Errorf("%s: want at most %d requests, got:\n%s", what, want, strings.Join(lines, "\n"))
		}
		byName := map[string]engine.Observation{}
		for _, one := range all {
			byName[one.Ref.Name] = one
		}
		return byName
	}
	for name, one := range observe("first", claims) {
		if one.Health != engine.Unhealthy || !strings.Contains(string(one.Status), "Pending") {
			t.Errorf("%s: got %s %s", name, one.Health, one.Status)
		}
	}
	if got := observe("nothing changed", 1)["c-07"]; got.Health != engine.Unhealthy || !strings.Contains(string(got.Status), "Pending") {
		t.Errorf("unchanged: got %s %s", got.Health, got.Status)
	}
	_, err := api.Patch(t.Context(), "c-07", types.MergePatchType, []byte(`{"status":{"phase":"Lost"}}`), metav1.PatchOptions{}, "status")
	if err != nil {
		t.Fatal(err)
	}
	if got := observe("one changed", 2)["c-07"]; !strings.Contains(string(got.Status), "Lost") {
		t.Errorf("changed: got %s", got.Status)
	}
	_, err = api.Patch(t.Context(), "c-08", types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := api.Delete(t.Context(), "c-08", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "deleted", func() bool { return c.get(resource, c.ns, "c-08") == nil })
	for range 2 {
		if got := observe("one deleted", 2)["c-08"]; got.Health != engine.Unknown || got.Status != nil || got.Resource != resource.Resource {
			t.Errorf("deleted: got %s %s", got.Health, got.Status)
		}
	}
	converge(t, e, b)
	meter.take()
	if got := observe("one created again", 2)["c-08"]; got.Health != engine.Unhealthy || got.Status == nil {
		t.Errorf("created again: got %s %s", got.Health, got.Status)
	}
	for _, obj := range objects {
		_, err = api.Patch(t.Context(), obj.GetName(), types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	if all, err := e.Observe(t.Context(), b.ID); err != nil || len(all) > 0 {
		t.Errorf("withdrawn: got %v, %v", all, err)
	}
}
