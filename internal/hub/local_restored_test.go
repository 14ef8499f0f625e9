package hub_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// removed deletes a cluster without a deregistration.
func (w *world) removed(cluster *libv1beta1.SveltosCluster) {
	w.Helper()
	w.removeFinalizers(cluster)
	w.must(w.Delete(w.Context(), cluster))
	w.wantClusterGone(cluster.Name)
}

// TestRestoredHubWithoutAClusterKeepsItsLocalObjects starts a hub that has the summary of a cluster, and not the
// cluster.
func TestRestoredHubWithoutAClusterKeepsItsLocalObjects(t *testing.T) {
	w, run := ownWorld(t, "local")
	stop := run()
	content := w.configMap("manifests", w.onHub("about", "a", ""))
	one := w.member("one", w.prod())
	profile := w.localProfile(nil)
	summary := w.wantProvisioned(profile, "one")
	about := w.wantOnHub("about", "a")
	w.wantListedOnHub("one", "about")

	stop()
	w.removed(one)
	stop = run()
	w.wantGone(profile, "one")
	w.wantSame(about)
	w.eventually("an event lists the objects", func() error {
		want := "Warning Abandoned cluster Sveltos " + w.ns + "/one does not exist; nothing was withdrawn from it; left: ConfigMap " + w.ns + "/about on the hub"
		return same([]string{want}, w.abandonments(summary))
	})

	t.Log("the cluster is back")
	update(w, content, func(cm *corev1.ConfigMap) { cm.Data = map[string]string{"content": w.onHub("about", "b", "")} })
	one = w.member("one", w.prod())
	w.wantProvisioned(profile, "one")
	w.wantOnHub("about", "b")
	w.wantSame(about)

	t.Log("the hub sees that the cluster is deleted")
	w.must(w.Get(t.Context(), client.ObjectKeyFromObject(one), one))
	w.removed(one)
	w.wantOffHub("about")

	t.Log("the profile is deleted while the cluster does not exist")
	one = w.member("one", w.prod())
	w.wantProvisioned(profile, "one")
	w.wantOnHub("about", "b")
	stop()
	w.removed(one)
	w.must(w.Delete(t.Context(), profile))
	run()
	w.wantOffHub("about")
	w.eventually("the profile goes", func() error { return w.gone(profile, "", profile.Name) })
}
