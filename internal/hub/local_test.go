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

// onHub is a ConfigMap in the namespace of the test as YAML. more is added to its metadata.
func (w *world) onHub(name, text, more string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: %s, name: %s%s}\ndata: {text: %s}\n", w.ns, name, more, text)
}

// localProfile creates a profile that deploys the ConfigMap "manifests" to the hub.
func (w *world) localProfile(change func(*configv1beta1.ProfileSpec)) *configv1beta1.ClusterProfile {
	w.Helper()
	return w.profile(func(spec *configv1beta1.ProfileSpec) {
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
			return fmt.Errorf("it has %v, deleted %v", found.Data, found.DeletionTimestamp)
		}
		return nil
	})
	return found
}

// wantOffHub waits until the hub has no ConfigMap of this name.
func (w *world) wantOffHub(name string) {
	w.Helper()
	w.eventually("ConfigMap "+name+" on the hub goes", func() error { return w.checkNotFound(&corev1.ConfigMap{}, w.ns, name) })
}

// wantSame fails if the hub does not have this very object.
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
			return fmt.Errorf("it lists %s", text)
		}
		return nil
	})
}

// unreachablePush registers a push member with a kubeconfig that is not valid, as if it had been reached once.
func (w *world) unreachablePush(name string) *libv1beta1.SveltosCluster {
	w.Helper()
	cluster := w.pushMemberWith(name, []byte("{"))
	w.setReady(cluster)
	return cluster
}

// abandonedSummary deletes a summary whose controller is paused, without its finalizer: its bundles stay.
func (w *world) abandonedSummary(summary *configv1beta1.ClusterSummary) {
	w.Helper()
	w.eventually("summary "+summary.Name+" is being deleted", func() error {
		err := w.Get(w.Context(), client.ObjectKeyFromObject(summary), summary)
		if err == nil && summary.DeletionTimestamp.IsZero() {
			err = errors.New("it is not")
		}
		return err
	})
	w.removeFinalizers(summary)
	w.eventually("summary "+summary.Name+" goes", func() error {
		found := &configv1beta1.ClusterSummary{}
		if err := w.Get(w.Context(), client.ObjectKeyFromObject(summary), found); err != nil || found.UID != summary.UID {
			return client.IgnoreNotFound(err)
		}
		return errors.New("it is there")
	})
}

// abandonments lists the events about objects that stay.
func (w *world) abandonments(summary *configv1beta1.ClusterSummary) []string {
	w.Helper()
	return slices.DeleteFunc(w.events(summary), func(e string) bool { return !strings.Contains(e, " Abandoned ") })
}

func TestLocalContentOfAnotherFeatureWaitsForItsCluster(t *testing.T) {
	w, run := ownWorldWith(t, "feature", hub.Options{SandboxCommand: []string{os.Args[0], serve}})
	run()
	w.configMap("manifests", w.onHub("before", "a", ""))
	w.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "kustomized"}, Data: map[string]string{
		"kustomization.yaml": "resources: [object.yaml]", "object.yaml": w.onHub("after", "b", ""),
	}})
	one := w.member("one", w.prod())
	profile := w.localProfile(nil)
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
	w.wantOffHub("before")
	w.wantFeature(profile, "one", configv1beta1.FeatureSummary{FeatureID: libv1beta1.FeatureKustomize, Status: libv1beta1.FeatureStatusProvisioned})

	// Without other content, nothing is waited for.
	w.loseStatus(one)
	update(w, profile, func(p *configv1beta1.ClusterProfile) { p.Spec.KustomizationRefs = nil })
	w.wantOffHub("after")
}

func TestForceLeavesLocalObjectsThatAreNotDeletedInTime(t *testing.T) {
	for name, isReachable := range map[string]bool{"reachable": true, "unreachable": false} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.configMap("manifests", w.onHub("held", "a", ", finalizers: [example.com/nobody]")+"---\n"+w.onHub("free", "a", ""))
			w.configMap("remote", manifest("a"))
			register := w.unreachablePush
			if isReachable {
				register = func(name string) *libv1beta1.SveltosCluster { return w.member(name, w.prod()) }
			}
			one := register("one")
			profile := w.localProfile(func(spec *configv1beta1.ProfileSpec) {
				spec.PolicyRefs = append(spec.PolicyRefs, libv1beta1.PolicyRef{Kind: libv1beta1.SourceConfigMap, Namespace: w.ns, Name: "remote"})
			})
			summary := w.wantProvisioned(profile, "one")
			held := w.wantOnHub("held", "a")
			w.wantListedOnHub("one", "held")

			// As on a member, all objects of the profile are listed.
			left := []string{"ConfigMap " + w.ns + "/held on the hub", "ConfigMap " + w.ns + "/free on the hub"}
			if !isReachable {
				w.set(func(b *fakeTransport) {
					b.refuse = func(bundle.Withdrawal) (bool, error) { return false, errors.New("no route") }
				})
				left = append(left, "ConfigMap default/a")
			}
			d := w.deregisterByForce("one")
			w.wantOffHub("free")
			w.wantDeadline(one, "")
			passed := w.expireDeadline(one)
			if isReachable {
				w.wantDeadline(one, passed)
				w.removeAgentWhenOrdered(one)
			}
			got := d.wait(w).Left
			slices.Sort(got)
			slices.Sort(left)
			if err := same(left, got); err != nil {
				t.Errorf("left %v", err)
			}
			w.eventually("one event", func() error {
				abandoned := w.abandonments(summary)
				if len(abandoned) != 1 || !strings.Contains(abandoned[0], "ConfigMap "+w.ns+"/held on the hub") {
					return fmt.Errorf("events are %q", abandoned)
				}
				return nil
			})
			w.removeFinalizers(held)
			w.wantOffHub("held")
		})
	}
}

func TestDeregistrationWithdrawsUnclaimedLocalBundlesOfAnUnreachableCluster(t *testing.T) {
	w := newWorld(t)
	w.configMap("manifests", w.onHub("orphan", "a", ""))
	one := w.unreachablePush("one")
	profile := w.localProfile(nil)
	summary := w.wantProvisioned(profile, "one")
	w.wantOnHub("orphan", "a")

	// The pause also stops the controller of unclaimed bundles.
	update(w, one, func(c *libv1beta1.SveltosCluster) { c.Spec.Paused = true })
	w.wantSummary(profile, "one", func(s configv1beta1.ClusterSummaryStatus) bool { return s.ReconciliationSuspended })
	w.must(w.Delete(t.Context(), profile))
	w.abandonedSummary(summary)
	w.must(w.Delete(t.Context(), one))
	w.wantClusterGone("one")
	w.wantOffHub("orphan")
}

func TestContentThatBecomesRemoteLeavesTheHub(t *testing.T) {
	w := newWorld(t)
	w.configMap("manifests", w.onHub("moved", "a", ""))
	one := w.member("one", w.prod())
	profile := w.localProfile(nil)
	w.wantProvisioned(profile, "one")
	w.wantOnHub("moved", "a")
	w.loseStatus(one) // otherwise the controller of unclaimed bundles can withdraw it, too
	update(w, profile, func(p *configv1beta1.ClusterProfile) {
		p.Labels = map[string]string{libv1beta1.ServiceAccountNameLabel: "deployer", libv1beta1.ServiceAccountNamespaceLabel: w.ns}
		p.Spec.PolicyRefs[0].DeploymentType = libv1beta1.DeploymentTypeRemote
	})
	w.wantOffHub("moved")
}

func TestLocalContentOneTime(t *testing.T) {
	w := newWorld(t)
	content := w.configMap("manifests", w.onHub("once", "a", ""))
	w.member("one", w.prod())
	profile := w.localProfile(func(spec *configv1beta1.ProfileSpec) { spec.SyncMode = configv1beta1.SyncModeOneTime })
	summary := w.wantProvisioned(profile, "one")
	once := w.wantOnHub("once", "a")

	update(w, content, func(cm *corev1.ConfigMap) { cm.Data = map[string]string{"content": w.onHub("once", "b", "")} })
	update(w, once, func(cm *corev1.ConfigMap) { cm.Data["text"] = "changed" })
	touch(w, profile, summary, "once")
	w.loseStatus(summary)
	w.wantProvisioned(profile, "one")
	if got := w.wantOnHub("once", "changed"); got.ResourceVersion != once.ResourceVersion {
		t.Errorf("version %s, want %s", got.ResourceVersion, once.ResourceVersion)
	}
	w.must(w.Delete(t.Context(), profile))
	w.wantOffHub("once")
}

func TestLocalBundlesWithoutASummary(t *testing.T) {
	w := newWorld(t)
	w.configMap("manifests", w.onHub("about", "a", ""))
	one := w.member("one", w.prod())
	profile := w.localProfile(nil)
	summary := w.wantProvisioned(profile, "one")
	about := w.wantOnHub("about", "a")
	w.wantListedOnHub("one", "about")

	t.Log("a lost status is written again")
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
	w.abandonedSummary(summary)
	pause(false)
	summary = w.wantProvisioned(profile, "one")
	w.wantSame(about)

	t.Log("the profile no longer matches")
	w.wantListedOnHub("one", "about")
	pause(true)
	update(w, one, func(c *libv1beta1.SveltosCluster) { c.Labels["env"] = "other" })
	w.abandonedSummary(summary)
	w.wantSame(about)
	update(w, one, func(c *libv1beta1.SveltosCluster) { c.Spec.Paused = false })
	w.wantOffHub("about")
}
