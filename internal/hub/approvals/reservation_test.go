package approvals_test

import (
	"context"
	"errors"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/hub/spaces"
	"github.com/towline/towline/internal/join/bootstrap"
)

// TestReservationOfAForeignID: the holder of a bootstrap token registers a cluster with the ID of another cluster, and
// repeats the request. No agent reports, so the other cluster can register after spaces.RegistrationTimeout, and then
// the ID is its own.
func TestReservationOfAForeignID(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	clock := clocktesting.NewFakeClock(time.Now())
	controller := &spaces.Controller{
		Hub: w.Client, Live: w.Client, Clock: clock, Heartbeats: &heartbeats.Monitor{Clock: clock}, Events: events.NewFakeRecorder(100),
		Config: func(context.Context, fleet.Member) (*rest.Config, error) { return nil, errors.New("unreachable") },
	}
	const attacker, victim, id = "squatter", "owner-of-the-id", "id-foreign"
	// exists reconciles the attacker's Cluster and returns whether it exists afterwards.
	exists := func() bool {
		t.Helper()
		if _, err := controller.Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKey{Name: attacker}}); err != nil {
			t.Log(err) // it is retried
		}
		err := w.Get(t.Context(), client.ObjectKey{Name: attacker}, &clusterv1alpha1.Cluster{})
		w.must(client.IgnoreNotFound(err))
		return !apierrors.IsNotFound(err)
	}
	attackersToken, victimsToken := w.token(""), w.token("")
	for range 2 {
		_, err := w.request(w.tokenConfig(attackersToken), attacker, id)
		w.must(err)
	}
	clock.Step(spaces.RegistrationTimeout - time.Minute)
	if !exists() {
		t.Fatal("the Cluster is deleted before the timeout of the registration")
	}
	_, err := w.request(w.tokenConfig(victimsToken), victim, id)
	w.wantDenied(err, bootstrap.ReasonClusterTaken, takenText(id, victim))

	clock.Step(2 * time.Minute)
	// The deletion of its namespace can take half a minute.
	w.must(wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, 2*time.Minute, true, func(context.Context) (bool, error) {
		clock.Step(time.Second)
		return !exists(), nil
	}))
	_, err = w.request(w.tokenConfig(victimsToken), victim, id)
	w.must(err)
	_, err = w.request(w.tokenConfig(attackersToken), attacker, id)
	w.wantDenied(err, bootstrap.ReasonClusterTaken, takenText(id, attacker))
	w.wantNone(attacker)
	w.setFirstUse(attackersToken, spaces.RegistrationTimeout+time.Minute)
	_, err = w.request(w.tokenConfig(attackersToken), attacker, id)
	w.wantDenied(err, bootstrap.ReasonTokenSpent, "")
}
