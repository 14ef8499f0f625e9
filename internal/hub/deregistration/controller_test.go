package deregistration_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/hub/deregistration"
	"github.com/towline/towline/internal/hub/registration"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// testEnv is a hub with one pull member that is being deregistered. Tests call Reconcile.
type testEnv struct {
	testing.TB
	client.Client
	clock      *clocktesting.FakeClock
	controller *deregistration.Controller
	cluster    *libv1beta1.SveltosCluster
}

// newTestEnv creates a member whose agent has renewed its Lease once and was never ready.
func newTestEnv(t *testing.T, hubClient client.Client, namespace string, spec libv1beta1.SveltosClusterSpec) *testEnv {
	t.Helper()
	w := &testEnv{TB: t, Client: hubClient, clock: clocktesting.NewFakeClock(time.Now())}
	w.controller = &deregistration.Controller{
		Hub: hubClient, Live: hubClient, Locks: &registration.ClusterLocks{},
		Reachability: &deregistration.Reachability{Live: hubClient, Heartbeats: &heartbeats.Monitor{Clock: w.clock}},
		Events:       events.NewFakeRecorder(100), Clock: w.clock,
	}
	spec.PullMode = true
	w.cluster = &libv1beta1.SveltosCluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "one", Finalizers: []string{kube.FinalizerCluster}}, Spec: spec,
	}
	w.must(hubClient.Create(t.Context(), w.cluster))
	renewTime := &metav1.MicroTime{Time: w.clock.Now()}
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "one"}, Spec: coordinationv1.LeaseSpec{RenewTime: renewTime}}
	w.must(hubClient.Create(t.Context(), lease))
	w.must(hubClient.Delete(t.Context(), w.cluster))
	deleteFinalizersAtEnd(t, hubClient, w.cluster)
	return w
}

// deleteFinalizersAtEnd deletes the finalizers of a cluster that is not deregistered when the test ends.
func deleteFinalizersAtEnd(t *testing.T, hubClient client.Client, cluster *libv1beta1.SveltosCluster) {
	t.Helper()
	t.Cleanup(func() {
		patch := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
		if err := client.IgnoreNotFound(hubClient.Patch(context.WithoutCancel(t.Context()), cluster, patch)); err != nil {
			t.Error(err)
		}
	})
}

// newHub returns a hub with all CRDs.
func newHub(t *testing.T) (client.Client, *localkube.Plane) {
	t.Helper()
	plane := localkube.Shared(t)
	if err := hub.InstallCRDs(t.Context(), plane.Config); err != nil {
		t.Fatal(err)
	}
	hubClient, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return hubClient, plane
}

func (w *testEnv) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// want reconciles and checks the reason why the deregistration waits, the delay before the next reconcile, and whether
// it is forced.
func (w *testEnv) want(reason string, after time.Duration, forced bool) {
	w.Helper()
	result, err := w.controller.Reconcile(w.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(w.cluster)})
	w.must(err)
	w.must(w.Get(w.Context(), client.ObjectKeyFromObject(w.cluster), w.cluster))
	isForced := strings.Contains(w.cluster.Annotations[kube.AnnotationDeregister], kube.DeregisterForce)
	if message := w.cluster.Status.FailureMessage; !strings.Contains(message, reason) || result.RequeueAfter != after || isForced != forced {
		w.Errorf("message %q, requeue after %s, forced %t, want %q, %s, %t", message, result.RequeueAfter, isForced, reason, after, forced)
	}
}

// wantDeleted reconciles and checks that the cluster is deleted, with a ClusterConfiguration that a killed hub has
// left.
func (w *testEnv) wantDeleted() {
	w.Helper()
	left := &configv1beta1.ClusterConfiguration{ObjectMeta: metav1.ObjectMeta{Namespace: w.cluster.Namespace, Name: "sveltos--one"}}
	if err := w.Create(w.Context(), left); err != nil && !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		w.Error(err)
	}
	_, err := w.controller.Reconcile(w.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(w.cluster)})
	w.must(err)
	if err := w.Get(w.Context(), client.ObjectKeyFromObject(w.cluster), w.cluster); !apierrors.IsNotFound(err) {
		w.Errorf("the cluster is not deleted: %v, %+v", err, w.cluster)
	}
	if err := w.Get(w.Context(), client.ObjectKeyFromObject(left), left); !apierrors.IsNotFound(err) {
		w.Errorf("the ClusterConfiguration is not deleted: %v", err)
	}
}

func TestAgentThatStopsBeforeItWasReadyIsUnreachable(t *testing.T) {
	t.Parallel()
	hubClient, plane := newHub(t)
	w := newTestEnv(t, hubClient, plane.Namespace(t, "departures"), libv1beta1.SveltosClusterSpec{CleanupGracePeriod: &metav1.Duration{Duration: 100 * time.Second}})
	w.want("its agent to remove itself", 30*time.Second, false)
	w.clock.Step(91 * time.Second)
	w.want("its agent has not reported since ", 9*time.Second-w.clockSkew(), false)
	w.clock.Step(20 * time.Second)
	w.wantDeleted()
}

// clockSkew returns the difference between the fake clock and the API server's deletion time.
func (w *testEnv) clockSkew() time.Duration {
	return w.clock.Since(w.cluster.DeletionTimestamp.Time) - 91*time.Second
}

func TestDeletionOfNamespaceEndsTheWait(t *testing.T) {
	t.Parallel()
	hubClient, _ := newHub(t)
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "departures-"}}
	if err := hubClient.Create(t.Context(), namespace); err != nil {
		t.Fatal(err)
	}
	w := newTestEnv(t, hubClient, namespace.Name, libv1beta1.SveltosClusterSpec{})
	w.want("its agent to remove itself", 30*time.Second, false)
	w.want("its agent to remove itself", 30*time.Second, false)
	w.must(hubClient.Delete(t.Context(), namespace))
	w.wantDeleted()
}

func TestOperationsOnAbandonedClusterAreCanceled(t *testing.T) {
	t.Parallel()
	hubClient, plane := newHub(t)
	namespace := plane.Namespace(t, "departures")
	summary := &configv1beta1.ClusterSummary{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: "s", Finalizers: []string{configv1beta1.ClusterSummaryFinalizer},
			Labels: map[string]string{libv1beta1.ClusterNameLabel: "one", libv1beta1.ClusterTypeLabel: string(libv1beta1.ClusterTypeSveltos)},
		},
		Spec: configv1beta1.ClusterSummarySpec{ClusterNamespace: namespace, ClusterName: "one", ClusterType: libv1beta1.ClusterTypeSveltos},
	}
	if err := hubClient.Create(t.Context(), summary); err != nil {
		t.Fatal(err)
	}
	w := newTestEnv(t, hubClient, namespace, libv1beta1.SveltosClusterSpec{})
	var forgotten []string
	w.controller.Forget = func(member string) { forgotten = append(forgotten, member) }
	force := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"annotations":{"`+kube.AnnotationDeregister+`":"force"}}}`))
	w.must(hubClient.Patch(t.Context(), w.cluster, force))
	reconcileOnce := func() {
		_, err := w.controller.Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(w.cluster)})
		w.must(err)
	}
	reconcileOnce()
	if len(forgotten) > 0 {
		t.Errorf("operations are canceled before the deadline: %v", forgotten)
	}
	w.clock.Step(21 * time.Second)
	reconcileOnce()
	if want := namespace + "/one"; !slices.Contains(forgotten, want) {
		t.Errorf("forgotten: %v, want %s", forgotten, want)
	}
}

// staleCache is a cache with a cluster that is deleted.
type staleCache struct {
	client.Client
	cluster *libv1beta1.SveltosCluster
}

func (b staleCache) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	if cluster, ok := obj.(*libv1beta1.SveltosCluster); ok {
		b.cluster.DeepCopyInto(cluster)
		return nil
	}
	return b.Client.Get(ctx, key, obj, opts...)
}

func TestClusterThatIsRegisteredAgainKeepsItsCredentials(t *testing.T) {
	t.Parallel()
	hubClient, plane := newHub(t)
	namespace := plane.Namespace(t, "departures")
	w := newTestEnv(t, hubClient, namespace, libv1beta1.SveltosClusterSpec{})
	deleted := w.cluster.DeepCopy()
	w.must(hubClient.Get(t.Context(), client.ObjectKeyFromObject(deleted), deleted))
	deleted.Spec.PullMode = false
	removeFinalizers := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
	w.must(hubClient.Patch(t.Context(), w.cluster, removeFinalizers))
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{
		Namespace: namespace, Name: "one-sveltos-kubeconfig", Labels: map[string]string{"towline.dev/registration": "one"},
	}}
	w.must(hubClient.Create(t.Context(), secret))
	w.cluster = &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "one", Finalizers: []string{kube.FinalizerCluster}}}
	w.must(hubClient.Create(t.Context(), w.cluster))
	w.controller.Hub = staleCache{hubClient, deleted}
	w.controller.Reachability.Contact = func(context.Context, fleet.Member) (fleet.Facts, error) { return fleet.Facts{}, nil }
	_, err := w.controller.Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(w.cluster)})
	w.must(err)
	w.must(hubClient.Get(t.Context(), client.ObjectKeyFromObject(secret), secret))
}
