package hub_test

import (
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// removed deletes a cluster without a deregistration.
func (w *world) removed(cluster *libv1beta1.SveltosCluster) {
	w.Helper()
	w.eventually("cluster "+cluster.Name+" goes", func() error {
		live := &libv1beta1.SveltosCluster{}
		if err := w.Get(w.Context(), client.ObjectKeyFromObject(cluster), live); err != nil {
			return client.IgnoreNotFound(err)
		}
		// Before the deletion, the hub sets its finalizer again.
		if err := w.Delete(w.Context(), live); err != nil {
			return client.IgnoreNotFound(err)
		}
		patch := client.RawPatch(types.MergePatchType, []byte(`{"metadata": {"finalizers": null}}`))
		if err := w.Patch(w.Context(), live, patch); err != nil {
			return client.IgnoreNotFound(err)
		}
		return errors.New("it is being deleted")
	})
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
	w.wantNoSummary(profile, "one")
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
	w.eventually("the profile goes", func() error { return w.checkNotFound(profile, "", profile.Name) })
}
