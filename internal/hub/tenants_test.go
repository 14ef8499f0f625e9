package hub_test

import (
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// A tenant that may write all objects in a namespace sets the delivery namespace of another cluster on its cluster.
func TestDeliveryNamespaceOfAnotherClusterIsRefused(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a"))
	theirs := w.plane.Namespace(t, "theirs")
	group := &libv1beta1.ConfigurationGroup{
		ObjectMeta: metav1.ObjectMeta{Namespace: theirs, Name: "g", Labels: map[string]string{libv1beta1.PullClusterNameLabel: "prod"}},
		Spec:       libv1beta1.ConfigurationGroupSpec{Action: libv1beta1.ActionDeploy},
	}
	w.create(group)
	prod := &libv1beta1.SveltosCluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "prod", Labels: w.prodLabels(), Annotations: map[string]string{kube.AnnotationDeliveryNS: theirs}},
		Spec:       libv1beta1.SveltosClusterSpec{PullMode: true},
	}
	w.create(prod)
	w.wantMessage(prod, "annotation towline.dev/delivery-namespace names a namespace that is not the cluster's")
	w.setReady(prod)
	profile := w.createProfile(nil)
	w.eventually("summary", func() error { _, err := w.getSummary(profile, "prod"); return err })
	w.must(w.Delete(t.Context(), profile))
	w.wantNoSummary(profile, "prod")
	if refs := w.refs("prod", "Resources"); len(refs) > 0 {
		t.Errorf("delivered: %v", refs)
	}
	for _, obj := range []client.Object{&coordinationv1.Lease{}, &corev1.ServiceAccount{}} {
		if err := w.Get(t.Context(), client.ObjectKey{Namespace: theirs, Name: "prod"}, obj); !apierrors.IsNotFound(err) {
			t.Errorf("%T in the delivery namespace of the other cluster: %v", obj, err)
		}
	}
	w.must(w.Status().Patch(t.Context(), prod, client.RawPatch("application/merge-patch+json", []byte(`{"status":{"ready":false}}`))))
	w.must(w.Delete(t.Context(), prod))
	w.wantClusterDeleted("prod")
	w.must(w.Get(t.Context(), client.ObjectKeyFromObject(group), group))
	if !group.DeletionTimestamp.IsZero() {
		t.Error("the group of the other cluster is being deleted")
	}
}

func TestTooLongClusterNameIsReported(t *testing.T) {
	w := newWorld(t)
	long := w.createMember(strings.Repeat("a", 64), nil)
	w.wantMessage(long, "metadata.name: the name of a cluster in pull mode may have 63 characters at most")
	w.must(w.Get(t.Context(), client.ObjectKeyFromObject(long), long))
	if len(long.Finalizers) > 0 {
		t.Errorf("finalizers = %v", long.Finalizers)
	}
	// A cluster with the finalizer of an earlier hub.
	update(w, long, func(c *libv1beta1.SveltosCluster) { c.Finalizers = []string{kube.FinalizerCluster} })
	w.must(w.Delete(t.Context(), long))
	w.wantClusterDeleted(long.Name)
}

// A heartbeat with a future time does not make the agent alive until that time.
func TestFutureHeartbeatCountsAsNow(t *testing.T) {
	w := newWorld(t)
	one := w.createMember("one", nil)
	w.renewLease(one, time.Now().AddDate(10, 0, 0))
	w.must(w.Delete(t.Context(), one))
	w.wantMessage(one, "its agent to remove itself")
	w.confirmAgentRemoval(one)
	w.wantClusterDeleted("one")
}
