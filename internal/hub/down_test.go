package hub_test

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/hub"
)

// deployConfigMap changes the content of the test's profile to one ConfigMap of this name.
func (w *world) deployConfigMap(name string) {
	w.Helper()
	update(w, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "manifests"}}, func(cm *corev1.ConfigMap) {
		cm.Data = map[string]string{"content": manifest(name)}
	})
}

// wantUntouched fails unless the ConfigMaps a and b on the member have these resourceVersions; "" is a missing object.
func (w *world) wantUntouched(objects map[string]string) {
	w.Helper()
	for _, name := range []string{"a", "b"} {
		cm := &corev1.ConfigMap{}
		err := w.Get(w.Context(), client.ObjectKey{Namespace: "default", Name: name}, cm)
		if client.IgnoreNotFound(err) != nil {
			w.Fatal(err)
		}
		if cm.ResourceVersion != objects[name] {
			w.Errorf("ConfigMap %s is of version %q, want %q", name, cm.ResourceVersion, objects[name])
		}
	}
}

// wantSummary waits until want returns true for the status of the summary of profile on member.
func (w *world) wantSummary(profile client.Object, member string, want func(configv1beta1.ClusterSummaryStatus) bool) *configv1beta1.ClusterSummary {
	w.Helper()
	var summary *configv1beta1.ClusterSummary
	w.eventually("summary on "+member, func() (err error) {
		if summary, err = w.getSummary(profile, member); err != nil {
			return err
		}
		if !want(summary.Status) {
			return fmt.Errorf("status is %+v", summary.Status)
		}
		return nil
	})
	return summary
}

func TestProfilesDoNotChangeDownOrPausedPushMember(t *testing.T) {
	w := newPrivateWorld(t)
	w.start(w.plane.Config, hub.Options{InstallCRDs: true, CacheDir: t.TempDir()})
	w.eventually("CRDs are served", func() error { return w.List(t.Context(), &libv1beta1.SveltosClusterList{}) })
	w.createConfigMap("manifests", manifest("a"))
	one := w.registerSelfAsPush("one")
	profile := w.createProfile(nil)
	w.wantProvisioned(profile, "one")
	deployed := &corev1.ConfigMap{}
	w.must(w.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "a"}, deployed))

	update(w, one, func(c *libv1beta1.SveltosCluster) {
		c.Spec.ConsecutiveFailureThreshold = 1
		c.Spec.LivenessChecks = []libv1beta1.ClusterCheck{{
			Name:              "heart",
			ResourceSelectors: []libv1beta1.ResourceSelector{{Version: "v1", Kind: "ConfigMap", Namespace: w.ns, Name: "heart"}},
			Condition:         `function evaluate() return {pass = #resources == 1, message = "there is none"} end`,
		}}
	})
	const failure = "liveness check heart: there is none"
	w.wantCluster(one, func(s libv1beta1.SveltosClusterStatus) bool {
		return s.ConnectionStatus == libv1beta1.ConnectionDown && s.FailureMessage == failure
	})
	// A reconcile that is running at the change still deploys.
	summary := w.wantSummary(profile, "one", func(s configv1beta1.ClusterSummaryStatus) bool {
		return s.FailureMessage == "cluster is down: "+failure
	})
	w.deployConfigMap("b")
	w.eventually("events", func() error {
		if all := w.listEvents(one); !slices.Contains(all, "Warning Down cluster "+w.ns+"/one is down: "+failure) {
			return fmt.Errorf("events of the cluster are %q", all)
		}
		if all := w.listEvents(summary); !slices.Contains(all, "Warning NotReady cluster is down: "+failure) {
			return fmt.Errorf("events of the summary are %q", all)
		}
		return nil
	})
	w.wantUntouched(map[string]string{"a": deployed.ResourceVersion})

	// A paused member also gets no changes.
	update(w, one, func(c *libv1beta1.SveltosCluster) { c.Spec.Paused, c.Spec.LivenessChecks = true, nil })
	w.wantCluster(one, func(s libv1beta1.SveltosClusterStatus) bool {
		return s.ConnectionStatus == libv1beta1.ConnectionHealthy
	})
	w.wantSummary(profile, "one", func(s configv1beta1.ClusterSummaryStatus) bool {
		return s.ReconciliationSuspended && s.SuspensionReason == "cluster "+w.ns+"/one is paused"
	})
	w.wantUntouched(map[string]string{"a": deployed.ResourceVersion})

	update(w, one, func(c *libv1beta1.SveltosCluster) { c.Spec.Paused = false })
	w.eventually("creation of b and deletion of a", func() error {
		if err := w.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "b"}, &corev1.ConfigMap{}); err != nil {
			return err
		}
		return w.checkNotFound(&corev1.ConfigMap{}, "default", "a")
	})
	w.wantSummary(profile, "one", func(s configv1beta1.ClusterSummaryStatus) bool {
		return !s.ReconciliationSuspended && s.FailureMessage == "" && s.FeatureSummaries[0].Status == libv1beta1.FeatureStatusProvisioned
	})
}
