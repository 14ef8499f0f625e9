package hub_test

import (
	"fmt"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/match"
)

// loseStatus removes the status of obj, as after a restore from a backup without it.
func (w *world) loseStatus(obj client.Object) {
	w.Helper()
	w.must(w.Status().Patch(w.Context(), obj, client.RawPatch("application/merge-patch+json", []byte(`{"status":null}`))))
}

// annotateProfile changes an annotation of a profile, and waits until the hub has copied it to the summary.
func annotateProfile[T client.Object](w *world, profile T, summary *configv1beta1.ClusterSummary, value string) {
	w.Helper()
	const key = "test.towline.dev/touched"
	update(w, profile, func(p T) {
		annotations := p.GetAnnotations()
		if annotations == nil {
			annotations = map[string]string{}
		}
		annotations[key] = value
		p.SetAnnotations(annotations)
	})
	w.eventually("the hub has seen the profile", func() error {
		live := &configv1beta1.ClusterSummary{}
		if err := w.Get(w.Context(), client.ObjectKeyFromObject(summary), live); err != nil {
			return err
		}
		if live.UID != summary.UID || !live.DeletionTimestamp.IsZero() || live.Annotations[key] != value {
			return fmt.Errorf("uid %s, want %s; deleted %v; annotations %v", live.UID, summary.UID, live.DeletionTimestamp, live.Annotations)
		}
		return nil
	})
}

func TestAddonsStayWhileTheStatusOfTheirClusterIsLost(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a"))
	one := w.createReadyMember("one", w.prodLabels())
	everywhere := w.createProfile(nil)
	here := &configv1beta1.Profile{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "here"}, Spec: *everywhere.Spec.DeepCopy()}
	w.createConfigMap("others", manifest("b"))
	here.Spec.PolicyRefs[0].Name = "others"
	w.create(here)
	summaries := map[client.Object]*configv1beta1.ClusterSummary{
		everywhere: w.wantProvisioned(everywhere, "one"), here: w.wantProvisioned(here, "one"),
	}
	// Without a heartbeat the hub does not write the status again before the test does.
	w.loseStatus(one)
	annotateProfile(w, everywhere, summaries[everywhere], "lost")
	annotateProfile(w, here, summaries[here], "lost")
	w.must(w.Get(t.Context(), client.ObjectKeyFromObject(one), one))
	if one.Status.Ready {
		t.Error("the cluster is ready")
	}
	w.setReady(one)
	annotateProfile(w, everywhere, summaries[everywhere], "found")
	annotateProfile(w, here, summaries[here], "found")
	for profile, summary := range summaries {
		if got := w.wantProvisioned(profile, "one"); got.UID != summary.UID {
			t.Errorf("%s has another summary", profile.GetName())
		}
	}
	if got := w.withdrawals(); got != nil {
		t.Errorf("withdrawn: %v", got)
	}
}

// createProvisionedCluster creates a Cluster in pull mode with the name of the test's namespace, and a profile
// that is provisioned on it.
func (w *world) createProvisionedCluster() (*clusterv1alpha1.Cluster, *configv1beta1.ClusterProfile, *configv1beta1.ClusterSummary) {
	w.Helper()
	w.createConfigMap("manifests", manifest("a"))
	sharedTransport.mu.Lock()
	sharedTransport.tests[fleet.ExecutionSpace(w.ns)] = w.fakeTransport
	sharedTransport.mu.Unlock()
	one := w.createReadyCluster(w.ns, clusterv1alpha1.ClusterSpec{ID: w.ns, SyncMode: clusterv1alpha1.Pull})
	profile := w.createProfile(nil)
	return one, profile, w.wantState(profile, w.ns, libv1beta1.FeatureStatusProvisioned)
}

func TestForceWithdrawsFromAKarmadaClusterWhoseStatusIsLost(t *testing.T) {
	w := newWorld(t)
	one, _, summary := w.createProvisionedCluster()
	w.eventually("heartbeat", func() error {
		lease := &coordinationv1.Lease{}
		if err := w.Get(t.Context(), client.ObjectKey{Namespace: fleet.ExecutionSpace(w.ns), Name: w.ns}, lease); err != nil {
			return err
		}
		lease.Spec.RenewTime = &metav1.MicroTime{Time: time.Now()}
		return w.Update(t.Context(), lease)
	})
	update(w, one, func(c *clusterv1alpha1.Cluster) {
		metav1.SetMetaDataAnnotation(&c.ObjectMeta, kube.AnnotationDeregister, kube.DeregisterForce)
	})
	w.loseStatus(one)
	w.must(w.Delete(t.Context(), one))
	w.eventually("deletion of the summary", func() error { return w.checkNotFound(summary, summary.Namespace, summary.Name) })
	if got := w.withdrawals(); len(got) != 1 {
		t.Errorf("withdrawn: %v", got)
	}
}

func TestAddonsStayWhileTheStatusOfTheirKarmadaClusterIsLost(t *testing.T) {
	w := newWorld(t)
	one, profile, summary := w.createProvisionedCluster()
	w.loseStatus(one)
	annotateProfile(w, profile, summary, "lost")
	w.eventually("the Cluster is ready again", func() error { return w.patchReady(one, metav1.ConditionTrue) })
	annotateProfile(w, profile, summary, "found")
	if got := w.withdrawals(); got != nil {
		t.Errorf("withdrawn: %v", got)
	}
}

func TestProfilesTakeOverRestoredSummaries(t *testing.T) {
	w := newWorld(t)
	// The second owner protects the summary from the garbage collector, which may be faster than the hub.
	manifests := w.createConfigMap("manifests", manifest("a"))
	w.createReadyMember("one", w.prodLabels())
	// After a restore a profile has another UID, or the owner references are missing.
	tests := map[string]func(profile string) []metav1.OwnerReference{
		"without an owner": func(string) []metav1.OwnerReference { return nil },
		"with the uid of another profile": func(profile string) []metav1.OwnerReference {
			return []metav1.OwnerReference{
				{APIVersion: configv1beta1.GroupVersion.String(), Kind: configv1beta1.ClusterProfileKind, Name: profile, UID: "another", Controller: ptr.To(true)},
				{APIVersion: "v1", Kind: "ConfigMap", Name: manifests.Name, UID: manifests.UID},
			}
		},
	}
	for name, owners := range tests {
		t.Run(name, func(t *testing.T) {
			profile := w.createProfile(func(s *configv1beta1.ProfileSpec) { s.ClusterSelector.MatchLabels["env"] = "none" })
			restored := &configv1beta1.ClusterSummary{
				ObjectMeta: metav1.ObjectMeta{
					Namespace: w.ns, Name: match.SummaryName(configv1beta1.ClusterProfileKind, profile.Name, memberNamed("one")),
					Labels:          map[string]string{configv1beta1.ClusterProfileNameLabel: match.LabelValue(profile.Name)},
					OwnerReferences: owners(profile.Name), Finalizers: []string{configv1beta1.ClusterSummaryFinalizer},
				},
				Spec: configv1beta1.ClusterSummarySpec{
					ClusterNamespace: w.ns, ClusterName: "one", ClusterType: libv1beta1.ClusterTypeSveltos, ClusterProfileSpec: *profile.Spec.DeepCopy(),
				},
			}
			w.create(restored)
			update(w, profile, func(p *configv1beta1.ClusterProfile) { p.Spec.ClusterSelector.MatchLabels["env"] = "prod" })
			if got := w.wantProvisioned(profile, "one"); got.UID != restored.UID || !metav1.IsControlledBy(got, profile) {
				t.Errorf("uid %s, want %s; owners %v", got.UID, restored.UID, got.OwnerReferences)
			}
			if got := w.withdrawals(); got != nil {
				t.Errorf("withdrawn: %v", got)
			}
		})
	}
}

func TestDeregistrationIgnoresAnnotationsOfEarlierDeregistration(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a"))
	one := w.createReadyMember("one", w.prodLabels())
	w.wantProvisioned(w.createProfile(nil), "one")
	// The cluster is restored from a backup during its deregistration.
	update(w, one, func(c *libv1beta1.SveltosCluster) {
		metav1.SetMetaDataAnnotation(&c.ObjectMeta, kube.AnnotationAgentRequest, kube.AgentRequestRemove)
		metav1.SetMetaDataAnnotation(&c.ObjectMeta, kube.AnnotationDeadline, "2026-01-02T03:04:05Z")
		metav1.SetMetaDataAnnotation(&c.ObjectMeta, kube.AnnotationLeftBehind, `["something"]`)
		metav1.SetMetaDataAnnotation(&c.ObjectMeta, kube.AnnotationDeregister, kube.DeregisterForce+","+kube.DeregisterAbandon)
	})
	w.eventually("only the annotations of users are left", func() error {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(one), one); err != nil {
			return err
		}
		if fleet.RemoveDeregistration(one.DeepCopy()) || one.Annotations[kube.AnnotationDeregister] != kube.DeregisterForce {
			return fmt.Errorf("annotations are %v", one.Annotations)
		}
		return nil
	})
	w.must(w.Delete(t.Context(), one))
	w.confirmAgentRemoval(one)
	w.wantClusterDeleted("one")
	if got := w.withdrawals(); len(got) != 1 {
		t.Errorf("withdrawn: %v", got)
	}
}
