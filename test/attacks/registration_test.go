package attacks

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
)

// TestPullModeOfAnEmptySpec: a tenant changes the mode of a cluster, with the whole spec, so that the hub would use
// other credentials for it.
func TestPullModeOfAnEmptySpec(t *testing.T) {
	w := newWorld(t)
	tenant := w.tenant()
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "mine"}, Spec: libv1beta1.SveltosClusterSpec{PullMode: true}}
	w.must(tenant.Create(t.Context(), cluster))
	for _, patch := range []string{`{"spec":null}`, `{"spec":{"pullMode":null}}`, `{"spec":{"pullMode":false}}`} {
		err := tenant.Patch(t.Context(), cluster.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(patch)))
		if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.pullMode") {
			t.Errorf("%s: got error %v, want that spec.pullMode is invalid", patch, err)
		}
	}
}

// TestRegistrationThatHangs: a tenant registers clusters for which the hub has to wait, here for namespaces whose
// deletion does not end. It must not wait: a few of these clusters would occupy all workers of the registrations.
func TestRegistrationThatHangs(t *testing.T) {
	w := newWorld(t)
	tenant := w.tenant()
	w.pullCluster(tenant, "first") // has the namespace of the tenant for its deliveries
	for i := range 3 {
		name := fmt.Sprint("hanging-", i)
		namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fleet.DerivedNamespace(w.ns, name)}}
		held := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace.Name, Name: "held", Finalizers: []string{"example.com/held"}}}
		w.must(w.Create(t.Context(), namespace))
		w.must(w.Create(t.Context(), held))
		t.Cleanup(func() {
			_ = w.Patch(context.WithoutCancel(t.Context()), held, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))) // the hub of the tests ends soon
		})
		w.must(w.Delete(t.Context(), namespace))
		cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name}, Spec: libv1beta1.SveltosClusterSpec{PullMode: true}}
		w.must(tenant.Create(t.Context(), cluster))
		w.eventually("the hub says why it does not register "+name, func() error {
			if err := w.Get(t.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
				return err
			}
			return wantText(cluster.Status.FailureMessage, "namespace "+namespace.Name+" is being deleted")
		})
	}
	other := &world{TB: w.TB, Client: w.Client, hub: w.hub, ns: w.hub.Namespace(t, "other")}
	other.pullCluster(other.tenant(), "healthy")
}
