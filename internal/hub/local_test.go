package hub_test

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/hub"
)

// hubConfigMap returns a ConfigMap in the namespace of the test as YAML. more is added to its metadata.
func (w *world) hubConfigMap(name, text, more string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: %s, name: %s%s}\ndata: {text: %s}\n", w.ns, name, more, text)
}

// createLocalProfile creates a profile that deploys the ConfigMap "manifests" to the hub.
func (w *world) createLocalProfile(change func(*configv1beta1.ProfileSpec)) *configv1beta1.ClusterProfile {
	w.Helper()
	return w.createProfile(func(spec *configv1beta1.ProfileSpec) {
		spec.PolicyRefs[0].DeploymentType = libv1beta1.DeploymentTypeLocal
		if change != nil {
			change(spec)
		}
	})
}

// wantOnHub waits until the hub has a ConfigMap with a text, and returns it.
func (w *world) wantOnHub(name, text string) *corev1.ConfigMap {
	w.Helper()
	found := &corev1.ConfigMap{}
	w.eventually("ConfigMap "+name+" on the hub", func() error {
		if err := w.Get(w.Context(), client.ObjectKey{Namespace: w.ns, Name: name}, found); err != nil {
			return err
		}
		if found.Data["text"] != text || !found.DeletionTimestamp.IsZero() {
			return fmt.Errorf("its data is %v, deleted at %v", found.Data, found.DeletionTimestamp)
		}
		return nil
	})
	return found
}

// wantNotOnHub waits until the hub has no ConfigMap of this name.
func (w *world) wantNotOnHub(name string) {
	w.Helper()
	w.eventually("deletion of ConfigMap "+name+" on the hub", func() error { return w.checkNotFound(&corev1.ConfigMap{}, w.ns, name) })
}

// wantSame fails unless the hub has the object with the same UID.
func (w *world) wantSame(before *corev1.ConfigMap) {
	w.Helper()
	after := &corev1.ConfigMap{}
	w.must(w.Get(w.Context(), client.ObjectKeyFromObject(before), after))
	if after.UID != before.UID || !after.DeletionTimestamp.IsZero() {
		w.Errorf("%s: uid %s, want %s; deleted %v", before.Name, after.UID, before.UID, after.DeletionTimestamp)
	}
}

// wantListedOnHub waits until the ClusterConfiguration of a cluster lists an object on the hub.
func (w *world) wantListedOnHub(cluster, name string) {
	w.Helper()
	w.eventually("the object on the hub is listed", func() error {
		listed := &configv1beta1.ClusterConfiguration{}
		if err := w.Get(w.Context(), client.ObjectKey{Namespace: w.ns, Name: "sveltos--" + cluster}, listed); err != nil {
			return err
		}
		if text := fmt.Sprintf("%+v", listed.Status); !strings.Contains(text, name) {
			return fmt.Errorf("the listed objects are %s", text)
		}
		return nil
	})
}

// registerUnreachableMember registers a push member with an invalid kubeconfig and a ready status.
func (w *world) registerUnreachableMember(name string) *libv1beta1.SveltosCluster {
	w.Helper()
	cluster := w.registerPushMemberWith(name, []byte("{"))
	w.setReady(cluster)
	return cluster
}

// abandonSummary removes the finalizer of a summary whose controller is paused, and waits for its deletion. Its bundles
// stay.
func (w *world) abandonSummary(summary *configv1beta1.ClusterSummary) {
	w.Helper()
	w.eventually("summary "+summary.Name+" is being deleted", func() error {
		err := w.Get(w.Context(), client.ObjectKeyFromObject(summary), summary)
		if err == nil && summary.DeletionTimestamp.IsZero() {
			err = errors.New("no deletionTimestamp")
		}
		return err
	})
	w.removeFinalizers(summary)
	w.eventually("deletion of summary "+summary.Name, func() error {
		found := &configv1beta1.ClusterSummary{}
		if err := w.Get(w.Context(), client.ObjectKeyFromObject(summary), found); err != nil || found.UID != summary.UID {
			return client.IgnoreNotFound(err)
		}
		return errors.New("the summary exists")
	})
}

// listAbandonedEvents lists the events about remaining objects.
func (w *world) listAbandonedEvents(summary *configv1beta1.ClusterSummary) []string {
	w.Helper()
	return slices.DeleteFunc(w.listEvents(summary), func(e string) bool { return !strings.Contains(e, " Abandoned ") })
}

func TestLocalContentOfAnotherFeatureWaitsForItsCluster(t *testing.T) {
	w, run := newRestartableWorldWith(t, "feature", hub.Options{SandboxCommand: []string{os.Args[0], serve}})
	run()
	w.createConfigMap("manifests", w.hubConfigMap("before", "a", ""))
	w.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "kustomized"}, Data: map[string]string{
		"kustomization.yaml": "resources: [object.yaml]", "object.yaml": w.hubConfigMap("after", "b", ""),
	}})
	one := w.createReadyMember("one", w.prodLabels())
	profile := w.createLocalProfile(nil)
	w.wantProvisioned(profile, "one")
	before := w.wantOnHub("before", "a")

	w.loseStatus(one)
	update(w, profile, func(p *configv1beta1.ClusterProfile) {
		p.Spec.PolicyRefs = nil
		p.Spec.KustomizationRefs = []configv1beta1.KustomizationRef{{Kind: libv1beta1.SourceConfigMap, Namespace: w.ns, Name: "kustomized", DeploymentType: libv1beta1.DeploymentTypeLocal}}
	})
	w.wantFeature(profile, "one", configv1beta1.FeatureSummary{FeatureID: libv1beta1.FeatureKustomize, Status: libv1beta1.FeatureStatusFailed, FailureMessage: "cluster is not ready"})
	w.wantSame(before)
	w.setReady(one)
	w.wantOnHub("after", "b")
	w.wantNotOnHub("before")
	w.wantFeature(profile, "one", configv1beta1.FeatureSummary{FeatureID: libv1beta1.FeatureKustomize, Status: libv1beta1.FeatureStatusProvisioned})

	// A profile without other content does not wait for the cluster.
	w.loseStatus(one)
	update(w, profile, func(p *configv1beta1.ClusterProfile) { p.Spec.KustomizationRefs = nil })
	w.wantNotOnHub("after")
}

func TestForcedDeregistrationLeavesLocalObjectsAfterDeadline(t *testing.T) {
	for name, isReachable := range map[string]bool{"reachable": true, "unreachable": false} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.createConfigMap("manifests", w.hubConfigMap("held", "a", ", finalizers: [example.com/nobody]")+"---\n"+w.hubConfigMap("free", "a", ""))
			w.createConfigMap("remote", manifest("a"))
			register := w.registerUnreachableMember
			if isReachable {
				register = func(name string) *libv1beta1.SveltosCluster { return w.createReadyMember(name, w.prodLabels()) }
			}
			one := register("one")
			profile := w.createLocalProfile(func(spec *configv1beta1.ProfileSpec) {
				spec.PolicyRefs = append(spec.PolicyRefs, libv1beta1.PolicyRef{Kind: libv1beta1.SourceConfigMap, Namespace: w.ns, Name: "remote"})
			})
			summary := w.wantProvisioned(profile, "one")
			held := w.wantOnHub("held", "a")
			w.wantListedOnHub("one", "held")

			// All objects of the profile are listed, as for a member.
			left := []string{"ConfigMap " + w.ns + "/held on the hub", "ConfigMap " + w.ns + "/free on the hub"}
			if !isReachable {
				w.set(func(b *fakeTransport) {
					b.refuse = func(bundle.Withdrawal) (bool, error) { return false, errors.New("no route") }
				})
				left = append(left, "ConfigMap default/a")
			}
			d := w.forceDeregistration("one")
			w.wantNotOnHub("free")
			w.wantDeadline(one, "")
			passed := w.expireDeadline(one)
			if isReachable {
				w.wantDeadline(one, passed)
				w.confirmAgentRemoval(one)
			}
			got := d.wait(w).Left
			slices.Sort(got)
			slices.Sort(left)
			if err := checkEqual(left, got); err != nil {
				t.Errorf("left objects: %v", err)
			}
			w.eventually("one event", func() error {
				abandoned := w.listAbandonedEvents(summary)
				if len(abandoned) != 1 || !strings.Contains(abandoned[0], "ConfigMap "+w.ns+"/held on the hub") {
					return fmt.Errorf("events are %q", abandoned)
				}
				return nil
			})
			w.removeFinalizers(held)
			w.wantNotOnHub("held")
		})
	}
}

func TestDeregistrationWithdrawsUnclaimedLocalBundlesOfAnUnreachableCluster(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", w.hubConfigMap("orphan", "a", ""))
	one := w.registerUnreachableMember("one")
	profile := w.createLocalProfile(nil)
	summary := w.wantProvisioned(profile, "one")
	w.wantOnHub("orphan", "a")

	// The pause also stops the controller of unclaimed bundles.
	update(w, one, func(c *libv1beta1.SveltosCluster) { c.Spec.Paused = true })
	w.wantSummary(profile, "one", func(s configv1beta1.ClusterSummaryStatus) bool { return s.ReconciliationSuspended })
	w.must(w.Delete(t.Context(), profile))
	w.abandonSummary(summary)
	w.must(w.Delete(t.Context(), one))
	w.wantClusterDeleted("one")
	w.wantNotOnHub("orphan")
}

func TestContentThatBecomesRemoteIsDeletedOnHub(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", w.hubConfigMap("moved", "a", ""))
	one := w.createReadyMember("one", w.prodLabels())
	profile := w.createLocalProfile(nil)
	w.wantProvisioned(profile, "one")
	w.wantOnHub("moved", "a")
	w.loseStatus(one) // otherwise the controller of unclaimed bundles could also withdraw the object
	update(w, profile, func(p *configv1beta1.ClusterProfile) {
		p.Labels = map[string]string{libv1beta1.ServiceAccountNameLabel: "deployer", libv1beta1.ServiceAccountNamespaceLabel: w.ns}
		p.Spec.PolicyRefs[0].DeploymentType = libv1beta1.DeploymentTypeRemote
	})
	w.wantNotOnHub("moved")
}

func TestLocalContentOneTime(t *testing.T) {
	w := newWorld(t)
	content := w.createConfigMap("manifests", w.hubConfigMap("once", "a", ""))
	w.createReadyMember("one", w.prodLabels())
	profile := w.createLocalProfile(func(spec *configv1beta1.ProfileSpec) { spec.SyncMode = configv1beta1.SyncModeOneTime })
	summary := w.wantProvisioned(profile, "one")
	once := w.wantOnHub("once", "a")

	update(w, content, func(cm *corev1.ConfigMap) { cm.Data = map[string]string{"content": w.hubConfigMap("once", "b", "")} })
	update(w, once, func(cm *corev1.ConfigMap) { cm.Data["text"] = "changed" })
	annotateProfile(w, profile, summary, "once")
	w.loseStatus(summary)
	w.wantProvisioned(profile, "one")
	if got := w.wantOnHub("once", "changed"); got.ResourceVersion != once.ResourceVersion {
		t.Errorf("version %s, want %s", got.ResourceVersion, once.ResourceVersion)
	}
	w.must(w.Delete(t.Context(), profile))
	w.wantNotOnHub("once")
}

func TestLocalBundlesWithoutASummary(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", w.hubConfigMap("about", "a", ""))
	one := w.createReadyMember("one", w.prodLabels())
	profile := w.createLocalProfile(nil)
	summary := w.wantProvisioned(profile, "one")
	about := w.wantOnHub("about", "a")
	w.wantListedOnHub("one", "about")

	t.Log("the hub restores a lost status")
	w.loseStatus(summary)
	w.wantProvisioned(profile, "one")
	w.wantSame(about)

	pause := func(paused bool) {
		t.Helper()
		update(w, one, func(c *libv1beta1.SveltosCluster) { c.Spec.Paused = paused })
		w.wantSummary(profile, "one", func(s configv1beta1.ClusterSummaryStatus) bool { return s.ReconciliationSuspended == paused })
	}
	t.Log("a new summary claims the bundle")
	pause(true)
	w.must(w.Delete(t.Context(), summary))
	w.abandonSummary(summary)
	pause(false)
	summary = w.wantProvisioned(profile, "one")
	w.wantSame(about)

	t.Log("the cluster does not match the profile any more")
	w.wantListedOnHub("one", "about")
	pause(true)
	update(w, one, func(c *libv1beta1.SveltosCluster) { c.Labels["env"] = "other" })
	w.abandonSummary(summary)
	w.wantSame(about)
	update(w, one, func(c *libv1beta1.SveltosCluster) { c.Spec.Paused = false })
	w.wantNotOnHub("about")
}
