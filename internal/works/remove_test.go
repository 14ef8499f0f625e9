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

func TestDeletionWhileNobodyExecutesIsCarriedOutOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.work("one", configMap("a", "1"))
	w.must(w.execute("one", there))
	w.must(w.Delete(t.Context(), w.get("one")))
	deleted := w.get("one")
	// An executor that is not there, and one that is and does not reach the cluster, change nothing.
	w.must(w.execute("one", works.Circumstances{}))
	if got := w.value("a"); got != "1" || w.gone("one") {
		t.Fatalf("got %q, Work gone: %v", got, w.gone("one"))
	}
	w.must(w.execute("one", there))
	if got := w.value("a"); got != "" || !w.gone("one") {
		t.Fatalf("left %q, Work gone: %v", got, w.gone("one"))
	}
	// Whoever comes late with the same deletion takes nothing away that was made since.
	w.set("a", "theirs")
	_, err := w.executor().Execute(t.Context(), deleted, there)
	w.must(err)
	if got := w.value("a"); got != "theirs" {
		t.Errorf("got %q", got)
	}
	var records corev1.SecretList
	w.must(w.List(t.Context(), &records, client.InNamespace(w.records)))
	if len(records.Items) > 0 {
		t.Errorf("%d records are left", len(records.Items))
	}
}

func TestVanishedWorkIsNoDeletion(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.work("one", configMap("a", "1"))
	w.must(w.execute("one", there))
	w.change("one", func(work *workv1alpha1.Work) { work.Finalizers = nil })
	w.must(w.Delete(t.Context(), w.get("one")))
	w.heal(t)
	w.set("a", "2")
	w.eventually("still healed", func() bool { return w.value("a") == "1" })

	// The hub was restored: the Work is another object with the same name, and has what the one before had.
	w.work("one", configMap("b", "1"))
	w.must(w.execute("one", there))
	if w.value("a") != "" || w.value("b") != "1" {
		t.Errorf("got a=%q b=%q", w.value("a"), w.value("b"))
	}
}

func TestDeletedWorkCanLeaveItsObjects(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		preserve bool
		at       works.Circumstances
		marked   bool
	}{
		"the Work says so":        {preserve: true, at: there},
		"the cluster is orphaned": {at: works.Circumstances{Reachable: true, Leaving: true, Orphan: true}},
		"the cluster is abandoned": {
			at: works.Circumstances{Leaving: true, Abandon: true}, marked: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.work("one", configMap("a", "1"))
			w.change("one", func(work *workv1alpha1.Work) { work.Spec.PreserveResourcesOnDeletion = ptr.To(test.preserve) })
			w.must(w.execute("one", there))
			w.must(w.Delete(t.Context(), w.get("one")))
			w.must(w.execute("one", test.at))
			if !w.gone("one") {
				t.Error("the Work is still there")
			}
			var cm corev1.ConfigMap
			w.must(w.Get(t.Context(), client.ObjectKey{Namespace: w.objects, Name: "a"}, &cm))
			if marked := len(cm.Labels)+len(cm.Annotations) > 0; marked != test.marked {
				t.Errorf("marks: got %v %v", cm.Labels, cm.Annotations)
			}
		})
	}
}

func TestObjectThatDoesNotGoHoldsItsWork(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.work("one", configMap("a", "1"))
	w.must(w.execute("one", there))
	hold := func(finalizers ...string) {
		cm := &corev1.ConfigMap{}
		w.must(w.Get(t.Context(), client.ObjectKey{Namespace: w.objects, Name: "a"}, cm))
		cm.Finalizers = finalizers
		w.must(w.Update(t.Context(), cm))
	}
	hold("example.com/busy")
	w.must(w.Delete(t.Context(), w.get("one")))
	again, err := w.executor().Execute(t.Context(), w.get("one"), there)
	w.must(err)
	if again <= 0 || w.gone("one") {
		t.Errorf("again in %s, Work gone: %v", again, w.gone("one"))
	}
	hold()
	w.must(w.execute("one", there))
	if !w.gone("one") {
		t.Error("the Work is still there")
	}
}

func TestBundleIsPruned(t *testing.T) {
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
