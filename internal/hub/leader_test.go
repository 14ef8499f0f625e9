package hub_test

import (
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/hub"
)

// shortOutage is how long the API server can be away without a change of the leader.
const shortOutage = 5 * time.Second

// TestShortOutageDoesNotEndTheLead cuts the leader off from its API server for shortOutage. It stays the leader, so it
// does not start again with empty caches.
func TestShortOutageDoesNotEndTheLead(t *testing.T) {
	w := realWorld(t)
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	config, cut := cuttable(w.plane.Config)
	end := startHub(config, hub.Options{LeaderElection: true, CacheDir: t.TempDir()})
	cm := w.configMap("manifests", manifest("a"))
	w.pushMember("one")
	profile := w.profile(nil)
	w.wantProvisioned(profile, "one")
	before := w.leaderLease()

	cut.Store(true)
	outage := time.NewTimer(shortOutage)
	select {
	case <-outage.C:
	case <-t.Context().Done():
	}
	during := w.leaderLease()
	cut.Store(false)
	update(w, cm, func(cm *corev1.ConfigMap) { cm.Data["content"] = manifest("a") + "---\n" + manifest("b") })
	w.eventually("the hub delivers", func() error {
		_, err := w.version("b")
		return err
	})
	after := w.leaderLease()
	if silent := time.Since(during.Spec.RenewTime.Time); silent < shortOutage/2 {
		t.Errorf("the lead was renewed %s ago, in the outage", silent)
	}
	if *after.Spec.HolderIdentity != *before.Spec.HolderIdentity || *after.Spec.LeaseTransitions != *before.Spec.LeaseTransitions {
		t.Errorf("the leader is %s (%d transitions), before %s (%d)",
			*after.Spec.HolderIdentity, *after.Spec.LeaseTransitions, *before.Spec.HolderIdentity, *before.Spec.LeaseTransitions)
	}
	if err := end(); err != nil {
		t.Errorf("the hub has ended: %v", err)
	}
}

func (w *world) leaderLease() *coordinationv1.Lease {
	w.Helper()
	lease := &coordinationv1.Lease{}
	w.must(w.Get(w.Context(), client.ObjectKey{Namespace: "projectsveltos", Name: "towline-hub"}, lease))
	return lease
}
