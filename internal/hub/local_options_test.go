package hub_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// wantOrphaned waits until an object on the hub has no owner, and fails if its UID has changed.
func (w *world) wantOrphaned(before *corev1.ConfigMap) {
	w.Helper()
	w.eventually(before.Name+" has no owner", func() error {
		after := &corev1.ConfigMap{}
		if err := w.Get(w.Context(), client.ObjectKeyFromObject(before), after); err != nil {
			return err
		}
		if after.Annotations[kube.AnnotationOwnerName] != "" {
			return fmt.Errorf("its annotations are %v", after.Annotations)
		}
		return nil
	})
	w.wantSame(before)
}

func TestLocalObjectsStayWithLeavePoliciesOrKeepAddons(t *testing.T) {
	t.Run("LeavePolicies", func(t *testing.T) {
		w := newWorld(t)
		w.createConfigMap("manifests", w.hubConfigMap("left", "a", ""))
		one := w.createReadyMember("one", w.prodLabels())
		profile := w.createLocalProfile(func(spec *configv1beta1.ProfileSpec) { spec.StopMatchingBehavior = configv1beta1.LeavePolicies })
		w.wantProvisioned(profile, "one")
		left := w.wantOnHub("left", "a")
		update(w, one, func(c *libv1beta1.SveltosCluster) { c.Labels["env"] = "other" })
		w.wantNoSummary(profile, "one")
		w.wantOrphaned(left)
	})
	t.Run("keep-addons", func(t *testing.T) {
		w := newWorld(t)
		w.createConfigMap("manifests", w.hubConfigMap("left", "a", ""))
		one := w.createReadyMember("one", w.prodLabels())
		profile := w.createLocalProfile(nil)
		w.wantProvisioned(profile, "one")
		left := w.wantOnHub("left", "a")
		w.wantListedOnHub("one", "left")
		d := w.deregister(join.DeregisterRequest{Request: join.Request{Name: "one"}, KeepAddons: true})
		w.confirmAgentRemoval(one)
		if err := checkEqual([]string{"ConfigMap " + w.ns + "/left on the hub"}, d.wait(w).Left); err != nil {
			t.Errorf("left objects: %v", err)
		}
		w.wantOrphaned(left)
	})
}

// TestLocalContentSupportsPatchesLabelsAndExclusions deploys a profile with patches, labels, annotations and drift
// exclusions to the hub.
func TestLocalContentSupportsPatchesLabelsAndExclusions(t *testing.T) {
	w, run := newRestartableWorldWith(t, "changes", hub.Options{SandboxCommand: []string{os.Args[0], serve}})
	run()
	w.createConfigMap("manifests", w.hubConfigMap("changed", "a", ""))
	w.createReadyMember("one", w.prodLabels())
	profile := w.createLocalProfile(func(spec *configv1beta1.ProfileSpec) {
		spec.SyncMode = configv1beta1.SyncModeContinuousWithDriftDetection
		spec.ExtraLabels, spec.ExtraAnnotations = map[string]string{"team": "a"}, map[string]string{"contact": "b"}
		spec.Patches = []libv1beta1.Patch{{Patch: `[{"op": "add", "path": "/data/patched", "value": "yes"}]`, Target: &libv1beta1.PatchSelector{Kind: "ConfigMap", Name: "change.*"}}}
		spec.DriftExclusions = []libv1beta1.DriftExclusion{{Paths: []string{"/data/text"}, Target: &libv1beta1.PatchSelector{Kind: "ConfigMap"}}}
	})
	w.wantProvisioned(profile, "one")
	changed := w.wantOnHub("changed", "a")
	if changed.Labels["team"] != "a" || changed.Annotations["contact"] != "b" {
		t.Errorf("labels %v, annotations %v", changed.Labels, changed.Annotations)
	}
	if diff := cmp.Diff(map[string]string{"text": "a", "patched": "yes"}, changed.Data); diff != "" {
		t.Errorf("data (-want +got):\n%s", diff)
	}
	update(w, changed, func(cm *corev1.ConfigMap) { cm.Data = map[string]string{"text": "theirs", "patched": "no"} })
	w.eventually("only the field that is not excluded is corrected", func() error {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(changed), changed); err != nil {
			return err
		}
		if diff := cmp.Diff(map[string]string{"text": "theirs", "patched": "yes"}, changed.Data); diff != "" {
			return errors.New(diff)
		}
		return nil
	})
}

// TestLocalContentSupportsForceOptionalAndTier replaces an immutable object with force, omits an optional reference,
// and takes over an object of a profile with a higher tier.
func TestLocalContentSupportsForceOptionalAndTier(t *testing.T) {
	w := newWorld(t)
	content := w.createConfigMap("manifests", w.hubConfigMap("fixed", "a", "")+"immutable: true\n")
	w.createReadyMember("one", w.prodLabels())
	profile := w.createLocalProfile(func(spec *configv1beta1.ProfileSpec) {
		spec.PolicyRefs[0].Force = true
		spec.PolicyRefs = append(spec.PolicyRefs, libv1beta1.PolicyRef{
			Kind: libv1beta1.SourceConfigMap, Namespace: w.ns, Name: "missing", Optional: true, DeploymentType: libv1beta1.DeploymentTypeLocal,
		})
	})
	w.wantProvisioned(profile, "one")
	fixed := w.wantOnHub("fixed", "a")
	update(w, content, func(cm *corev1.ConfigMap) {
		cm.Data["content"] = w.hubConfigMap("fixed", "b", "") + "immutable: true\n"
	})
	if replaced := w.wantOnHub("fixed", "b"); replaced.UID == fixed.UID {
		t.Error("the object has the same UID")
	}
	w.wantProvisioned(profile, "one")

	w.createConfigMap("better", w.hubConfigMap("fixed", "b", "")+"immutable: true\n")
	better := w.createLocalProfile(func(spec *configv1beta1.ProfileSpec) { spec.PolicyRefs[0].Name, spec.Tier = "better", 50 })
	w.wantProvisioned(better, "one")
	w.eventually("the former owner has a conflict", func() error {
		summary, err := w.getSummary(profile, "one")
		if err != nil {
			return err
		}
		if message := summary.Status.FeatureSummaries[0].FailureMessage; !strings.Contains(message, "currently deploying this resource is ClusterProfile "+better.Name) {
			return fmt.Errorf("the message is %q", message)
		}
		return nil
	})
	w.must(w.Delete(t.Context(), better))
	w.wantNoSummary(better, "one")
}
