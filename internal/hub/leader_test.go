package hub_test

import (
	"errors"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/hub"
)

// shortOutage is the duration of an outage of the API server that must not change the leader. leaseEnd is more than the
// duration of the Lease. lostLeadLimit is the maximum time that a hub runs after another hub is the leader: half of the
// time for renewals.
const (
	shortOutage   = 20 * time.Second
	leaseEnd      = 12 * time.Second
	lostLeadLimit = 20 * time.Second
)

// TestShortOutageKeepsLeadership cuts the leader off from its API server for shortOutage. It stays the leader, so
// it does not start again with empty caches.
func TestShortOutageKeepsLeadership(t *testing.T) {
	w := newPrivateWorld(t)
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	config, cut := withCutSwitch(w.plane.Config)
	end := startHub(config, hub.Options{LeaderElection: true, CacheDir: t.TempDir()})
	cm := w.createConfigMap("manifests", manifest("a"))
	w.registerPushMember("one")
	profile := w.createProfile(nil)
	w.wantProvisioned(profile, "one")
	before := w.leaderLease()

	cut.Store(true)
	waitFor(t, shortOutage)
	during := w.leaderLease()
	cut.Store(false)
	update(w, cm, func(cm *corev1.ConfigMap) { cm.Data["content"] = manifest("a") + "---\n" + manifest("b") })
	w.eventually("the hub delivers", func() error {
		_, err := w.getVersion("b")
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

// TestLeaderWithoutLeaseWritesNothing cuts the leader off from its Lease only. Another hub could be the leader after
// leaseEnd, so the leader must not change members or the hub until it has renewed the Lease.
func TestLeaderWithoutLeaseWritesNothing(t *testing.T) {
	w := newPrivateWorld(t)
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	config, cut := rest.CopyConfig(w.plane.Config), &atomic.Bool{}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return leaseBlocker{cut, next} })
	end := startHub(config, hub.Options{LeaderElection: true, CacheDir: t.TempDir()})
	cm := w.createConfigMap("manifests", manifest("a"))
	w.registerPushMember("one")
	profile := w.createProfile(nil)
	w.wantProvisioned(profile, "one")
	before := w.leaderLease()

	cut.Store(true)
	waitFor(t, leaseEnd)
	w.must(w.Delete(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "a"}}))
	update(w, cm, func(cm *corev1.ConfigMap) { cm.Data["content"] = manifest("a") + "---\n" + manifest("b") })
	waitFor(t, leaseEnd/2)
	for _, name := range []string{"a", "b"} {
		if _, err := w.getVersion(name); !apierrors.IsNotFound(err) {
			t.Errorf("ConfigMap %s is written without a Lease (%v)", name, err)
		}
	}
	cut.Store(false)
	w.eventually("the hub delivers", func() error {
		_, err := w.getVersion("b")
		return err
	})
	if after := w.leaderLease(); *after.Spec.HolderIdentity != *before.Spec.HolderIdentity {
		t.Errorf("the leader is %s, before %s", *after.Spec.HolderIdentity, *before.Spec.HolderIdentity)
	}
	if err := end(); err != nil {
		t.Errorf("the hub has ended: %v", err)
	}
}

// TestHubStopsIfAnotherHubIsLeader gives the Lease to another hub. The first hub stops before its renewal is overdue.
func TestHubStopsIfAnotherHubIsLeader(t *testing.T) {
	w := newPrivateWorld(t)
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	ended, cache := make(chan error, 1), t.TempDir()
	go func() {
		ended <- hub.Run(t.Context(), w.plane.Config, hub.Options{LeaderElection: true, CacheDir: cache})
	}()
	w.eventually("the hub is the leader", func() error {
		_, err := w.getLeader()
		return err
	})
	update(w, w.leaderLease(), func(lease *coordinationv1.Lease) { lease.Spec.HolderIdentity = ptr.To("another") })
	select {
	case err := <-ended:
		if err == nil {
			t.Error("the hub ended without an error")
		}
	case <-time.After(lostLeadLimit):
		t.Error("the hub does not end")
	}
}

// leaseBlocker is a transport that blocks the requests of a hub for its Lease.
type leaseBlocker struct {
	cut  *atomic.Bool
	next http.RoundTripper
}

// RoundTrip returns an error for requests for the Lease if cut is set.
func (s leaseBlocker) RoundTrip(r *http.Request) (*http.Response, error) {
	if s.cut.Load() && strings.HasSuffix(r.URL.Path, "/leases/towline-hub") {
		return nil, errors.New("cut off")
	}
	return s.next.RoundTrip(r)
}

// waitFor waits for a duration, or until the test ends.
func waitFor(t *testing.T, duration time.Duration) {
	t.Helper()
	select {
	case <-time.After(duration):
	case <-t.Context().Done():
	}
}

func (w *world) leaderLease() *coordinationv1.Lease {
	w.Helper()
	lease := &coordinationv1.Lease{}
	w.must(w.Get(w.Context(), client.ObjectKey{Namespace: "projectsveltos", Name: "towline-hub"}, lease))
	return lease
}
