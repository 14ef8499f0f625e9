package summaries

import (
	"context"
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/slots"
)

// TestWorkersOfANamespace has more clusters and profiles in one namespace than workers.
func TestWorkersOfANamespace(t *testing.T) {
	t.Parallel()
	for mode, want := range map[fleet.Mode]struct{ healthy, slow int }{fleet.Push: {80, 24}, fleet.Pull: {24, 8}} {
		s := slots.New()
		queue := priorityqueue.New[reconcile.Request](string(mode))
		defer queue.ShutDown()
		s.Queue = queue
		// acquireOn returns the slots for summaries, each of another profile, with the keys of their clusters.
		acquireOn := func(namespace string, summaries int, cluster func(i int) string) map[*slots.Slot]string {
			all := map[*slots.Slot]string{}
			for i := range summaries {
				m := fleet.Member{Type: fleet.TypeSveltos, Mode: mode, Namespace: namespace, Name: cluster(i)}
				summary := &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprint(i)}}
				pool, keys := workersFor(summary, m)
				req := reconcile.Request{NamespacedName: client.ObjectKeyFromObject(summary)}
				if slot, ok := s.Acquire(req, pool, keys...); ok {
					all[slot] = clusterKey(m)
				}
			}
			return all
		}
		// acquire has one summary for each of the clusters.
		acquire := func(namespace string, clusters int) map[*slots.Slot]string {
			return acquireOn(namespace, clusters, func(i int) string { return fmt.Sprint(i) })
		}
		// An agent can report for many summaries at once.
		ofOneCluster := acquireOn("hostile", 200, func(int) string { return "one" })
		if got := len(ofOneCluster); got != 10 {
			t.Errorf("%s: the summaries of one cluster have %d workers, want 10", mode, got)
		}
		for slot := range ofOneCluster {
			slot.Release()
		}
		healthy := acquire("hostile", 200)
		if got := len(healthy); got != want.healthy {
			t.Errorf("%s: the clusters of a namespace have %d workers, want %d", mode, got, want.healthy)
		}
		if got := len(acquire("other", 1)); got != 1 {
			t.Errorf("%s: another namespace has no worker", mode)
		}
		for slot, cluster := range healthy {
			slot.Release(cluster)
		}
		if got := len(acquire("hostile", len(healthy))); got != want.slow {
			t.Errorf("%s: the slow clusters of a namespace have %d workers, want %d", mode, got, want.slow)
		}
	}
}

// slowMember is a transport whose requests end with the reconcile.
type slowMember struct{ deliver.Transport }

func (slowMember) Deliver(ctx context.Context, _ fleet.Member, b bundle.Bundle) (bundle.Report, error) {
	<-ctx.Done()
	return bundle.Report{ID: b.ID}, ctx.Err()
}

func (slowMember) Withdraw(ctx context.Context, _ fleet.Member, _ bundle.Withdrawal) (bool, error) {
	<-ctx.Done()
	return false, ctx.Err()
}

// TestMemberThatTakesAllTimeIsSlow has a member whose requests last until reconcileTimeout and have no timeout of their
// own. The member is slow, unless the reconcile was canceled.
func TestMemberThatTakesAllTimeIsSlow(t *testing.T) {
	t.Parallel()
	c := &Controller{Transport: slowMember{}}
	member := fleet.Member{Type: fleet.TypeSveltos, Mode: fleet.Push, Namespace: "fleet", Name: "one"}
	deployed := map[libv1beta1.FeatureID]bundle.Deployed{libv1beta1.FeatureHelm: {}}
	ended, cancelEnded := context.WithTimeout(t.Context(), 0)
	defer cancelEnded()
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	for name, step := range map[string]func(context.Context, *state) error{"deliver": c.deliver, "withdraw": c.withdrawFrom} {
		for want, ctx := range []context.Context{canceled, ended} {
			s := newState(&configv1beta1.ClusterSummary{}, nil, member)
			s.compositions, s.deployed = []Composition{{Feature: libv1beta1.FeatureResources}}, deployed
			if err := step(ctx, s); err == nil {
				t.Errorf("%s: no error at the end of the time", name)
			}
			if got := slowKeys(s, member); len(got) != want {
				t.Errorf("%s that ends with %q: slow keys %q, want %d", name, ctx.Err(), got, want)
			}
		}
	}
}
