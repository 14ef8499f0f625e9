package hub_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// wantDeadline waits until the hub has set another deadline than not for the forced deregistration, and returns it.
func (w *world) wantDeadline(cluster *libv1beta1.SveltosCluster, not string) (deadline string) {
	w.Helper()
	w.eventually("deadline of "+cluster.Name, func() error {
		if err := w.Get(w.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
			return err
		}
		if deadline = cluster.Annotations[kube.AnnotationDeadline]; deadline == not {
			return fmt.Errorf("annotations are %v", cluster.Annotations)
		}
		return nil
	})
	// forceTimeout of package deregistration.
	const forceTimeout = 20 * time.Second
	until, err := time.Parse(time.RFC3339, deadline)
	w.must(err)
	if left := time.Until(until); left <= 0 || left > forceTimeout {
		w.Errorf("the hub waits for %s, want at most %s", left, forceTimeout)
	}
	return deadline
}

// expireDeadline sets the deadline to a past time.
func (w *world) expireDeadline(cluster *libv1beta1.SveltosCluster) (deadline string) {
	w.Helper()
	deadline = time.Now().Add(-time.Second).UTC().Format(time.RFC3339)
	update(w, cluster, func(c *libv1beta1.SveltosCluster) { c.Annotations[kube.AnnotationDeadline] = deadline })
	return deadline
}

func (w *world) forceDeregistration(name string) *runningDeregistration {
	return w.deregister(join.DeregisterRequest{Request: join.Request{Name: name}, Force: true, Wait: -1})
}

func TestForcedDeregistrationWaitsForReachableMember(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a"))
	one := w.createReadyMember("one", w.prodLabels())
	w.wantProvisioned(w.createProfile(nil), "one")
	d := w.forceDeregistration("one")
	w.confirmAgentRemoval(one)
	result := d.wait(w)
	if result.Left != nil || !result.Forced || len(w.withdrawals()) != 1 {
		t.Errorf("departure = %+v, withdrawn %v", result, w.withdrawals())
	}
}

func TestForcedDeregistrationLeavesObjectsAfterDeadline(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a"))
	one := w.createReadyMember("one", w.prodLabels())
	profile := w.createProfile(nil)
	summary := w.wantProvisioned(profile, "one")
	w.set(func(m *fakeTransport) { m.refuse = func(bundle.Withdrawal) (bool, error) { return false, nil } })
	d := w.forceDeregistration("one")
	w.wantDeadline(one, "")
	w.wantMessage(one, "to be withdrawn")
	passed := w.expireDeadline(one)
	// The agent has its own deadline.
	w.wantDeadline(one, passed)
	w.confirmAgentRemoval(one)
	if err := checkEqual([]string{"ConfigMap default/a"}, d.wait(w).Left); err != nil {
		t.Errorf("left objects: %v", err)
	}
	w.eventually("event", func() error {
		want := "Warning Abandoned cluster Sveltos " + w.ns + "/one is force-deregistered before everything is withdrawn from it, left there: Resources (ConfigMap.v1.)"
		if all := w.listEvents(summary); !slices.Contains(all, want) {
			return fmt.Errorf("events are %q", all)
		}
		return nil
	})
	w.wantNoObjects(w.registrationObjects("one", w.ns))
}

func TestForcedDeregistrationLeavesAgentAfterDeadline(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a"))
	one := w.createReadyMember("one", w.prodLabels())
	w.wantProvisioned(w.createProfile(nil), "one")
	d := w.forceDeregistration("one")
	w.wantMessage(one, "its agent to remove itself")
	w.expireDeadline(one)
	if err := checkEqual([]string{fleet.LeftBehindAgent}, d.wait(w).Left); err != nil {
		t.Errorf("left objects: %v", err)
	}
	w.wantNoObjects(w.registrationObjects("one", w.ns))
}

func TestForcedDeregistrationReportsRemainingObjects(t *testing.T) {
	w := newPrivateWorld(t)
	w.start(w.plane.Config, hub.Options{InstallCRDs: true, CacheDir: t.TempDir()})
	w.eventually("CRDs are served", func() error { return w.List(t.Context(), &libv1beta1.SveltosClusterList{}) })
	held := "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: held\n  namespace: default\n  finalizers: [example.com/nobody]\n"
	w.createConfigMap("manifests", manifest("free"))
	one := w.registerSelfAsPush("one")
	w.wantProvisioned(w.createProfile(nil), "one")
	w.createConfigMap("stuck", held)
	w.wantProvisioned(w.createProfile(func(spec *configv1beta1.ProfileSpec) { spec.PolicyRefs[0].Name = "stuck" }), "one")

	d := w.forceDeregistration("one")
	w.wantDeadline(one, "")
	w.eventually("deletion of the other object", func() error { return w.checkNotFound(&corev1.ConfigMap{}, "default", "free") })
	w.eventually("one summary is left", func() error {
		var summaries configv1beta1.ClusterSummaryList
		if err := w.List(t.Context(), &summaries, client.InNamespace(w.ns)); err != nil || len(summaries.Items) != 1 {
			return fmt.Errorf("%d summaries, %w", len(summaries.Items), err)
		}
		return nil
	})
	w.expireDeadline(one)
	result := d.wait(w)
	if err := checkEqual([]string{"ConfigMap default/held"}, result.Left); err != nil || !result.Forced {
		t.Errorf("left objects: %v", err)
	}
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "held"}}
	update(w, object, func(cm *corev1.ConfigMap) { cm.Finalizers = nil })
}
