package works_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/works"
)

// there is a cluster that is reached and stays.
var there = works.Circumstances{Reachable: true}

const deployment = `
apiVersion: apps/v1
kind: Deployment
metadata:
  name: web
  namespace: OBJECTS
  uid: 11111111-1111-1111-1111-111111111111
  resourceVersion: "1"
  creationTimestamp: "2020-01-01T00:00:00Z"
  finalizers: [example.com/never]
  ownerReferences: [{apiVersion: v1, kind: ConfigMap, name: none, uid: 22222222-2222-2222-2222-222222222222}]
  annotations: {deployment.kubernetes.io/revision: "7", note: kept}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: web, image: example.com/web:v1}]}
status: {replicas: 9}
`

func TestWorkIsApplied(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	made := w.work("one", deployment, configMap("two", "1"))
	w.must(w.execute("one", there))
	w.wantCondition("one", "Applied", metav1.ConditionTrue, "AppliedSuccessful", "Manifest has been successfully applied")
	w.wantCondition("one", "Dispatching", metav1.ConditionTrue, "Dispatching", "Work is being dispatched to member clusters.")

	web := &appsv1.Deployment{}
	w.must(w.Get(t.Context(), client.ObjectKey{Namespace: w.objects, Name: "web"}, web))
	for name, want := range map[string]string{"karmada.io/managed": "true", "work.karmada.io/permanent-id": string(made.UID)} {
		if got := web.Labels[name]; got != want {
			t.Errorf("label %s: got %q, want %q", name, got, want)
		}
	}
	for name, want := range map[string]string{
		"work.karmada.io/name": "one", "work.karmada.io/namespace": w.space, "note": "kept", "towline.dev/hub": "hub", "towline.dev/scope": w.space,
	} {
		if got := web.Annotations[name]; got != want {
			t.Errorf("annotation %s: got %q, want %q", name, got, want)
		}
	}
	if len(web.Finalizers)+len(web.OwnerReferences) > 0 || web.UID == "11111111-1111-1111-1111-111111111111" {
		t.Errorf("not pruned: %v %v", web.Finalizers, web.OwnerReferences)
	}

	w.eventually("the status of the Deployment is reported", func() bool {
		w.must(w.execute("one", there))
		return w.get("one").Status.ManifestStatuses[0].Health == workv1alpha1.ResourceHealthy
	})
	statuses := w.get("one").Status.ManifestStatuses
	if got := string(statuses[0].Status.Raw); !strings.Contains(got, `"availableReplicas":2`) {
		t.Errorf("status: got %s", got)
	}
	want := []workv1alpha1.ResourceIdentifier{
		{Ordinal: 0, Group: "apps", Version: "v1", Kind: "Deployment", Resource: "deployments", Namespace: w.objects, Name: "web"},
		{Ordinal: 1, Version: "v1", Kind: "ConfigMap", Resource: "configmaps", Namespace: w.objects, Name: "two"},
	}
	if diff := cmp.Diff([]workv1alpha1.ResourceIdentifier{statuses[0].Identifier, statuses[1].Identifier}, want); diff != "" {
		t.Errorf("identifiers (-got +want):\n%s", diff)
	}
	if statuses[1].Status != nil || statuses[1].Health != workv1alpha1.ResourceHealthy {
		t.Errorf("ConfigMap: got %v", statuses[1])
	}

	// Nothing new, nothing written.
	before := w.get("one").ResourceVersion
	w.must(w.execute("one", there))
	if got := w.get("one").ResourceVersion; got != before {
		t.Error("the Work was written again")
	}
}

func TestManifestThatLeavesTheWorkIsPruned(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.work("one", configMap("a", "1"), configMap("b", "1"))
	w.must(w.execute("one", there))
	w.change("one", func(work *workv1alpha1.Work) {
		work.Spec.Workload.Manifests = []workv1alpha1.Manifest{w.manifest(configMap("b", "2"))}
	})
	w.must(w.execute("one", there))
	if w.value("a") != "" || w.value("b") != "2" {
		t.Errorf("got a=%q b=%q", w.value("a"), w.value("b"))
	}
}

func TestWhatCannotBeAppliedIsSaid(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.set("theirs", "0")
	w.work("one", configMap("theirs", "1"), configMap("ours", "1"), "{apiVersion: example.com/v1, kind: Nothing, metadata: {name: a, namespace: OBJECTS}}")
	var before string
	for i := range 3 {
		if err := w.execute("one", there); err == nil {
			t.Error("no error")
		}
		if got := w.get("one").ResourceVersion; i > 0 && got != before {
			t.Error("the same problem was written again")
		}
		before = w.get("one").ResourceVersion
	}
	w.wantCondition("one", "Applied", metav1.ConditionFalse, "AppliedFailed", fmt.Sprintf("Failed to apply all manifests (1/3): "+
		"ConfigMap %[1]s/theirs already exists in the cluster and is not managed; annotation work.karmada.io/conflict-resolution: overwrite takes it over; "+
		"Nothing example.com %[1]s/a: the cluster does not know this kind, and no CustomResourceDefinition of the bundle defines it", w.objects))
	if w.value("theirs") != "0" || w.value("ours") != "1" {
		t.Errorf("got theirs=%q ours=%q", w.value("theirs"), w.value("ours"))
	}
	for i, want := range []workv1alpha1.ResourceHealth{"Unknown", "Healthy", "Unknown"} {
		if got := w.get("one").Status.ManifestStatuses[i]; got.Health != want || got.Identifier.Ordinal != i || got.Status != nil {
			t.Errorf("status of manifest %d: got %v", i, got)
		}
	}
	w.change("one", func(work *workv1alpha1.Work) {
		work.Spec.Workload.Manifests = work.Spec.Workload.Manifests[:2]
		work.Annotations = map[string]string{"work.karmada.io/conflict-resolution": "overwrite"}
	})
	w.must(w.execute("one", there))
	w.wantCondition("one", "Applied", metav1.ConditionTrue, "AppliedSuccessful", "")
	if got := w.value("theirs"); got != "1" {
		t.Errorf("overwritten: got %q", got)
	}
}

func TestUnreachedClusterIsSaidInOneMessage(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.work("one", configMap("a", "1"))
	executor := w.executor()
	var err error
	executor.Engine, err = engine.New(&rest.Config{Host: "http://127.0.0.1:1"}, engine.Options{})
	w.must(err)
	if _, err := executor.Execute(t.Context(), w.get("one"), there); err == nil {
		t.Error("no error")
	}
	w.wantCondition("one", "Applied", metav1.ConditionFalse, "AppliedFailed", "Failed to apply all manifests (0/1): the cluster does not answer")
	w.must(w.execute("one", works.Circumstances{}))
	if got := w.value("a"); got != "" {
		t.Errorf("applied though the cluster is not reached: %q", got)
	}
}

func TestSuspendedWorkStaysAsItIs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.heal(t)
	suspend := func(yes bool) func(*workv1alpha1.Work) {
		return func(work *workv1alpha1.Work) {
			work.Spec.SuspendDispatching = ptr.To(yes)
			work.Spec.Workload.Manifests = []workv1alpha1.Manifest{w.manifest(configMap("a", fmt.Sprintf("%d", work.Generation)))}
		}
	}
	w.work("one", configMap("a", "first"))
	w.change("one", suspend(true))
	w.must(w.execute("one", there))
	w.wantCondition("one", "Dispatching", metav1.ConditionFalse, "SuspendDispatching", "Work dispatching is in a suspended state.")
	if got := w.value("a"); got != "" {
		t.Errorf("applied while suspended: %q", got)
	}
	if got := w.get("one").Status.ManifestStatuses[0]; got.Health != workv1alpha1.ResourceUnknown || got.Identifier.Resource != "configmaps" {
		t.Errorf("status of what was never applied: got %v", got)
	}
	w.change("one", suspend(false))
	w.must(w.execute("one", there))
	w.wantCondition("one", "Dispatching", metav1.ConditionTrue, "Dispatching", "")
	applied := w.value("a")
	w.change("one", suspend(true))
	w.must(w.execute("one", there))
	if got := w.value("a"); got != applied {
		t.Errorf("changed while suspended: got %q, want %q", got, applied)
	}
	if got := w.get("one").Status.ManifestStatuses[0].Health; got != workv1alpha1.ResourceHealthy {
		t.Errorf("health while suspended: got %s", got)
	}
	w.must(w.Delete(t.Context(), w.get("one")))
	w.must(w.execute("one", there))
	if !w.gone("one") || w.value("a") != "" {
		t.Errorf("deleted while suspended: gone %v, left %q", w.gone("one"), w.value("a"))
	}
}

func TestWhatOthersChangeOrDeleteIsPutBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.work("one", configMap("edited", "1"), configMap("deleted", "1"))
	w.must(w.execute("one", there))
	// The hub is away: another process has nothing but the records.
	w.heal(t)
	w.set("edited", "2")
	w.must(w.Delete(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.objects, Name: "deleted"}}))
	w.eventually("put back", func() bool { return w.value("edited") == "1" && w.value("deleted") == "1" })
}

func TestWorkWithoutFinalizerWaits(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.work("one", configMap("a", "1"))
	w.change("one", func(work *workv1alpha1.Work) { work.Finalizers = nil })
	w.must(w.execute("one", there))
	if got := w.value("a"); got != "" {
		t.Errorf("applied without a finalizer: %q", got)
	}
	w.must(works.Hold(t.Context(), w.Client, w.get("one")))
	w.must(w.execute("one", there))
	if got := w.value("a"); got != "1" {
		t.Errorf("got %q", got)
	}
}
