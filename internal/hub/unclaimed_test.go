package hub_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

// removeFinalizers removes the finalizers of an object by hand.
func (w *world) removeFinalizers(obj client.Object) {
	w.Helper()
	patch := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
	w.must(client.IgnoreNotFound(w.Patch(w.Context(), obj, patch)))
}

// blockWithdrawals makes every withdrawal of the test incomplete until release is called.
func (w *world) blockWithdrawals() (release func()) {
	w.set(func(b *fakeTransport) { b.refuse = func(bundle.Withdrawal) (bool, error) { return false, nil } })
	return func() { w.set(func(b *fakeTransport) { b.refuse = nil }) }
}

// wantWithdrawn waits until the member has no bundle of a summary.
func (w *world) wantWithdrawn(summary string) {
	w.Helper()
	w.eventually(summary+" is withdrawn", func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		for key := range w.records {
			if strings.Contains(key, summary) {
				return fmt.Errorf("the member still has %s", key)
			}
		}
		return nil
	})
}

// deployWithoutFinalizer deploys a profile, calls remove to withdraw it, and removes the finalizer of its summary
// before the withdrawal.
func (w *world) deployWithoutFinalizer(cluster *libv1beta1.SveltosCluster, remove func(*configv1beta1.ClusterProfile)) {
	w.Helper()
	profile := w.createProfile(nil)
	summary := w.wantProvisioned(profile, cluster.Name)
	w.eventually("listing of the deployed objects", func() error {
		return w.Get(w.Context(), client.ObjectKey{Namespace: w.ns, Name: "sveltos--" + cluster.Name}, &configv1beta1.ClusterConfiguration{})
	})
	release := w.blockWithdrawals()
	remove(profile)
	w.eventually("the summary is being deleted", func() error {
		err := w.Get(w.Context(), client.ObjectKeyFromObject(summary), summary)
		if err == nil && summary.DeletionTimestamp == nil {
			err = errors.New("no deletionTimestamp")
		}
		return err
	})
	w.removeFinalizers(summary)
	w.wantNoSummary(profile, cluster.Name)
	release()
	w.wantWithdrawn(summary.Name)
	w.eventually("nothing is listed as deployed", func() error {
		return w.checkNotFound(&configv1beta1.ClusterConfiguration{}, w.ns, "sveltos--"+cluster.Name)
	})
	w.must(client.IgnoreNotFound(w.Delete(w.Context(), profile)))
}

func TestUnneededBundleIsWithdrawnWithoutSummary(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("plain"))
	cluster := w.createReadyMember("one", w.prodLabels())
	w.deployWithoutFinalizer(cluster, func(*configv1beta1.ClusterProfile) {
		update(w, cluster, func(c *libv1beta1.SveltosCluster) { delete(c.Labels, "env") })
	})
	update(w, cluster, func(c *libv1beta1.SveltosCluster) { c.Labels["env"] = "prod" })
	w.deployWithoutFinalizer(cluster, func(profile *configv1beta1.ClusterProfile) {
		w.must(w.Delete(w.Context(), profile))
	})
}

func TestUnclaimedBundlesAreKeptAndReported(t *testing.T) {
	w := newWorld(t)
	id := func(name string) bundle.ID {
		return bundle.ID{RequestorKind: configv1beta1.ClusterSummaryKind, RequestorName: name, Feature: "Resources"}
	}
	owner := bundle.Owner{Kind: configv1beta1.ClusterProfileKind, Name: w.ns + "-nobodys"}
	w.set(func(b *fakeTransport) {
		b.records = map[string]bundle.Deployed{
			"one " + id("lost").String():  {ID: id("lost"), Owner: owner},
			"one " + id("other").String(): {ID: id("other"), Owner: owner, Hub: "another-hub"},
		}
	})
	cluster := w.createReadyMember("one", w.prodLabels())
	condition := func() (*metav1.Condition, error) {
		err := w.Get(w.Context(), client.ObjectKeyFromObject(cluster), cluster)
		return meta.FindStatusCondition(cluster.Status.Conditions, libv1beta1.ConditionUnclaimedBundles), err
	}
	command := fmt.Sprintf("kubectl annotate sveltosclusters.lib.projectsveltos.io --namespace=%s one towline.dev/withdraw=lost,other", w.ns)
	w.eventually("both are reported", func() error {
		found, err := condition()
		if err == nil && (found == nil || !strings.Contains(found.Message, command)) {
			err = fmt.Errorf("the condition is %+v, want %q in it", found, command)
		}
		return err
	})
	w.eventually("event", func() error {
		if events := w.listEvents(cluster); !slices.ContainsFunc(events, func(e string) bool { return strings.Contains(e, "Warning UnclaimedBundles") }) {
			return fmt.Errorf("events are %q", events)
		}
		return nil
	})

	update(w, cluster, func(c *libv1beta1.SveltosCluster) {
		metav1.SetMetaDataAnnotation(&c.ObjectMeta, kube.AnnotationWithdraw, "lost")
	})
	w.wantWithdrawn("lost")
	w.eventually("the other one is reported", func() error {
		found, err := condition()
		if err == nil && (found == nil || strings.Contains(found.Message, "lost") || cluster.Annotations[kube.AnnotationWithdraw] != "") {
			err = fmt.Errorf("the condition is %+v, the annotations are %v", found, cluster.Annotations)
		}
		return err
	})

	w.must(w.Delete(w.Context(), cluster))
	w.eventually("report of the bundle of another hub", func() error {
		err := client.IgnoreNotFound(w.Get(w.Context(), client.ObjectKeyFromObject(cluster), cluster))
		if err == nil && !strings.Contains(cluster.Annotations[kube.AnnotationLeftBehind], "ClusterSummary other") {
			err = fmt.Errorf("the annotations are %v", cluster.Annotations)
		}
		return err
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.records) != 1 {
		t.Errorf("the member has %v, want the bundle of another hub", w.records)
	}
}
