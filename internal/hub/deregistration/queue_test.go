package deregistration_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/deregistration"
	"github.com/towline/towline/internal/hub/registration"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/test/controllers"
)

// TestDeregistrationsOfOtherNamespaces deregisters unresponsive push members of one namespace, more than are
// deregistered concurrently. A member of another namespace is contacted meanwhile.
func TestDeregistrationsOfOtherNamespaces(t *testing.T) {
	t.Parallel()
	hubClient, plane := newHub(t)
	silent, other := plane.Namespace(t, "silent"), plane.Namespace(t, "other")
	var contacted atomic.Int32
	var unanswered controllers.Concurrency
	contact := func(ctx context.Context, m fleet.Member) (fleet.Facts, error) {
		if m.Namespace == other {
			contacted.Add(1)
		} else {
			defer unanswered.Begin()()
		}
		<-ctx.Done()
		return fleet.Facts{}, ctx.Err()
	}
	controllers.Start(t, plane.Config, func(ctx context.Context, mgr ctrl.Manager) error {
		controller := &deregistration.Controller{
			Hub: mgr.GetClient(), Live: hubClient, Locks: &registration.ClusterLocks{}, Events: events.NewFakeRecorder(1000), Clock: clock.RealClock{},
			Reachability: &deregistration.Reachability{Live: hubClient, Contact: contact},
			// No deregistration gets further than the withdrawal.
			WithdrawRemaining: func(context.Context, fleet.Member) (pending, kept []string, err error) {
				return []string{"a bundle"}, nil, nil
			},
		}
		return controller.Setup(ctx, mgr)
	}, silent, other)
	deregister := func(namespace, name string) {
		cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Finalizers: []string{kube.FinalizerCluster}}}
		if err := hubClient.Create(t.Context(), cluster); err != nil {
			t.Fatal(err)
		}
		if err := hubClient.Delete(t.Context(), cluster); err != nil {
			t.Fatal(err)
		}
		deleteFinalizersAtEnd(t, hubClient, cluster)
	}
	eventually := func(what string, within time.Duration, is func() bool) {
		err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, within, true, func(context.Context) (bool, error) { return is(), nil })
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	for i := range 60 {
		deregister(silent, fmt.Sprint("silent-", i))
	}
	eventually("all workers of the namespace are taken", 30*time.Second, func() bool { return unanswered.Running() >= 40 })
	deregister(other, "other")
	// Those that do not answer keep their workers for ten seconds.
	eventually("the member of the other namespace is contacted", 5*time.Second, func() bool { return contacted.Load() > 0 })
	if got := unanswered.Most(); got > 40 {
		t.Errorf("%d members of one namespace were contacted at once, want 40", got)
	}
}
