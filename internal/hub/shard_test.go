package hub_test

import (
	"context"
	"fmt"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub"
)

// shardTransport is the transport of the hub of one shard.
type shardTransport struct{ *fakeTransport }

var _ deliver.Transport = shardTransport{}

func newShardTransport() shardTransport {
	return shardTransport{&fakeTransport{deployed: map[string]bundle.Bundle{}}}
}

func (c shardTransport) Deliver(ctx context.Context, m fleet.Member, b bundle.Bundle) (bundle.Report, error) {
	return c.deliver(ctx, m, b)
}

func (c shardTransport) Withdraw(ctx context.Context, m fleet.Member, w bundle.Withdrawal) (bool, error) {
	return c.withdraw(ctx, m, w)
}

func (c shardTransport) FindDeployed(_ context.Context, m fleet.Member, id bundle.ID) (bundle.Deployed, bool, error) {
	return c.findDeployed(m, id)
}

func (c shardTransport) ListDeployed(_ context.Context, m fleet.Member) ([]bundle.Deployed, error) {
	return c.listDeployed(m)
}

func (c shardTransport) transports() map[fleet.Mode]deliver.Transport {
	return map[fleet.Mode]deliver.Transport{fleet.Push: c, fleet.Pull: c}
}

// createShardMember registers a pull member of a shard with a live agent.
func (w *world) createShardMember(shard, name string) *libv1beta1.SveltosCluster {
	w.Helper()
	cluster := &libv1beta1.SveltosCluster{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: w.ns, Name: name, Labels: w.prodLabels(), Annotations: map[string]string{libv1beta1.ShardAnnotation: shard},
		},
		Spec: libv1beta1.SveltosClusterSpec{PullMode: true},
	}
	w.create(cluster)
	now := metav1.NowMicro()
	w.create(&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name}, Spec: coordinationv1.LeaseSpec{RenewTime: &now}})
	w.setReady(cluster)
	return cluster
}

func TestShardsShareTheFleet(t *testing.T) {
	w := newPrivateWorld(t)
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	rest, k := newShardTransport(), newShardTransport()
	w.start(w.plane.Config, hub.Options{LeaderElection: true, Transports: rest.transports()})
	w.start(w.plane.Config, hub.Options{ShardKey: "k", LeaderElection: true, Transports: k.transports()})

	cm := w.createConfigMap("manifests", manifest("a"))
	one := w.createReadyMember("one", w.prodLabels())
	w.createShardMember("k", "two")
	unserved := w.createShardMember("nobody", "three")
	profile := w.createProfile(nil)
	w.wantProvisioned(profile, "one")
	w.wantProvisioned(profile, "two")
	a := []string{"ConfigMap default/a"}
	wantHas := func(c shardTransport, member string, want []string) {
		t.Helper()
		if err := checkEqual(want, c.refs(member, "Resources")); err != nil {
			t.Errorf("%s %v", member, err)
		}
	}
	wantHas(rest, "one", a)
	wantHas(rest, "two", nil)
	wantHas(k, "one", nil)
	wantHas(k, "two", a)
	if summary, err := w.getSummary(profile, "three"); err != nil || len(summary.Status.FeatureSummaries) != 0 {
		t.Errorf("a cluster of a shard without a hub: got %+v and %v", summary, err)
	}
	for _, lease := range []string{"towline-hub", "towline-hub-k"} {
		w.must(w.Get(t.Context(), client.ObjectKey{Namespace: "projectsveltos", Name: lease}, &coordinationv1.Lease{}))
	}

	// A cluster that moves to another shard keeps its objects.
	update(w, one, func(c *libv1beta1.SveltosCluster) {
		metav1.SetMetaDataAnnotation(&c.ObjectMeta, libv1beta1.ShardAnnotation, "k")
	})
	w.eventually("the other shard takes over", func() error { return checkEqual(a, k.refs("one", "Resources")) })
	update(w, cm, func(cm *corev1.ConfigMap) { cm.Data["content"] = manifest("b") })
	w.eventually("delivery in the other shard", func() error { return checkEqual([]string{"ConfigMap default/b"}, k.refs("one", "Resources")) })
	w.wantProvisioned(profile, "one")
	wantHas(rest, "one", a)
	if left := append(rest.withdrawals(), k.withdrawals()...); len(left) > 0 {
		t.Errorf("withdrawals: got %+v, want none", left)
	}

	// The finalizers of summaries of deleted clusters are removed, whatever their shard.
	w.must(w.Delete(t.Context(), unserved))
	w.must(w.Delete(t.Context(), profile))
	for _, member := range []string{"one", "two"} {
		w.wantNoSummary(profile, member)
	}
	w.eventually("withdrawn by the shard that has them", func() error { return checkEqual(2, len(k.withdrawals())) })
	if left := rest.withdrawals(); len(left) > 0 {
		t.Errorf("withdrawals by the hub of another shard: got %+v, want none", left)
	}
}

func TestInvalidShardKeyIsRefused(t *testing.T) {
	t.Parallel()
	sharedHub()
	if err := hub.Run(t.Context(), hubPlane.Config, hub.Options{ShardKey: "a b"}); err == nil {
		t.Error("got no error")
	} else if want := `shard key "a b": `; fmt.Sprintf("%.*s", len(want), err) != want {
		t.Errorf("got %q, want it to begin with %q", err, want)
	}
}
