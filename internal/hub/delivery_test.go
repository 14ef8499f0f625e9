package hub_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// annotate sets one annotation of obj; "null" deletes it.
func (w *world) annotate(obj client.Object, name, value string) {
	w.Helper()
	patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:%s}}}`, name, value)
	w.must(w.Patch(w.Context(), obj, client.RawPatch("application/merge-patch+json", []byte(patch))))
}

// wantAnnotation waits until an annotation of obj has a value.
func (w *world) wantAnnotation(obj client.Object, name, want string) {
	w.Helper()
	w.eventually(name+" is "+want, func() error {
		if err := w.Get(w.Context(), client.ObjectKeyFromObject(obj), obj); err != nil {
			return err
		}
		if got := obj.GetAnnotations()[name]; got != want {
			return fmt.Errorf("the annotation is %q", got)
		}
		return nil
	})
}

func TestLostDeliveryNamespaceIsRestored(t *testing.T) {
	w := newWorld(t)
	one, two := w.createReadyMember("one", nil), w.createReadyMember("two", nil)
	derived := w.ns + "--two"
	w.wantAnnotation(two, kube.AnnotationDeliveryNS, derived)
	w.annotate(two, kube.AnnotationDeliveryNS, "null")
	w.wantAnnotation(two, kube.AnnotationDeliveryNS, derived)
	w.annotate(one, kube.AnnotationDeliveryNS, `"`+w.ns+`--one"`)
	w.wantAnnotation(one, kube.AnnotationDeliveryNS, w.ns)

	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: derived}}
	w.annotate(namespace, kube.AnnotationDeliveryHolder, "null")
	w.wantAnnotation(namespace, kube.AnnotationDeliveryHolder, w.ns+"/two")

	// The annotation is restored also during the deregistration.
	w.must(w.Delete(t.Context(), two))
	w.wantMessage(two, "its agent to remove itself")
	w.annotate(two, kube.AnnotationDeliveryNS, "null")
	w.wantAnnotation(two, kube.AnnotationDeliveryNS, derived)
	w.confirmAgentRemoval(two)
	w.wantClusterDeleted("two")
	w.eventually("deletion of the delivery namespace", func() error { return w.checkNotFound(&corev1.Namespace{}, "", derived) })
	w.must(w.Get(t.Context(), client.ObjectKeyFromObject(one), &libv1beta1.SveltosCluster{}))
}
