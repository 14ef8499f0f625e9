package departures_test

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
	"github.com/towline/towline/internal/hub/departures"
	"github.com/towline/towline/internal/hub/registrations"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// world is a hub with one pull member that is being deregistered, and a controller that runs when it is told to.
type world struct {
	testing.TB
	client.Client
	clock      *clocktesting.FakeClock
	controller *departures.Controller
	cluster    *libv1beta1.SveltosCluster
}

// newWorld makes a member whose agent has beaten once, and never became ready.
func newWorld(t *testing.T, hubClient client.Client, namespace string, spec libv1beta1.SveltosClusterSpec) *world {
	t.Helper()
	w := &world{TB: t, Client: hubClient, clock: clocktesting.NewFakeClock(time.Now())}
	w.controller = &departures.Controller{
		Hub: hubClient, Live: hubClient, Turns: &registrations.ClusterLocks{},
		Reach:  &departures.Reach{Live: hubClient, Heartbeats: &heartbeats.Judge{Clock: w.clock}},
		Events: events.NewFakeRecorder(100), Clock: w.clock,
	}
	spec.PullMode = true
	w.cluster = &libv1beta1.SveltosCluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "one", Finalizers: []string{kube.FinalizerCluster}}, Spec: spec,
	}
	w.must(hubClient.Create(t.Context(), w.cluster))
	beat := &metav1.MicroTime{Time: w.clock.Now()}
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "one"}, Spec: coordinationv1.LeaseSpec{RenewTime: beat}}
	w.must(hubClient.Create(t.Context(), lease))
	w.must(hubClient.Delete(t.Context(), w.cluster))
	t.Cleanup(func() {
		patch := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
		if err := client.IgnoreNotFound(hubClient.Patch(context.WithoutCancel(t.Context()), w.cluster, patch)); err != nil {
			t.Error(err)
		}
	})
	return w
}

// installed is a hub with all kinds.
func installed(t *testing.T) (client.Client, *localkube.Plane) {
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

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// want reconciles and wants the departure to say why it waits, to look again after a time, and to be forced or not.
func (w *world) want(why string, after time.Duration, forced bool) {
	w.Helper()
	result, err := w.controller.Reconcile(w.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(w.cluster)})
	w.must(err)
	w.must(w.Get(w.Context(), client.ObjectKeyFromObject(w.cluster), w.cluster))
	is := strings.Contains(w.cluster.Annotations[kube.AnnotationDeregister], kube.DeregisterForce)
	if said := w.cluster.Status.FailureMessage; !strings.Contains(said, why) || result.RequeueAfter != after || is != forced {
		w.Errorf("says %q, looks again after %s, forced %t, want %q, %s, %t", said, result.RequeueAfter, is, why, after, forced)
	}
}

// wantGone reconciles and wants the cluster object to be gone.
func (w *world) wantGone() {
	w.Helper()
	_, err := w.controller.Reconcile(w.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(w.cluster)})
	w.must(err)
	if err := w.Get(w.Context(), client.ObjectKeyFromObject(w.cluster), w.cluster); !apierrors.IsNotFound(err) {
		w.Errorf("the cluster is not gone: %v, %+v", err, w.cluster)
	}
}

func TestAgentThatFallsSilentBeforeItWasReadyIsNoticed(t *testing.T) {
	t.Parallel()
	hubClient, plane := installed(t)
	w := newWorld(t, hubClient, plane.Namespace(t, "departures"), libv1beta1.SveltosClusterSpec{CleanupGracePeriod: &metav1.Duration{Duration: 100 * time.Second}})
	w.want("its agent to remove itself", 30*time.Second, false)
	w.clock.Step(91 * time.Second)
	w.want("its agent is silent since ", 9*time.Second-w.late(), false)
	w.clock.Step(20 * time.Second)
	w.wantGone()
}

// late is how much later than the API server's deletion time our clock began.
func (w *world) late() time.Duration {
	return w.clock.Since(w.cluster.DeletionTimestamp.Time) - 91*time.Second
}

func TestNamespaceThatGoesLaterEndsTheWaiting(t *testing.T) {
	t.Parallel()
	hubClient, _ := installed(t)
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "departures-"}}
	if err := hubClient.Create(t.Context(), namespace); err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, hubClient, namespace.Name, libv1beta1.SveltosClusterSpec{})
	w.want("its agent to remove itself", 30*time.Second, false)
	w.want("its agent to remove itself", 30*time.Second, false)
	w.must(hubClient.Delete(t.Context(), namespace))
	w.wantGone()
}

func TestWhatIsBeingDoneToAClusterThatIsGivenUpIsCutOff(t *testing.T) {
	t.Parallel()
	hubClient, plane := installed(t)
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
	w := newWorld(t, hubClient, namespace, libv1beta1.SveltosClusterSpec{})
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
		t.Errorf("it is cut off while it is waited for: %v", forgotten)
	}
	w.clock.Step(21 * time.Second)
	reconcileOnce()
	if want := namespace + "/one"; !slices.Contains(forgotten, want) {
		t.Errorf("forgotten: %v, want %s", forgotten, want)
	}
}

// behind is a cache that still has a cluster which has left.
type behind struct {
	client.Client
	cluster *libv1beta1.SveltosCluster
}

func (b behind) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	if cluster, ok := obj.(*libv1beta1.SveltosCluster); ok {
		b.cluster.DeepCopyInto(cluster)
		return nil
	}
	return b.Client.Get(ctx, key, obj, opts...)
}

func TestClusterThatIsRegisteredAgainKeepsItsCredentials(t *testing.T) {
	t.Parallel()
	hubClient, plane := installed(t)
	namespace := plane.Namespace(t, "departures")
	w := newWorld(t, hubClient, namespace, libv1beta1.SveltosClusterSpec{})
	left := w.cluster.DeepCopy()
	w.must(hubClient.Get(t.Context(), client.ObjectKeyFromObject(left), left))
	left.Spec.PullMode = false
	free := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
	w.must(hubClient.Patch(t.Context(), w.cluster, free))
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{
		Namespace: namespace, Name: "one-sveltos-kubeconfig", Labels: map[string]string{"towline.dev/registration": "one"},
	}}
	w.must(hubClient.Create(t.Context(), secret))
	w.cluster = &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "one", Finalizers: []string{kube.FinalizerCluster}}}
	w.must(hubClient.Create(t.Context(), w.cluster))
	w.controller.Hub = behind{hubClient, left}
	w.controller.Reach.Contact = func(context.Context, fleet.Member) (fleet.Facts, error) { return fleet.Facts{}, nil }
	_, err := w.controller.Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(w.cluster)})
	w.must(err)
	w.must(hubClient.Get(t.Context(), client.ObjectKeyFromObject(secret), secret))
}
