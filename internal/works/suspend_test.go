package works_test

import (
	"context"
	"testing"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/works"
)

// createKind creates a kind Thing in the test's own API group, and returns the group.
func (w *world) createKind(t *testing.T) string {
	t.Helper()
	group := w.objects + ".example.com"
	crd := &apiextensionsv1.CustomResourceDefinition{ObjectMeta: metav1.ObjectMeta{Name: "things." + group}}
	crd.Spec.Group, crd.Spec.Scope = group, apiextensionsv1.NamespaceScoped
	crd.Spec.Names = apiextensionsv1.CustomResourceDefinitionNames{Plural: "things", Singular: "thing", Kind: "Thing", ListKind: "ThingList"}
	crd.Spec.Versions = []apiextensionsv1.CustomResourceDefinitionVersion{{
		Name: "v1", Served: true, Storage: true,
		Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{
			Type: "object", XPreserveUnknownFields: ptr.To(true),
		}},
	}}
	w.noError(w.Create(t.Context(), crd))
	t.Cleanup(func() { w.noError(w.Delete(context.WithoutCancel(t.Context()), crd)) })
	return group
}

// getThing returns a Thing, or nil if it does not exist.
func (w *world) getThing(group, name string) *unstructured.Unstructured {
	w.Helper()
	obj := &unstructured.Unstructured{}
	obj.SetAPIVersion(group + "/v1")
	obj.SetKind("Thing")
	if w.Get(w.Context(), client.ObjectKey{Namespace: w.objects, Name: name}, obj) != nil {
		return nil
	}
	return obj
}

// staysTrue checks for some time that a condition holds.
func (w *world) staysTrue(condition string, pause time.Duration, check func() bool) {
	w.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(pause); time.Now().Before(end); <-tick.C {
		if !check() {
			w.Fatalf("%s: not true any more", condition)
		}
	}
}

func suspend(yes bool) func(*workv1alpha1.Work) {
	return func(work *workv1alpha1.Work) { work.Spec.SuspendDispatching = ptr.To(yes) }
}

func TestNothingReachesTheClusterWhileSuspended(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	executor := &works.Executor{Hub: w.Client, Engine: w.runEngine(t), Clock: clock.RealClock{}}
	execute := func() error { return executor.Execute(t.Context(), w.getWork("one"), reachable) }
	thing := "{apiVersion: OBJECTS.example.com/v1, kind: Thing, metadata: {name: b, namespace: OBJECTS}}"
	w.createWork("one", configMap("a", "1"), thing)
	// The engine possibly does not run yet, and then the caller must retry.
	w.eventually("the engine retries", func() bool { return execute() == nil })
	w.wantCondition("one", "Applied", metav1.ConditionFalse, "AppliedFailed", "")
	w.updateWork("one", suspend(true))
	w.noError(execute())
	group := w.createKind(t)
	w.setValue("a", "2")
	// Failed attempts are retried after 1, 2 and 4 s, and drift is corrected at once.
	w.staysTrue("nothing is applied", 4*time.Second, func() bool { return w.getThing(group, "b") == nil && w.value("a") == "2" })
	w.noError(execute())
	w.wantCondition("one", "Dispatching", metav1.ConditionFalse, "SuspendDispatching", "")
	w.wantCondition("one", "Applied", metav1.ConditionFalse, "AppliedFailed", "Not all manifests were applied before the Work was suspended: Thing "+
		group+" "+w.objects+"/b: the cluster does not know this kind, and no CustomResourceDefinition of the bundle defines it")

	w.updateWork("one", suspend(false))
	w.noError(execute())
	w.wantCondition("one", "Applied", metav1.ConditionTrue, "AppliedSuccessful", "")
	if w.getThing(group, "b") == nil || w.value("a") != "1" {
		t.Errorf("not applied after the Work resumed: a=%q", w.value("a"))
	}
	w.updateWork("one", suspend(true))
	w.noError(execute())
	w.wantCondition("one", "Applied", metav1.ConditionTrue, "AppliedSuccessful", "")
	w.updateWork("one", func(work *workv1alpha1.Work) {
		work.Spec.Workload.Manifests = append(work.Spec.Workload.Manifests, w.manifest(configMap("c", "1")))
	})
	w.noError(execute())
	w.wantCondition("one", "Applied", metav1.ConditionFalse, "SuspendDispatching", "The current manifests were not applied before the Work was suspended")
	// Drift correction resumes with the Work.
	w.updateWork("one", suspend(false))
	w.noError(execute())
	w.setValue("a", "3")
	w.eventually("healed", func() bool { return w.value("a") == "1" })
}
