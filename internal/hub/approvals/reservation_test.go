package approvals_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/hub/executionnamespaces"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/kube"
)

// TestReservationOfAForeignID: the holder of a bootstrap token registers a cluster with the ID of another cluster, and
// tries to keep the ID without an agent. The other cluster can register after executionnamespaces.RegistrationTimeout,
// and then the ID is its own.
func TestReservationOfAForeignID(t *testing.T) {
	t.Parallel()
	const late = executionnamespaces.RegistrationTimeout - time.Minute
	for name, keep := range map[string]func(w *testEnv, cluster, id string, token bootstrap.Token, certificate bootstrap.Certificate){
		"repeats-the-request": func(w *testEnv, cluster, id string, token bootstrap.Token, _ bootstrap.Certificate) {
			_, err := w.request(w.tokenConfig(token), cluster, id)
			w.must(err)
		},
		"repeats-it-late": func(w *testEnv, cluster, id string, token bootstrap.Token, _ bootstrap.Certificate) {
			w.setFirstUse(token, late)
			live := w.cluster(cluster)
			live.Annotations[kube.AnnotationFirstUse] = time.Now().Add(-late).UTC().Format(time.RFC3339)
			w.must(w.Update(w.Context(), live))
			_, err := w.request(w.tokenConfig(token), cluster, id)
			w.must(err)
		},
		"registers-again-late": func(w *testEnv, cluster, id string, token bootstrap.Token, certificate bootstrap.Certificate) {
			w.setFirstUse(token, late)
			w.write(certificate, func(agent client.Client) error {
				return agent.Delete(w.Context(), &clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: cluster}})
			})
			_, err := w.request(w.tokenConfig(token), cluster, id)
			w.must(err)
		},
		"renews-its-lease-once": func(w *testEnv, cluster, _ string, _ bootstrap.Token, certificate bootstrap.Certificate) {
			w.write(certificate, func(agent client.Client) error { return renewLease(w.Context(), agent, cluster) })
		},
		"reports-once-that-it-is-ready": func(w *testEnv, cluster, _ string, _ bootstrap.Token, certificate bootstrap.Certificate) {
			w.write(certificate, func(agent client.Client) error {
				status := `{"status":{"kubernetesVersion":"v1.36.3","conditions":[{"type":"Ready","status":"True","reason":"Mine","message":"",` +
					`"lastTransitionTime":"2026-01-01T00:00:00Z"}]}}`
				return agent.Status().Patch(w.Context(), &clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: cluster}},
					client.RawPatch(types.MergePatchType, []byte(status)))
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			newTestEnv(t).checkReservation(name, strings.Contains(name, "late"), keep)
		})
	}
}

// checkReservation registers a cluster with a foreign ID, calls keep, and checks that the ID is free 16 minutes after
// the first use of the token. keep sets this time to 14 minutes ago if isLate is true.
func (w *testEnv) checkReservation(
	name string, isLate bool, keep func(w *testEnv, cluster, id string, token bootstrap.Token, certificate bootstrap.Certificate),
) {
	w.Helper()
	clock := clocktesting.NewFakeClock(time.Now())
	controller := &executionnamespaces.Controller{
		Hub: w.Client, Live: w.Client, Clock: clock, Heartbeats: &heartbeats.Monitor{Clock: clock}, Events: events.NewFakeRecorder(100),
		Config: func(context.Context, fleet.Member) (*rest.Config, error) { return nil, errors.New("unreachable") },
	}
	attacker, victim, id := "squatter-"+name, "owner-"+name, "id-"+name
	// exists reconciles the attacker's Cluster and returns whether it exists afterwards.
	exists := func() bool {
		w.Helper()
		if _, err := controller.Reconcile(w.Context(), reconcile.Request{NamespacedName: client.ObjectKey{Name: attacker}}); err != nil {
			w.Log(err) // it is retried
		}
		err := w.Get(w.Context(), client.ObjectKey{Name: attacker}, &clusterv1alpha1.Cluster{})
		w.must(client.IgnoreNotFound(err))
		return !apierrors.IsNotFound(err)
	}
	attackersToken, victimsToken := w.token(""), w.token("")
	certificate, err := w.request(w.tokenConfig(attackersToken), attacker, id)
	w.must(err)
	keep(w, attacker, id, attackersToken, certificate)
	if !isLate {
		exists()
		clock.Step(executionnamespaces.RegistrationTimeout - time.Minute)
	}
	if !exists() {
		w.Fatal("the Cluster is deleted before the timeout of the registration")
	}
	_, err = w.request(w.tokenConfig(victimsToken), victim, id)
	w.wantDenied(err, bootstrap.ReasonClusterTaken, takenText(id, victim))

	clock.Step(2 * time.Minute)
	// The deletion of its namespace can take half a minute. An extended reservation would last 14 minutes more.
	deadline := clock.Now().Add(executionnamespaces.RegistrationTimeout - 2*time.Minute)
	w.must(wait.PollUntilContextTimeout(w.Context(), 50*time.Millisecond, 2*time.Minute, true, func(context.Context) (bool, error) {
		if clock.Now().Before(deadline) {
			clock.Step(time.Second)
		}
		return !exists(), nil
	}))
	_, err = w.request(w.tokenConfig(victimsToken), victim, id)
	w.must(err)
	w.setFirstUse(attackersToken, time.Minute)
	_, err = w.request(w.tokenConfig(attackersToken), attacker, id)
	// The reason depends on whether the registration was complete for a moment.
	if denied := (*bootstrap.DeniedError)(nil); !errors.As(err, &denied) {
		w.Errorf("the attacker's second registration: got %v, want a denial", err)
	}
	w.wantNone(attacker)
	w.setFirstUse(attackersToken, executionnamespaces.RegistrationTimeout+time.Minute)
	_, err = w.request(w.tokenConfig(attackersToken), attacker, id)
	w.wantDenied(err, bootstrap.ReasonTokenSpent, "")
}

// write sends a write request with the certificate of an agent. The API server needs a moment to know its rights.
func (w *testEnv) write(certificate bootstrap.Certificate, request func(agent client.Client) error) {
	w.Helper()
	agent := w.agent(w.certificateConfig(certificate))
	w.eventually(func() string {
		if err := request(agent); err != nil {
			return err.Error()
		}
		return ""
	})
}

// renewLease renews the Lease of a Cluster once.
func renewLease(ctx context.Context, agent client.Client, cluster string) error {
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: fleet.ExecutionSpace(cluster), Name: cluster}}
	renewed := `{"spec":{"holderIdentity":"nobody","renewTime":"` + time.Now().UTC().Format(metav1.RFC3339Micro) + `"}}`
	return agent.Patch(ctx, lease, client.RawPatch(types.MergePatchType, []byte(renewed)))
}
