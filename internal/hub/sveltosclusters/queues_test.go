package sveltosclusters_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/hub/sveltosclusters"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/test/controllers"
)

// unanswered is a number of push members in one namespace, more than are contacted concurrently.
const unanswered = 120

// startController runs a controller for the clusters in some namespaces.
func startController(
	t *testing.T, plane *localkube.Plane, agents clock.Clock, config func(context.Context, fleet.Member) (*rest.Config, error), namespaces ...string,
) client.Client {
	t.Helper()
	hub, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	installCRD(t, hub)
	controllers.Start(t, plane.Config, func(ctx context.Context, mgr ctrl.Manager) error {
		controller := &sveltosclusters.Controller{
			Heartbeats: &heartbeats.Monitor{Hub: mgr.GetClient(), Live: mgr.GetAPIReader(), Clock: agents},
			Hub:        mgr.GetClient(), Forget: func(string) {}, Events: events.NewFakeRecorder(1000), Clock: clock.RealClock{}, MemberConfig: config,
		}
		return controller.Setup(ctx, mgr)
	}, namespaces...)
	return hub
}

func TestSilentAgentIsDetectedWhileManyMembersDoNotAnswer(t *testing.T) {
	t.Parallel()
	plane := localkube.Shared(t)
	namespace := plane.Namespace(t, "queues")
	var dialled atomic.Int32
	listening := clocktesting.NewFakeClock(start)
	hub := startController(t, plane, listening, func(ctx context.Context, _ fleet.Member) (*rest.Config, error) {
		dialled.Add(1)
		<-ctx.Done()
		return nil, ctx.Err()
	}, namespace)
	for i := range unanswered {
		push := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprint("push-", i)}}
		if err := hub.Create(t.Context(), push); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "all workers of the namespace are taken", func(context.Context) (bool, error) { return dialled.Load() >= 80, nil })
	makeSilent(t, hub, namespace, listening)
}

// TestContactsOfOtherNamespaces has more unresponsive push members in one namespace than are contacted concurrently. A
// member in another namespace is still contacted.
func TestContactsOfOtherNamespaces(t *testing.T) {
	t.Parallel()
	plane := localkube.Shared(t)
	silent, other := plane.Namespace(t, "silent"), plane.Namespace(t, "other")
	var unanswering controllers.Concurrency
	hub := startController(t, plane, clock.RealClock{}, func(ctx context.Context, m fleet.Member) (*rest.Config, error) {
		if m.Namespace == other {
			return plane.Config, nil
		}
		defer unanswering.Begin()()
		<-ctx.Done()
		return nil, ctx.Err()
	}, silent, other)
	create := func(namespace, name string) *libv1beta1.SveltosCluster {
		cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
		if err := hub.Create(t.Context(), cluster); err != nil {
			t.Fatal(err)
		}
		return cluster
	}
	for i := range unanswered {
		create(silent, fmt.Sprint("silent-", i))
	}
	eventually(t, "all workers of the namespace are taken", func(context.Context) (bool, error) { return unanswering.Running() >= 80, nil })
	cluster, from := create(other, "other"), time.Now()
	eventually(t, "the member of the other namespace is ready", func(ctx context.Context) (bool, error) {
		err := hub.Get(ctx, client.ObjectKeyFromObject(cluster), cluster)
		return err == nil && cluster.Status.Ready, err
	})
	// Those that do not answer keep their workers for ten seconds.
	if took := time.Since(from); took > 5*time.Second {
		t.Errorf("it took %s", took)
	}
	if got := unanswering.Most(); got > 80 {
		t.Errorf("%d members of one namespace were contacted at once, want 80", got)
	}
}

// TestChecksTakeTurns has more clusters in one namespace than the checks that run concurrently. All are checked.
func TestChecksTakeTurns(t *testing.T) {
	t.Parallel()
	plane := localkube.Shared(t)
	namespace := plane.Namespace(t, "turns")
	var checks controllers.Concurrency
	hub := startController(t, plane, clock.RealClock{}, func(context.Context, fleet.Member) (*rest.Config, error) {
		member := rest.CopyConfig(plane.Config)
		member.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				if !strings.HasSuffix(r.URL.Path, "/configmaps") {
					return next.RoundTrip(r)
				}
				defer checks.Begin()()
				<-time.After(100 * time.Millisecond)
				return next.RoundTrip(r)
			})
		})
		return member, nil
	}, namespace)
	var all []*libv1beta1.SveltosCluster
	for i := range 10 {
		cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprint("other-", i)}}
		cluster.Spec.ReadinessChecks = []libv1beta1.ClusterCheck{{
			Name: "c", Condition: "function evaluate() return {pass = true} end",
			ResourceSelectors: []libv1beta1.ResourceSelector{{Version: "v1", Kind: "ConfigMap", Namespace: namespace}},
		}}
		if err := hub.Create(t.Context(), cluster); err != nil {
			t.Fatal(err)
		}
		all = append(all, cluster)
	}
	for _, cluster := range all {
		eventually(t, cluster.Name+" is ready", func(ctx context.Context) (bool, error) {
			err := hub.Get(ctx, client.ObjectKeyFromObject(cluster), cluster)
			return err == nil && cluster.Status.Ready, err
		})
	}
	if got := checks.Most(); got < 2 || got > 3 {
		t.Errorf("the checks of %d members ran at once, want at most 3 in one namespace", got)
	}
}

// TestChecksOfOtherNamespaces has clusters in one namespace whose checks do not end, more than checks run concurrently.
// The checks of another namespace still run.
func TestChecksOfOtherNamespaces(t *testing.T) {
	t.Parallel()
	plane := localkube.Shared(t)
	hostile, other := plane.Namespace(t, "hostile"), plane.Namespace(t, "other")
	var stalled atomic.Int32
	hub := startController(t, plane, clock.RealClock{}, func(_ context.Context, m fleet.Member) (*rest.Config, error) {
		member := rest.CopyConfig(plane.Config)
		if m.Namespace == hostile {
			member.Wrap(func(next http.RoundTripper) http.RoundTripper {
				return roundTripper(func(r *http.Request) (*http.Response, error) {
					if !strings.HasSuffix(r.URL.Path, "/configmaps") {
						return next.RoundTrip(r)
					}
					stalled.Add(1)
					<-r.Context().Done()
					return nil, r.Context().Err()
				})
			})
		}
		return member, nil
	}, hostile, other)
	create := func(namespace, name string) *libv1beta1.SveltosCluster {
		cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: libv1beta1.SveltosClusterSpec{
			ReadinessChecks: []libv1beta1.ClusterCheck{{
				Name: "c", Condition: "function evaluate() return {pass = true} end",
				ResourceSelectors: []libv1beta1.ResourceSelector{{Version: "v1", Kind: "ConfigMap", Namespace: namespace}},
			}},
		}}
		if err := hub.Create(t.Context(), cluster); err != nil {
			t.Fatal(err)
		}
		return cluster
	}
	for i := range 10 {
		create(hostile, fmt.Sprint("hostile-", i))
	}
	eventually(t, "checks that do not end", func(context.Context) (bool, error) { return stalled.Load() >= 3, nil })
	cluster, from := create(other, "other"), time.Now()
	eventually(t, "the cluster of the other namespace is ready", func(ctx context.Context) (bool, error) {
		err := hub.Get(ctx, client.ObjectKeyFromObject(cluster), cluster)
		return err == nil && cluster.Status.Ready, err
	})
	// The others keep their slots for half a minute.
	if took := time.Since(from); took > 20*time.Second {
		t.Errorf("it took %s", took)
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// makeSilent creates a pull member, steps the clock of the heartbeat monitor beyond the limit, and waits until the
// member is Down.
func makeSilent(t *testing.T, hub client.Client, namespace string, listening *clocktesting.FakeClock) {
	t.Helper()
	pull := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "pull"}, Spec: libv1beta1.SveltosClusterSpec{PullMode: true}}
	beat := &metav1.MicroTime{Time: start}
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "pull"}, Spec: coordinationv1.LeaseSpec{RenewTime: beat}}
	for _, obj := range []client.Object{lease, pull} {
		if err := hub.Create(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
	}
	if err := hub.Status().Patch(t.Context(), pull, client.RawPatch("application/merge-patch+json", []byte(`{"status":{"ready":true}}`))); err != nil {
		t.Fatal(err)
	}
	becomes := func(want libv1beta1.ConnectionStatus) {
		eventually(t, "the member is "+string(want), func(ctx context.Context) (bool, error) {
			err := hub.Get(ctx, client.ObjectKeyFromObject(pull), pull)
			return err == nil && pull.Status.ConnectionStatus == want, err
		})
	}
	becomes(libv1beta1.ConnectionHealthy)
	listening.Step(heartbeats.SveltosLimit)
	// RequeueAfter uses the real clock, so an event triggers the reconcile.
	touched := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"annotations":{"example.com/touched":"true"}}}`))
	if err := hub.Patch(t.Context(), lease, touched); err != nil {
		t.Fatal(err)
	}
	from := time.Now()
	becomes(libv1beta1.ConnectionDown)
	// Those that do not answer keep their workers for ten seconds.
	if took := time.Since(from); took > 5*time.Second {
		t.Errorf("it took %s", took)
	}
}

func eventually(t *testing.T, what string, is wait.ConditionWithContextFunc) {
	t.Helper()
	if err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, 30*time.Second, true, is); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}
