package works

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/test/fuzzing"
)

// FuzzWork reads the manifests of a Work: one item for each, with a valid object of that Work or an error.
func FuzzWork(f *testing.F) {
	f.Add([]byte(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a","labels":{"a":"b"}}}`), []byte(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"}}`))
	f.Add([]byte(`{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"a","annotations":{"a":1}},"status":{}}`), []byte(`null`))
	f.Add([]byte(`{"apiVersion":"v1","kind":"Service","metadata":{"name":"a"},"spec":{"clusterIP":"1.1.1.1","ports":[{"nodePort":1}]}}`), []byte(`{"metadata":[]}`))
	f.Add([]byte(`{"apiVersion":"batch/v1","kind":"Job","metadata":{"name":"a","labels":null,"ownerReferences":{}},"spec":{"selector":1,"template":{"metadata":[]}}}`), []byte(`[]`))
	f.Fuzz(func(t *testing.T, first, second []byte) {
		work := &workv1alpha1.Work{ObjectMeta: metav1.ObjectMeta{Namespace: "es", Name: "work", UID: "uid"}}
		for _, raw := range [][]byte{first, second} {
			work.Spec.Workload.Manifests = append(work.Spec.Workload.Manifests, workv1alpha1.Manifest{RawExtension: runtime.RawExtension{Raw: raw}})
		}
		fuzzing.Within(t, 16<<20+uint64(len(first)+len(second))*20_000, func() { checkWork(t, work) })
	})
}

func checkWork(t *testing.T, work *workv1alpha1.Work) {
	t.Helper()
	b := Bundle(work)
	if len(b.Items) != len(work.Spec.Workload.Manifests) {
		t.Fatalf("%d items for %d manifests", len(b.Items), len(work.Spec.Workload.Manifests))
	}
	for _, item := range b.Items {
		if item.DecodeError != "" {
			if len(item.Objects) > 0 {
				t.Errorf("an object and the error %s", item.DecodeError)
			}
			continue
		}
		object := item.Objects[0]
		if ref := kube.RefOf(object); ref.Kind == "" || ref.Name == "" || ref.Version == "" {
			t.Errorf("an object without an identity: %v", object.Object)
		}
		if object.GetAnnotations()[workv1alpha1.WorkNameAnnotation] != work.Name || object.GetLabels()[workv1alpha1.PermanentIDLabel] != string(work.UID) {
			t.Errorf("an object without the marks of its Work: %v", object.Object)
		}
	}
	if _, err := b.Digest(); err != nil {
		t.Errorf("the bundle has no digest: %v", err)
	}
}
