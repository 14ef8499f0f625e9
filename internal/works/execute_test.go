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

// reachable is the state of a registered cluster.
var reachable = works.ClusterState{Reachable: true}

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
	made := w.createWork("one", deployment, configMap("two", "1"))
	w.noError(w.execute("one", reachable))
	w.wantCondition("one", "Applied", metav1.ConditionTrue, "AppliedSuccessful", "Manifest has been successfully applied")
	w.wantCondition("one", "Dispatching", metav1.ConditionTrue, "Dispatching", "Work is being dispatched to member clusters.")

	web := &appsv1.Deployment{}
	w.noError(w.Get(t.Context(), client.ObjectKey{Namespace: w.objects, Name: "web"}, web))
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
		w.noError(w.execute("one", reachable))
		return w.getWork("one").Status.ManifestStatuses[0].Health == workv1alpha1.ResourceHealthy
	})
	statuses := w.getWork("one").Status.ManifestStatuses
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

	// Without a change the Work is not written.
	before := w.getWork("one").ResourceVersion
	w.noError(w.execute("one", reachable))
	if got := w.getWork("one").ResourceVersion; got != before {
		t.Error("the Work was written again")
	}
}

func TestRemovedManifestIsPruned(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.createWork("one", configMap("a", "1"), configMap("b", "1"))
	w.noError(w.execute("one", reachable))
	w.updateWork("one", func(work *workv1alpha1.Work) {
		work.Spec.Workload.Manifests = []workv1alpha1.Manifest{w.manifest(configMap("b", "2"))}
	})
	w.noError(w.execute("one", reachable))
	if w.value("a") != "" || w.value("b") != "2" {
		t.Errorf("got a=%q b=%q", w.value("a"), w.value("b"))
	}
}

func TestApplyErrorIsReported(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.setValue("theirs", "0")
	w.createWork("one", configMap("theirs", "1"), configMap("ours", "1"), "{apiVersion: example.com/v1, kind: Nothing, metadata: {name: a, namespace: OBJECTS}}")
	var before string
	for i := range 3 {
		if err := w.execute("one", reachable); err == nil {
			t.Error("no error")
		}
		if got := w.getWork("one").ResourceVersion; i > 0 && got != before {
			t.Error("the same problem was written again")
		}
		before = w.getWork("one").ResourceVersion
	}
	w.wantCondition("one", "Applied", metav1.ConditionFalse, "AppliedFailed", fmt.Sprintf("Failed to apply all manifests (1/3): "+
		"ConfigMap %[1]s/theirs already exists in the cluster and is not managed; annotation work.karmada.io/conflict-resolution: overwrite takes it over; "+
		"Nothing example.com %[1]s/a: the cluster does not know this kind, and no CustomResourceDefinition of the bundle defines it", w.objects))
	if w.value("theirs") != "0" || w.value("ours") != "1" {
		t.Errorf("got theirs=%q ours=%q", w.value("theirs"), w.value("ours"))
	}
	for i, want := range []workv1alpha1.ResourceHealth{"Unknown", "Healthy", "Unknown"} {
		if got := w.getWork("one").Status.ManifestStatuses[i]; got.Health != want || got.Identifier.Ordinal != i || got.Status != nil {
			t.Errorf("status of manifest %d: got %v", i, got)
		}
	}
	w.updateWork("one", func(work *workv1alpha1.Work) {
		work.Spec.Workload.Manifests = work.Spec.Workload.Manifests[:2]
		work.Annotations = map[string]string{"work.karmada.io/conflict-resolution": "overwrite"}
	})
	w.noError(w.execute("one", reachable))
	w.wantCondition("one", "Applied", metav1.ConditionTrue, "AppliedSuccessful", "")
	if got := w.value("theirs"); got != "1" {
		t.Errorf("overwritten: got %q", got)
	}
}

func TestUnreachableClusterHasOneMessage(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.createWork("one", configMap("a", "1"))
	executor := w.executor()
	var err error
	executor.Engine, err = engine.New(&rest.Config{Host: "http://127.0.0.1:1"}, engine.Options{})
	w.noError(err)
	if err := executor.Execute(t.Context(), w.getWork("one"), reachable); err == nil {
		t.Error("no error")
	}
	w.wantCondition("one", "Applied", metav1.ConditionFalse, "AppliedFailed", "Failed to apply all manifests (0/1): the cluster does not answer")
	w.noError(w.execute("one", works.ClusterState{}))
	if got := w.value("a"); got != "" {
		t.Errorf("applied though the cluster is not reached: %q", got)
	}
}

func TestSuspendedWorkIsNotChanged(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.runEngine(t)
	suspend := func(yes bool) func(*workv1alpha1.Work) {
		return func(work *workv1alpha1.Work) {
			work.Spec.SuspendDispatching = ptr.To(yes)
			work.Spec.Workload.Manifests = []workv1alpha1.Manifest{w.manifest(configMap("a", fmt.Sprintf("%d", work.Generation)))}
		}
	}
	w.createWork("one", configMap("a", "first"))
	w.updateWork("one", suspend(true))
	w.noError(w.execute("one", reachable))
	w.wantCondition("one", "Dispatching", metav1.ConditionFalse, "SuspendDispatching", "Work dispatching is in a suspended state.")
	if got := w.value("a"); got != "" {
		t.Errorf("applied while suspended: %q", got)
	}
	if got := w.getWork("one").Status.ManifestStatuses[0]; got.Health != workv1alpha1.ResourceUnknown || got.Identifier.Resource != "configmaps" {
		t.Errorf("status of an object that was never applied: got %v", got)
	}
	w.updateWork("one", suspend(false))
	w.noError(w.execute("one", reachable))
	w.wantCondition("one", "Dispatching", metav1.ConditionTrue, "Dispatching", "")
	applied := w.value("a")
	w.updateWork("one", suspend(true))
	w.noError(w.execute("one", reachable))
	if got := w.value("a"); got != applied {
		t.Errorf("changed while suspended: got %q, want %q", got, applied)
	}
	if got := w.getWork("one").Status.ManifestStatuses[0].Health; got != workv1alpha1.ResourceHealthy {
		t.Errorf("health while suspended: got %s", got)
	}
	w.noError(w.Delete(t.Context(), w.getWork("one")))
	w.noError(w.execute("one", reachable))
	if !w.isDeleted("one") || w.value("a") != "" {
		t.Errorf("deleted while suspended: Work deleted: %v, ConfigMap: %q", w.isDeleted("one"), w.value("a"))
	}
}

func TestDriftIsCorrected(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.createWork("one", configMap("edited", "1"), configMap("deleted", "1"))
	w.noError(w.execute("one", reachable))
	// A new process that has only the inventory.
	w.runEngine(t)
	w.setValue("edited", "2")
	w.noError(w.Delete(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.objects, Name: "deleted"}}))
	w.eventually("put back", func() bool { return w.value("edited") == "1" && w.value("deleted") == "1" })
}

func TestWorkWithoutFinalizerWaits(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.createWork("one", configMap("a", "1"))
	w.updateWork("one", func(work *workv1alpha1.Work) { work.Finalizers = nil })
	w.noError(w.execute("one", reachable))
	if got := w.value("a"); got != "" {
		t.Errorf("applied without a finalizer: %q", got)
	}
	w.noError(works.EnsureFinalizer(t.Context(), w.Client, w.getWork("one")))
	w.noError(w.execute("one", reachable))
	if got := w.value("a"); got != "1" {
		t.Errorf("got %q", got)
	}
}
