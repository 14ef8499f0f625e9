package works_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/works"
)

func TestDeletionWithoutExecutorIsExecutedOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.createWork("one", configMap("a", "1"))
	w.noError(w.execute("one", reachable))
	w.noError(w.Delete(t.Context(), w.getWork("one")))
	deleted := w.getWork("one")
	// A process without an executor, and an executor that cannot reach the cluster, change nothing.
	w.noError(w.execute("one", works.ClusterState{}))
	if got := w.value("a"); got != "1" || w.isDeleted("one") {
		t.Fatalf("got %q, Work deleted: %v", got, w.isDeleted("one"))
	}
	w.noError(w.execute("one", reachable))
	if got := w.value("a"); got != "" || !w.isDeleted("one") {
		t.Fatalf("left %q, Work deleted: %v", got, w.isDeleted("one"))
	}
	// A late attempt at the same deletion does not delete objects created since.
	w.setValue("a", "theirs")
	w.noError(w.executor().Execute(t.Context(), deleted, reachable))
	if got := w.value("a"); got != "theirs" {
		t.Errorf("got %q", got)
	}
	var records corev1.SecretList
	w.noError(w.List(t.Context(), &records, client.InNamespace(w.records)))
	if len(records.Items) > 0 {
		t.Errorf("%d inventories are left", len(records.Items))
	}
}

func TestDisappearedWorkKeepsItsObjects(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.createWork("one", configMap("a", "1"))
	w.noError(w.execute("one", reachable))
	w.updateWork("one", func(work *workv1alpha1.Work) { work.Finalizers = nil })
	w.noError(w.Delete(t.Context(), w.getWork("one")))
	w.runEngine(t)
	w.setValue("a", "2")
	w.eventually("still healed", func() bool { return w.value("a") == "1" })

	// The hub was restored: the Work is a new object with the old name, and has the manifests of the old one.
	w.createWork("one", configMap("b", "1"))
	w.noError(w.execute("one", reachable))
	if w.value("a") != "" || w.value("b") != "1" {
		t.Errorf("got a=%q b=%q", w.value("a"), w.value("b"))
	}
}

func TestDeletedWorkCanLeaveItsObjects(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		preserve bool
		at       works.ClusterState
		marked   bool
	}{
		"the Work says so":        {preserve: true, at: reachable},
		"the cluster is orphaned": {at: works.ClusterState{Reachable: true, Deregistering: true, Orphan: true}},
		"the cluster is abandoned": {
			at: works.ClusterState{Deregistering: true, Abandon: true}, marked: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.createWork("one", configMap("a", "1"))
			w.updateWork("one", func(work *workv1alpha1.Work) { work.Spec.PreserveResourcesOnDeletion = ptr.To(test.preserve) })
			w.noError(w.execute("one", reachable))
			w.noError(w.Delete(t.Context(), w.getWork("one")))
			w.noError(w.execute("one", test.at))
			if !w.isDeleted("one") {
				t.Error("the Work still exists")
			}
			var cm corev1.ConfigMap
			w.noError(w.Get(t.Context(), client.ObjectKey{Namespace: w.objects, Name: "a"}, &cm))
			if marked := len(cm.Labels)+len(cm.Annotations) > 0; marked != test.marked {
				t.Errorf("marks: got %v %v", cm.Labels, cm.Annotations)
			}
		})
	}
}

// TestObjectWithFinalizerDelaysTheWork executes a deleted Work before and after its object has ended. Meanwhile the
// engine continues the withdrawal.
func TestObjectWithFinalizerDelaysTheWork(t *testing.T) {
	t.Parallel()
	for name, suspended := range map[string]bool{"dispatched": false, "suspended": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			executor := w.executor()
			running := w.runEngine(t)
			executor.Engine = running
			execute := func() { w.noError(executor.Execute(t.Context(), w.getWork("one"), reachable)) }
			w.createWork("one", configMap("a", "1"))
			execute()
			w.updateWork("one", suspend(suspended))
			execute()
			hold := func(finalizers ...string) {
				cm := &corev1.ConfigMap{}
				w.noError(w.Get(t.Context(), client.ObjectKey{Namespace: w.objects, Name: "a"}, cm))
				cm.Finalizers = finalizers
				w.noError(w.Update(t.Context(), cm))
			}
			hold("example.com/busy")
			w.noError(w.Delete(t.Context(), w.getWork("one")))
			execute()
			if w.isDeleted("one") {
				t.Error("the Work does not wait for its object")
			}
			hold()
			id := works.BundleID(w.getWork("one"))
			w.eventually("the engine ends the withdrawal", func() bool { _, ok := running.CachedDigest(id); return !ok })
			execute()
			if !w.isDeleted("one") {
				t.Error("the Work still exists")
			}
		})
	}
}

func TestServerFieldsAreRemoved(t *testing.T) {
	t.Parallel()
	w := &world{TB: t, objects: "ns"}
	for name, test := range map[string]struct {
		manifest string
		path     []string
		gone     bool
	}{
		"cluster IP":               {"{apiVersion: v1, kind: Service, metadata: {name: a}, spec: {clusterIP: 10.0.0.1}}", []string{"spec", "clusterIP"}, true},
		"no cluster IP":            {"{apiVersion: v1, kind: Service, metadata: {name: a}, spec: {clusterIP: None}}", []string{"spec", "clusterIP"}, false},
		"selector of a Job":        {"{apiVersion: batch/v1, kind: Job, metadata: {name: a}, spec: {selector: {}}}", []string{"spec", "selector"}, true},
		"selector that people set": {"{apiVersion: batch/v1, kind: Job, metadata: {name: a}, spec: {manualSelector: true, selector: {}}}", []string{"spec", "selector"}, false},
		"time to live of a Job":    {"{apiVersion: batch/v1, kind: Job, metadata: {name: a}, spec: {ttlSecondsAfterFinished: 1}}", []string{"spec", "ttlSecondsAfterFinished"}, true},
		"secrets of an account":    {"{apiVersion: v1, kind: ServiceAccount, metadata: {name: a}, secrets: [{name: b}]}", []string{"secrets"}, true},
		"node of a claim": {
			"{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: a, annotations: {volume.kubernetes.io/selected-node: b}}}",
			[]string{"metadata", "annotations", "volume.kubernetes.io/selected-node"}, true,
		},
		"status": {"{apiVersion: v1, kind: Namespace, metadata: {name: a}, status: {phase: Active}}", []string{"status"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			work := &workv1alpha1.Work{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-es-a", Name: "one"}}
			work.Spec.Workload.Manifests = []workv1alpha1.Manifest{w.manifest(test.manifest)}
			b := works.Bundle(work)
			fields := b.Items[0].Objects[0].Object
			for _, name := range test.path[:len(test.path)-1] {
				fields, _ = fields[name].(map[string]any)
			}
			if _, there := fields[test.path[len(test.path)-1]]; there == test.gone {
				t.Errorf("got %v", b.Items[0].Objects[0].Object)
			}
		})
	}
}

func TestConflictResolution(t *testing.T) {
	t.Parallel()
	w := &world{TB: t, objects: "ns"}
	for name, test := range map[string]struct {
		work, manifest string
		want           bool
	}{
		"nobody says":                     {"", "", false},
		"the Work says overwrite":         {"overwrite", "", true},
		"the manifest says overwrite":     {"", "overwrite", true},
		"the manifest goes before a Work": {"overwrite", "abort", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			work := &workv1alpha1.Work{ObjectMeta: metav1.ObjectMeta{Name: "one"}}
			work.Annotations = map[string]string{workv1alpha1.ConflictResolutionAnnotation: test.work}
			work.Spec.Workload.Manifests = []workv1alpha1.Manifest{
				w.manifest("{apiVersion: v1, kind: ConfigMap, metadata: {name: a, annotations: {work.karmada.io/conflict-resolution: '" + test.manifest + "'}}}"),
			}
			b := works.Bundle(work)
			if diff := cmp.Diff(b.Items[0].Overwrite, test.want); diff != "" {
				t.Error(diff)
			}
		})
	}
}
