package hub_test

import (
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// deleteCluster deletes a cluster without a deregistration.
func (w *world) deleteCluster(cluster *libv1beta1.SveltosCluster) {
	w.Helper()
	w.eventually("deletion of cluster "+cluster.Name, func() error {
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
		return errors.New("the cluster still exists")
	})
}

// TestRestoredHubWithoutAClusterKeepsItsLocalObjects starts a hub with the summary of a cluster that does not exist.
func TestRestoredHubWithoutAClusterKeepsItsLocalObjects(t *testing.T) {
	w, run := newRestartableWorld(t, "local")
	stop := run()
	content := w.createConfigMap("manifests", w.hubConfigMap("about", "a", ""))
	one := w.createReadyMember("one", w.prodLabels())
	profile := w.createLocalProfile(nil)
	summary := w.wantProvisioned(profile, "one")
	about := w.wantOnHub("about", "a")
	w.wantListedOnHub("one", "about")

	stop()
	w.deleteCluster(one)
	stop = run()
	w.wantNoSummary(profile, "one")
	w.wantSame(about)
	w.eventually("an event lists the objects", func() error {
		want := "Warning Abandoned cluster Sveltos " + w.ns + "/one does not exist; nothing was withdrawn from it; left: ConfigMap " + w.ns + "/about on the hub"
		return checkEqual([]string{want}, w.listAbandonedEvents(summary))
	})

	t.Log("the cluster is restored")
	update(w, content, func(cm *corev1.ConfigMap) { cm.Data = map[string]string{"content": w.hubConfigMap("about", "b", "")} })
	one = w.createReadyMember("one", w.prodLabels())
	w.wantProvisioned(profile, "one")
	w.wantOnHub("about", "b")
	w.wantSame(about)

	t.Log("the hub runs while the cluster is deleted")
	w.must(w.Get(t.Context(), client.ObjectKeyFromObject(one), one))
	w.deleteCluster(one)
	w.wantNotOnHub("about")

	t.Log("the profile is deleted while the cluster does not exist")
	one = w.createReadyMember("one", w.prodLabels())
	w.wantProvisioned(profile, "one")
	w.wantOnHub("about", "b")
	stop()
	w.deleteCluster(one)
	w.must(w.Delete(t.Context(), profile))
	run()
	w.wantNotOnHub("about")
	w.eventually("deletion of the profile", func() error { return w.checkNotFound(profile, "", profile.Name) })
}
