package clusters_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
)

// space creates the execution namespace of a pull member, with the Lease of its agent.
func (w *world) space() *coordinationv1.Lease {
	w.Helper()
	namespace := fleet.ExecutionSpace(w.cluster.Name)
	w.must(w.Create(w.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}))
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: w.cluster.Name}}
	w.must(w.Create(w.Context(), lease))
	return lease
}

func (w *world) beat(lease *coordinationv1.Lease, at time.Time) {
	w.Helper()
	lease.Spec.RenewTime = &metav1.MicroTime{Time: at}
	w.must(w.Update(w.Context(), lease))
}

func TestHeartbeatsDecideTheStatusOfAPullMember(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "pull", clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Pull})
	lease := w.space()
	w.want("Unknown/ClusterStatusNeverUpdated: ", unreachable)
	if _, ok := w.controller.Failures("pull"); ok {
		t.Error("a member that nobody dials has failures")
	}
	w.clock.Step(time.Hour)
	w.want("Unknown/ClusterStatusNeverUpdated: ", unreachable)
	w.report(metav1.ConditionTrue, clusterv1alpha1.ReasonClusterReady, "well")
	w.want("True/ClusterReady: well")
	w.wantEvents("Normal ClusterReady cluster pull is ready, Kubernetes ")
	// The member's clock is an hour behind.
	w.beat(lease, w.clock.Now().Add(-time.Hour))
	if next := w.reconcile(); next != 38*time.Second {
		t.Errorf("it looks again after %s, want 38s", next)
	}
	w.clock.Step(37 * time.Second)
	if next := w.reconcile(); next != time.Second {
		t.Errorf("it looks again after %s, want 1s", next)
	}
	w.want("True/ClusterReady: well")
	w.clock.Step(time.Second)
	w.want("Unknown/ClusterStatusUnknown: the agent of the cluster does not report any more", unreachable)
	w.wantEvents("Warning ClusterStatusUnknown cluster pull: the agent of the cluster does not report any more")
	w.beat(lease, w.clock.Now())
	if next := w.reconcile(); next != 0 || !strings.HasPrefix(w.ready(), "Unknown/") {
		t.Errorf("Ready is %q, and it looks again after %s", w.ready(), next)
	}
	w.report(metav1.ConditionFalse, clusterv1alpha1.ReasonClusterNotReady, "ill")
	w.want("False/ClusterNotReady: ill", notReady)
	w.wantEvents("Warning ClusterNotReady cluster pull: ill")
}

func TestRestartOfTheHubMakesNoLiveAgentSilent(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "new-hub", clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Pull})
	lease := w.space()
	// The member's clock is two minutes behind.
	const behind = 2 * time.Minute
	w.beat(lease, noon.Add(-behind))
	w.report(metav1.ConditionTrue, clusterv1alpha1.ReasonClusterReady, "well")
	w.want("True/ClusterReady: well")
	for range 3 {
		w.clock.Step(heartbeats.KarmadaLimit - time.Second)
		w.want("True/ClusterReady: well")
		w.beat(lease, w.clock.Now().Add(-behind))
		w.want("True/ClusterReady: well")
		w.startMonitor()
		if next := w.reconcile(); next != heartbeats.KarmadaLimit {
			t.Errorf("it looks again after %s, want %s", next, heartbeats.KarmadaLimit)
		}
	}
	w.wantEvents()
	// The agent stopped together with the hub.
	w.clock.Step(heartbeats.KarmadaLimit)
	w.want("Unknown/ClusterStatusUnknown: ", unreachable)
	w.wantEvents("Warning ClusterStatusUnknown cluster new-hub: the agent of the cluster does not report any more")
}

// unreachableReader is an API server that does not answer.
type unreachableReader struct{ client.Reader }

func (unreachableReader) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return errors.New("it does not answer")
}

func TestOutageOfTheHubMakesNoLiveAgentSilent(t *testing.T) {
	t.Parallel()
	for name, dies := range map[string]bool{"hub-away": false, "hub-away-dies": true} {
		w := newWorld(t, name, clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Pull})
		lease := w.space()
		w.beat(lease, noon)
		w.report(metav1.ConditionTrue, clusterv1alpha1.ReasonClusterReady, "well")
		w.reconcile()
		w.away, w.controller.Heartbeats.Live = true, unreachableReader{}
		for range 18 {
			w.clock.Step(10 * time.Second)
			w.want("True/ClusterReady: well")
		}
		w.away, w.back, w.controller.Heartbeats.Live = false, w.clock.Now(), w.Client
		w.clock.Step(heartbeats.KarmadaLimit - time.Second)
		w.want("True/ClusterReady: well")
		if dies {
			w.clock.Step(time.Second)
			w.want("Unknown/ClusterStatusUnknown: ", unreachable)
			continue
		}
		w.beat(lease, noon.Add(-time.Minute))
		w.clock.Step(time.Second)
		w.want("True/ClusterReady: well")
		w.wantEvents()
	}
}

func TestUnconfirmedSilenceIsIgnored(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "not-confirmed", clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Pull})
	w.beat(w.space(), noon)
	w.report(metav1.ConditionTrue, clusterv1alpha1.ReasonClusterReady, "well")
	w.reconcile()
	w.clock.Step(time.Minute)
	w.controller.Heartbeats.Live = unreachableReader{}
	if _, err := w.controller.Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(w.cluster)}); err == nil {
		t.Error("a Lease that cannot be read is no error")
	}
	w.read()
	if got := w.ready(); !strings.HasPrefix(got, "True/") {
		t.Errorf("Ready is %q", got)
	}
}
