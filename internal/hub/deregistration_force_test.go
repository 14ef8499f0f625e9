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

// wantDeadline waits until the hub has set a deadline other than not for the forced deregistration, and returns it.
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

func (w *world) deregisterByForce(name string) *runningDeregistration {
	return w.deregister(join.DeregisterRequest{Request: join.Request{Name: name}, Force: true, Wait: -1})
}

func TestForceWaitsForAReachableMember(t *testing.T) {
	w := newWorld(t)
	w.configMap("manifests", manifest("a"))
	one := w.member("one", w.prod())
	w.wantProvisioned(w.profile(nil), "one")
	d := w.deregisterByForce("one")
	w.removeAgentWhenOrdered(one)
	departure := d.wait(w)
	if departure.Left != nil || !departure.Forced || len(w.withdrawals()) != 1 {
		t.Errorf("departure = %+v, withdrawn %v", departure, w.withdrawals())
	}
}

func TestForceLeavesBehindWhatIsNotWithdrawnInTime(t *testing.T) {
	w := newWorld(t)
	w.configMap("manifests", manifest("a"))
	one := w.member("one", w.prod())
	profile := w.profile(nil)
	summary := w.wantProvisioned(profile, "one")
	w.set(func(m *fakeTransport) { m.refuse = func(bundle.Withdrawal) (bool, error) { return false, nil } })
	d := w.deregisterByForce("one")
	w.wantDeadline(one, "")
	w.wantMessage(one, "to be withdrawn")
	passed := w.expireDeadline(one)
	// The agent has its own deadline.
	w.wantDeadline(one, passed)
	w.removeAgentWhenOrdered(one)
	if err := same([]string{"ConfigMap default/a"}, d.wait(w).Left); err != nil {
		t.Errorf("left %v", err)
	}
	w.eventually("event", func() error {
		want := "Warning Abandoned cluster Sveltos " + w.ns + "/one is force-deregistered before everything is withdrawn from it, left there: Resources (ConfigMap.v1.)"
		if all := w.events(summary); !slices.Contains(all, want) {
			return fmt.Errorf("events are %q", all)
		}
		return nil
	})
	w.wantNone(w.registration("one", w.ns))
}

func TestForceLeavesBehindAnAgentThatIsNotRemovedInTime(t *testing.T) {
	w := newWorld(t)
	w.configMap("manifests", manifest("a"))
	one := w.member("one", w.prod())
	w.wantProvisioned(w.profile(nil), "one")
	d := w.deregisterByForce("one")
	w.wantMessage(one, "its agent to remove itself")
	w.expireDeadline(one)
	if err := same([]string{fleet.AgentLeft}, d.wait(w).Left); err != nil {
		t.Errorf("left %v", err)
	}
	w.wantNone(w.registration("one", w.ns))
}

func TestForceReportsObjectsThatStayOnAPushMember(t *testing.T) {
	w := newPrivateWorld(t)
	w.start(w.plane.Config, hub.Options{InstallCRDs: true, CacheDir: t.TempDir()})
	w.eventually("CRDs are served", func() error { return w.List(t.Context(), &libv1beta1.SveltosClusterList{}) })
	held := "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: held\n  namespace: default\n  finalizers: [example.com/nobody]\n"
	w.configMap("manifests", manifest("free"))
	one := w.registerSelfAsPush("one")
	w.wantProvisioned(w.profile(nil), "one")
	w.configMap("stuck", held)
	w.wantProvisioned(w.profile(func(spec *configv1beta1.ProfileSpec) { spec.PolicyRefs[0].Name = "stuck" }), "one")

	d := w.deregisterByForce("one")
	w.wantDeadline(one, "")
	w.eventually("the other object goes", func() error { return w.checkNotFound(&corev1.ConfigMap{}, "default", "free") })
	w.eventually("one summary is left", func() error {
		var summaries configv1beta1.ClusterSummaryList
		if err := w.List(t.Context(), &summaries, client.InNamespace(w.ns)); err != nil || len(summaries.Items) != 1 {
			return fmt.Errorf("%d summaries, %w", len(summaries.Items), err)
		}
		return nil
	})
	w.expireDeadline(one)
	departure := d.wait(w)
	if err := same([]string{"ConfigMap default/held"}, departure.Left); err != nil || !departure.Forced {
		t.Errorf("left %v", err)
	}
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "held"}}
	update(w, object, func(cm *corev1.ConfigMap) { cm.Finalizers = nil })
}
