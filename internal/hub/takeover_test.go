package hub_test

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/hub"
)

// takeoverLimit is the maximum time without a hub after one was killed. It is twice the documented time, for a busy
// machine.
const takeoverLimit = 30 * time.Second

// leadEndLimit is the maximum time that a hub runs without renewing its Lease. It is more than twice the documented
// time.
const leadEndLimit = 2 * time.Minute

// cutTransport is a transport that a test can cut off.
type cutTransport struct {
	cut  *atomic.Bool
	next http.RoundTripper
}

// RoundTrip returns an error if cut is set.
func (s cutTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	if s.cut.Load() {
		return nil, errors.New("cut off")
	}
	return s.next.RoundTrip(r)
}

// withCutSwitch returns a copy of config, and a switch that makes all its requests fail, as after a kill: the Lease is
// not released.
func withCutSwitch(config *rest.Config) (*rest.Config, *atomic.Bool) {
	cut := &atomic.Bool{}
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return cutTransport{cut, next} })
	return config, cut
}

// registerPushMember registers the test's own control plane as a member in push mode.
func (w *world) registerPushMember(name string) *libv1beta1.SveltosCluster {
	w.Helper()
	raw, err := os.ReadFile(w.plane.Kubeconfig)
	w.must(err)
	return w.registerPushMemberWith(name, raw)
}

// registerPushMemberWith registers a member in push mode.
func (w *world) registerPushMemberWith(name string, kubeconfig []byte) *libv1beta1.SveltosCluster {
	w.Helper()
	w.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name + "-sveltos-kubeconfig"}, Data: map[string][]byte{"kubeconfig": kubeconfig}})
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name, Labels: w.prodLabels()}}
	w.create(cluster)
	return cluster
}

func (w *world) getLeader() (string, error) {
	lease := &coordinationv1.Lease{}
	if err := w.Get(w.Context(), client.ObjectKey{Namespace: "projectsveltos", Name: "towline-hub"}, lease); err != nil {
		return "", err
	}
	if lease.Spec.HolderIdentity == nil || *lease.Spec.HolderIdentity == "" {
		return "", errors.New("no hub is the leader")
	}
	return *lease.Spec.HolderIdentity, nil
}

// getVersion returns the resourceVersion of a ConfigMap in namespace default.
func (w *world) getVersion(name string) (string, error) {
	cm := &corev1.ConfigMap{}
	err := w.Get(w.Context(), client.ObjectKey{Namespace: metav1.NamespaceDefault, Name: name}, cm)
	return cm.ResourceVersion, err
}

func TestKilledHubIsReplaced(t *testing.T) {
	w := newPrivateWorld(t)
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	config, cut := withCutSwitch(w.plane.Config)
	cache := t.TempDir()
	ended := make(chan error, 1)
	go func() { ended <- hub.Run(t.Context(), config, hub.Options{LeaderElection: true, CacheDir: cache}) }()
	cm := w.createConfigMap("manifests", manifest("a"))
	w.registerPushMember("one")
	profile := w.createProfile(nil)
	w.wantProvisioned(profile, "one")
	first, err := w.getLeader()
	w.must(err)
	before, err := w.getVersion("a")
	w.must(err)

	health := freeAddress(t)
	w.start(w.plane.Config, hub.Options{LeaderElection: true, CacheDir: cache, HealthAddress: health})
	w.eventually("the second hub is ready to take over", func() error { return probe(health, "/readyz", http.StatusOK) })
	if now, err := w.getLeader(); err != nil || now != first {
		t.Fatalf("leader: got %s and %v, want %s as before", now, err, first)
	}

	cut.Store(true)
	began := time.Now()
	update(w, cm, func(cm *corev1.ConfigMap) { cm.Data["content"] = manifest("a") + "---\n" + manifest("b") })
	w.eventually("the second hub delivers", func() error {
		_, err := w.getVersion("b")
		return err
	})
	if took := time.Since(began); took > takeoverLimit {
		t.Errorf("taken over after %s, want at most %s", took, takeoverLimit)
	} else {
		t.Logf("taken over after %s", took.Round(time.Millisecond))
	}
	if now, err := w.getLeader(); err != nil || now == first {
		t.Errorf("leader: got %s and %v, want another than before", now, err)
	}
	w.wantProvisioned(profile, "one")
	if after, err := w.getVersion("a"); err != nil || after != before {
		t.Errorf("the unchanged object was written again: version %s, then %s and %v", before, after, err)
	}
	select {
	case err := <-ended:
		if err == nil {
			t.Error("the hub that lost the lead ended without an error")
		}
	case <-time.After(leadEndLimit):
		t.Error("the hub that lost the lead does not end")
	}
}

func TestPushMemberChangesShards(t *testing.T) {
	w := newPrivateWorld(t)
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	cache := t.TempDir()
	w.start(w.plane.Config, hub.Options{CacheDir: cache})
	w.start(w.plane.Config, hub.Options{ShardKey: "k", CacheDir: cache})
	cm := w.createConfigMap("manifests", manifest("a"))
	one := w.registerPushMember("one")
	profile := w.createProfile(nil)
	w.wantProvisioned(profile, "one")
	before, err := w.getVersion("a")
	w.must(err)

	update(w, one, func(c *libv1beta1.SveltosCluster) {
		metav1.SetMetaDataAnnotation(&c.ObjectMeta, libv1beta1.ShardAnnotation, "k")
	})
	update(w, cm, func(cm *corev1.ConfigMap) { cm.Data["content"] = manifest("a") + "---\n" + manifest("b") })
	w.eventually("new content", func() error {
		_, err := w.getVersion("b")
		return err
	})
	w.wantProvisioned(profile, "one")
	if after, err := w.getVersion("a"); err != nil || after != before {
		t.Errorf("the unchanged object was written again: version %s, then %s and %v", before, after, err)
	}
	w.must(w.Delete(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "a"}}))
	w.eventually("drift correction by the other shard", func() error {
		if _, err := w.getVersion("a"); err != nil {
			return fmt.Errorf("read the deleted object: %w", err)
		}
		return nil
	})
}
