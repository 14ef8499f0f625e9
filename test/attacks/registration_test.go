package attacks

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
)

// TestPullModeOfAnEmptySpec: a tenant changes the mode of a cluster by a patch of the whole spec, so that the hub would
// use other credentials for it.
func TestPullModeOfAnEmptySpec(t *testing.T) {
	w := newWorld(t)
	tenant := w.tenant()
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "mine"}, Spec: libv1beta1.SveltosClusterSpec{PullMode: true}}
	w.noError(tenant.Create(t.Context(), cluster))
	for _, patch := range []string{`{"spec":null}`, `{"spec":{"pullMode":null}}`, `{"spec":{"pullMode":false}}`} {
		err := tenant.Patch(t.Context(), cluster.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(patch)))
		if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.pullMode") {
			t.Errorf("%s: got error %v, want that spec.pullMode is invalid", patch, err)
		}
	}
}

// maxRegistration bounds the registration of a cluster during an attack. It is loose, for a busy machine.
const maxRegistration = 15 * time.Second

// TestRegistrationThatHangs: a tenant registers clusters for which the hub would have to wait, here for namespaces
// whose deletion does not end. There are twice as many as the hub has workers for registrations, so a hub that waits 30
// s for each of them has no worker for a minute. Meanwhile another tenant registers a cluster.
func TestRegistrationThatHangs(t *testing.T) {
	w := newWorld(t)
	tenant := w.tenant()
	w.pullCluster(tenant, "first") // its deliveries are in the namespace of the tenant
	var hanging []*libv1beta1.SveltosCluster
	for i := range 24 {
		name := fmt.Sprint("hanging-", i)
		w.hangingNamespace(fleet.DerivedNamespace(w.ns, name))
		hanging = append(hanging, &libv1beta1.SveltosCluster{
			ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name}, Spec: libv1beta1.SveltosClusterSpec{PullMode: true},
		})
	}
	other := &world{TB: w.TB, Client: w.Client, hub: w.hub, ns: w.hub.Namespace(t, "other")}
	victim := other.tenant()

	for _, cluster := range hanging {
		w.noError(tenant.Create(t.Context(), cluster))
	}
	from := time.Now()
	other.pullCluster(victim, "healthy")
	if took := time.Since(from); took > maxRegistration {
		t.Errorf("the registration of the healthy cluster took %s", took)
	}
	for _, cluster := range hanging {
		w.eventually("the hub reports why it does not register "+cluster.Name, func() error {
			if err := w.Get(t.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
				return err
			}
			return wantText(cluster.Status.FailureMessage, "namespace "+fleet.DerivedNamespace(w.ns, cluster.Name)+" is being deleted")
		})
	}
}

// hangingNamespace creates a namespace and deletes it. An object with a finalizer keeps it until the end of the test.
func (w *world) hangingNamespace(name string) {
	w.Helper()
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	held := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: "held", Finalizers: []string{"example.com/held"}}}
	w.noError(w.Create(w.Context(), namespace))
	w.noError(w.Create(w.Context(), held))
	w.Cleanup(func() {
		_ = w.Patch(context.WithoutCancel(w.Context()), held, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))) // the hub of the tests ends soon
	})
	w.noError(w.Delete(w.Context(), namespace))
}
