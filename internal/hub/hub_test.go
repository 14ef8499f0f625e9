package hub_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/status"
)

// checkEqual returns an error with the difference between want and got, nil if they are equal.
func checkEqual[T any](want, got T) error {
	if diff := cmp.Diff(want, got); diff != "" {
		return fmt.Errorf("(-want +got):\n%s", diff)
	}
	return nil
}

func TestProfileIsProvisionedAndWithdrawn(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a")+"---\n"+manifest("b"))
	one := w.createReadyMember("one", w.prodLabels())
	w.createReadyMember("other", map[string]string{"env": "test", "test": w.ns})
	profile := w.createProfile(nil)

	summary := w.wantProvisioned(profile, "one")
	if want := profile.Name + "-sveltos-one"; summary.Name != want {
		t.Errorf("summary is named %s, want %s", summary.Name, want)
	}
	wantKinds := []libv1beta1.FeatureDeploymentInfo{{FeatureID: libv1beta1.FeatureResources, DeployedGroupVersionKind: []string{"ConfigMap.v1."}}}
	if err := checkEqual(wantKinds, summary.Status.DeployedGVKs); err != nil {
		t.Errorf("deployedGVKs %v", err)
	}
	if got := summary.Status.Dependencies; got == nil || *got != "no dependencies" {
		t.Errorf("dependencies = %v", got)
	}
	w.eventually("event", func() error {
		return checkEqual([]string{"Normal Sveltos Feature: Resources deployed to cluster Sveltos " + w.ns + "/one"}, w.listEvents(summary))
	})
	w.eventually("inventory", func() error {
		inventory := &configv1beta1.ClusterConfiguration{}
		if err := w.Get(t.Context(), client.ObjectKey{Namespace: w.ns, Name: "sveltos--one"}, inventory); err != nil {
			return err
		}
		feature, ok := status.FindDeployedFeature(inventory.Status, configv1beta1.ClusterProfileKind, profile.GetName(), libv1beta1.FeatureResources)
		if !ok {
			return errors.New("no deployed object yet")
		}
		var names []string
		for _, resource := range feature.Resources {
			names = append(names, resource.Kind+" "+resource.Name)
		}
		return checkEqual([]string{"ConfigMap a", "ConfigMap b"}, names)
	})
	w.eventually("matchingClusters", func() error {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(profile), profile); err != nil {
			return err
		}
		return checkEqual(1, len(profile.Status.MatchingClusters))
	})

	// The member does not match any more.
	update(w, one, func(c *libv1beta1.SveltosCluster) { c.Labels["env"] = "test" })
	w.wantNoSummary(profile, "one")
	if got := w.refs("one", "Resources"); got != nil {
		t.Errorf("objects on one: got %v, want none", got)
	}
	w.eventually("deletion of the inventory", func() error {
		err := w.Get(t.Context(), client.ObjectKey{Namespace: w.ns, Name: "sveltos--one"}, &configv1beta1.ClusterConfiguration{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("got error %w, want not found", err)
		}
		return nil
	})
}

func TestChangedContentIsDeliveredWithoutProfileChange(t *testing.T) {
	w := newWorld(t)
	cm := w.createConfigMap("manifests", manifest("a"))
	w.createReadyMember("one", w.prodLabels())
	profile := w.createProfile(nil)
	w.wantProvisioned(profile, "one")
	update(w, cm, func(cm *corev1.ConfigMap) { cm.Data["content"] = manifest("b") })
	w.eventually("new content", func() error { return checkEqual([]string{"ConfigMap default/b"}, w.refs("one", "Resources")) })
	w.wantProvisioned(profile, "one")
}

func TestSummariesAreFoundByOwner(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a"))
	w.createReadyMember("c", w.prodLabels())
	w.createReadyMember("x-sveltos-c", w.prodLabels())
	first := w.createProfile(nil)
	w.wantProvisioned(first, "x-sveltos-c")
	second := &configv1beta1.ClusterProfile{ObjectMeta: metav1.ObjectMeta{Name: first.Name + "-sveltos-x"}, Spec: *first.Spec.DeepCopy()}
	w.create(second)
	summary := w.wantProvisioned(second, "c")
	if taken := match.SummaryName("ClusterProfile", second.Name, memberNamed("c")); summary.Name == taken {
		t.Errorf("summary is named %s, which belongs to the other profile", taken)
	}
	w.must(w.Delete(t.Context(), second))
	w.wantNoSummary(second, "c")
	w.wantProvisioned(first, "x-sveltos-c")
}

func TestUnsupportedFieldIsReported(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a"))
	one := w.createReadyMember("one", w.prodLabels())
	profile := w.createProfile(nil)
	w.wantProvisioned(profile, "one")

	update(w, profile, func(p *configv1beta1.ClusterProfile) {
		p.Spec.Reloader = true
		p.Spec.PolicyRefs[0].Name = "elsewhere"
	})
	const message = "not supported yet: spec.reloader"
	summary := w.wantFeature(profile, "one", configv1beta1.FeatureSummary{
		FeatureID: libv1beta1.FeatureResources, Status: libv1beta1.FeatureStatusFailedNonRetriable, FailureMessage: message,
	})
	if summary.Status.FailureMessage != message {
		t.Errorf("failureMessage = %q, want %q", summary.Status.FailureMessage, message)
	}
	w.eventually("event", func() error {
		if all := w.listEvents(summary); !slices.Contains(all, "Warning FailedNonRetriable "+message) {
			return fmt.Errorf("events are %q", all)
		}
		return nil
	})
	// Nothing is withdrawn, not even from a member that no longer matches.
	update(w, one, func(c *libv1beta1.SveltosCluster) { c.Labels["env"] = "test" })
	w.eventually("profile says so", func() error {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(profile), profile); err != nil {
			return err
		}
		return errors.Join(checkEqual(message, profile.Status.SuspensionReason), checkEqual(0, len(profile.Status.MatchingClusters)))
	})
	if got := w.withdrawals(); got != nil {
		t.Errorf("withdrawn: %v", got)
	}
	if err := checkEqual([]string{"ConfigMap default/a"}, w.refs("one", "Resources")); err != nil {
		t.Errorf("objects on one: %v", err)
	}
	update(w, profile, func(p *configv1beta1.ClusterProfile) { p.Spec.Reloader = false })
	w.wantNoSummary(profile, "one")
}

func TestInvalidContentIsNotDeployed(t *testing.T) {
	w := newWorld(t)
	cm := w.createConfigMap("manifests", manifest("a"))
	w.createReadyMember("one", w.prodLabels())
	profile := w.createProfile(nil)
	w.wantProvisioned(profile, "one")

	update(w, cm, func(cm *corev1.ConfigMap) { cm.Data["content"] = "a: [" })
	w.eventually("broken YAML", func() error {
		return w.checkFailure(profile, "FailedNonRetriable", "ConfigMap "+w.ns+"/manifests, key content, document 1, line 1")
	})

	w.must(w.Delete(t.Context(), cm))
	w.eventually("missing reference", func() error { return w.checkFailure(profile, "Failed", "ConfigMap "+w.ns+"/manifests does not exist") })
	if err := checkEqual([]string{"ConfigMap default/a"}, w.refs("one", "Resources")); err != nil {
		t.Errorf("objects on one: %v", err)
	}
	w.createConfigMap("manifests", manifest("b"))
	w.wantProvisioned(profile, "one")
	if err := checkEqual([]string{"ConfigMap default/b"}, w.refs("one", "Resources")); err != nil {
		t.Errorf("objects on one: %v", err)
	}
}

// checkFailure returns nil if the Resources feature of profile on "one" has this status and message, and an event has
// the message.
func (w *world) checkFailure(profile client.Object, status, message string) error {
	summary, err := w.getSummary(profile, "one")
	if err != nil {
		return err
	}
	if len(summary.Status.FeatureSummaries) == 0 {
		return errors.New("no feature yet")
	}
	feature := summary.Status.FeatureSummaries[0]
	if string(feature.Status) != status || !strings.Contains(feature.FailureMessage, message) {
		return fmt.Errorf("feature is %s %q, want %s %q", feature.Status, feature.FailureMessage, status, message)
	}
	if all := w.listEvents(summary); !slices.ContainsFunc(all, func(e string) bool { return strings.HasPrefix(e, "Warning ") && strings.Contains(e, message) }) {
		return fmt.Errorf("events are %q, want one with %q", all, message)
	}
	return nil
}

func TestMemberFailureIsReportedAndRetried(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a"))
	w.createReadyMember("one", w.prodLabels())
	refused := errors.New("converge: ConfigMap default/a: no room")
	w.set(func(m *fakeTransport) {
		m.answer = func(_ bundle.Bundle, r *bundle.Report) error {
			r.State, r.Message = bundle.StateFailed, "ConfigMap default/a: no room"
			return refused
		}
	})
	profile := w.createProfile(nil)
	w.eventually("failure", func() error { return w.checkFailure(profile, "Failed", "ConfigMap default/a: no room") })
	w.set(func(m *fakeTransport) { m.answer = nil })
	summary := w.wantProvisioned(profile, "one")
	if got := summary.Status.FeatureSummaries[0].ConsecutiveFailures; got != 0 {
		t.Errorf("consecutiveFailures = %d after a success", got)
	}
}

func TestDeletionWithdrawsOrOrphans(t *testing.T) {
	for behavior, leave := range map[configv1beta1.StopMatchingBehavior]bool{configv1beta1.WithdrawPolicies: false, configv1beta1.LeavePolicies: true} {
		t.Run(string(behavior), func(t *testing.T) {
			w := newWorld(t)
			w.createConfigMap("manifests", manifest("a"))
			w.createReadyMember("one", w.prodLabels())
			profile := w.createProfile(nil)
			summary := w.wantProvisioned(profile, "one")
			refused := errors.New("not now")
			w.set(func(m *fakeTransport) { m.refuse = func(bundle.Withdrawal) (bool, error) { return false, refused } })
			// The hub must copy the behavior to the summary before the deletion of the profile.
			update(w, profile, func(p *configv1beta1.ClusterProfile) { p.Spec.StopMatchingBehavior = behavior })
			w.must(w.Delete(t.Context(), profile))

			w.wantFeature(profile, "one", configv1beta1.FeatureSummary{FeatureID: libv1beta1.FeatureResources, Status: libv1beta1.FeatureStatusAgentRemoving, FailureMessage: "not now"})
			if err := w.Get(t.Context(), client.ObjectKeyFromObject(profile), profile); err != nil {
				t.Errorf("the profile did not wait for its summaries: %v", err)
			}
			w.set(func(m *fakeTransport) { m.refuse = nil })
			w.wantNoSummary(profile, "one")
			w.eventually("deletion of the profile", func() error {
				if err := w.Get(t.Context(), client.ObjectKeyFromObject(profile), profile); !apierrors.IsNotFound(err) {
					return fmt.Errorf("got error %w, want not found", err)
				}
				return nil
			})
			want := []bundle.Withdrawal{{ID: bundle.ID{RequestorKind: "ClusterSummary", RequestorName: summary.Name, Feature: "Resources"}, Orphan: leave}}
			if err := checkEqual(want, w.withdrawals()); err != nil {
				t.Errorf("withdrawals %v", err)
			}
		})
	}
}

func TestProfileCanBeDeletedAfterClusterRemoval(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a"))
	one := w.createReadyMember("one", w.prodLabels())
	profile := w.createProfile(nil)
	summary := w.wantProvisioned(profile, "one")
	// A user removes the finalizer of the hub.
	w.set(func(m *fakeTransport) { m.refuse = func(bundle.Withdrawal) (bool, error) { return false, nil } })
	w.must(w.Delete(t.Context(), one))
	w.must(w.Patch(t.Context(), one, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))))
	w.wantNoSummary(profile, "one")
	w.eventually("event", func() error {
		want := "Warning Abandoned cluster Sveltos " + w.ns + "/one does not exist; nothing was withdrawn from it, left there: Resources (ConfigMap.v1.)"
		if all := w.listEvents(summary); !slices.Contains(all, want) {
			return fmt.Errorf("events are %q", all)
		}
		return nil
	})
	if got := w.withdrawals(); got != nil {
		t.Errorf("withdrawn: %v", got)
	}
}

func TestRemovedFeatureIsWithdrawn(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a"))
	w.createReadyMember("one", w.prodLabels())
	profile := w.createProfile(nil)
	w.wantProvisioned(profile, "one")
	update(w, profile, func(p *configv1beta1.ClusterProfile) { p.Spec.PolicyRefs = nil })
	summary := w.wantFeature(profile, "one", configv1beta1.FeatureSummary{FeatureID: libv1beta1.FeatureResources, Status: libv1beta1.FeatureStatusRemoved})
	if len(summary.Status.DeployedGVKs) > 0 || w.refs("one", "Resources") != nil {
		t.Errorf("left objects: %v, %v", summary.Status.DeployedGVKs, w.refs("one", "Resources"))
	}
}

func TestOneTimeIsDeployedOnce(t *testing.T) {
	w := newWorld(t)
	cm := w.createConfigMap("manifests", manifest("a"))
	w.createConfigMap("others", manifest("other"))
	w.createReadyMember("one", w.prodLabels())
	profile := w.createProfile(func(s *configv1beta1.ProfileSpec) { s.SyncMode = configv1beta1.SyncModeOneTime })
	w.wantProvisioned(profile, "one")
	update(w, cm, func(cm *corev1.ConfigMap) { cm.Data["content"] = manifest("b") })
	update(w, profile, func(p *configv1beta1.ClusterProfile) {
		p.Spec.PolicyRefs[0].Name = "others"
		p.Spec.StopMatchingBehavior = configv1beta1.LeavePolicies
	})
	// The second member shows that the hub has seen the change.
	w.createReadyMember("two", w.prodLabels())
	w.wantProvisioned(profile, "two")
	if err := checkEqual([]string{"ConfigMap default/other"}, w.refs("two", "Resources")); err != nil {
		t.Errorf("objects on two: %v", err)
	}
	w.eventually("stopMatchingBehavior", func() error {
		summary, err := w.getSummary(profile, "one")
		if err != nil {
			return err
		}
		spec := summary.Spec.ClusterProfileSpec
		return errors.Join(checkEqual(configv1beta1.LeavePolicies, spec.StopMatchingBehavior), checkEqual("manifests", spec.PolicyRefs[0].Name))
	})
	if err := checkEqual([]string{"ConfigMap default/a"}, w.refs("one", "Resources")); err != nil {
		t.Errorf("objects on one: %v", err)
	}
}

func TestProfileStaysInItsNamespace(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a"))
	w.createReadyMember("one", w.prodLabels())
	profile := &configv1beta1.Profile{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "p"},
		Spec: configv1beta1.ProfileSpec{
			ClusterSelector: metav1.LabelSelector{MatchLabels: map[string]string{"env": "prod"}},
			PolicyRefs:      []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Name: "manifests"}},
		},
	}
	w.create(profile)
	summary := w.wantProvisioned(profile, "one")
	if summary.Name != "p--p-sveltos-one" {
		t.Errorf("summary is named %s", summary.Name)
	}
	w.eventually("matchingClusters", func() error {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(profile), profile); err != nil {
			return err
		}
		return checkEqual(1, len(profile.Status.MatchingClusters))
	})
	w.must(w.Delete(t.Context(), profile))
	w.wantNoSummary(profile, "one")
}

func TestPausedOrUnreadyClusterGetsNoChanges(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a"))
	one := w.createMember("one", nil)
	profile := w.createProfile(func(s *configv1beta1.ProfileSpec) {
		s.ClusterRefs = []corev1.ObjectReference{{Kind: "SveltosCluster", APIVersion: "lib.projectsveltos.io/v1beta1", Namespace: w.ns, Name: "one"}}
	})
	failed := configv1beta1.FeatureSummary{FeatureID: libv1beta1.FeatureResources, Status: libv1beta1.FeatureStatusFailed, FailureMessage: "cluster is not ready"}
	w.wantFeature(profile, "one", failed)

	// A cluster that is paused before it is ready gets no summary changes.
	update(w, one, func(c *libv1beta1.SveltosCluster) { c.Spec.Paused = true })
	w.setReady(one)
	w.eventually("suspended", func() error {
		summary, err := w.getSummary(profile, "one")
		if err != nil {
			return err
		}
		return checkEqual("cluster "+w.ns+"/one is paused", summary.Status.SuspensionReason)
	})
	update(w, one, func(c *libv1beta1.SveltosCluster) { c.Spec.Paused = false })
	w.wantProvisioned(profile, "one")

	update(w, profile, func(p *configv1beta1.ClusterProfile) {
		p.Annotations = map[string]string{libv1beta1.ProfilePausedAnnotation: "true"}
		p.Spec.PolicyRefs = nil
	})
	w.eventually("paused", func() error {
		summary, err := w.getSummary(profile, "one")
		if err != nil {
			return err
		}
		return checkEqual("the profile is paused", summary.Status.SuspensionReason)
	})
	if got := w.withdrawals(); got != nil {
		t.Errorf("withdrawn: %v", got)
	}
	update(w, profile, func(p *configv1beta1.ClusterProfile) { p.Annotations = nil })
	w.wantFeature(profile, "one", configv1beta1.FeatureSummary{FeatureID: libv1beta1.FeatureResources, Status: libv1beta1.FeatureStatusRemoved})
}

func TestPullMembersAreCounted(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a"))
	for _, name := range []string{"one", "two"} {
		w.createReadyMember(name, w.prodLabels())
	}
	// The hub has handled both changes when this summary is provisioned.
	seen := w.createProfile(nil)
	w.wantProvisioned(seen, "one")
	w.wantProvisioned(seen, "two")
	profile := w.createProfile(nil)
	for _, name := range []string{"one", "two"} {
		summary := w.wantProvisioned(profile, name)
		if got := match.PullMembers(summary); got != 2 {
			t.Errorf("pull members of %s = %d, want 2", name, got)
		}
	}
}
