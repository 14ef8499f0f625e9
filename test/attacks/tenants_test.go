package attacks

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// awaitForbidden waits until write is refused with text: the API server needs a moment for a new policy.
func (w *world) awaitForbidden(what, text string, write func() error) {
	w.Helper()
	w.eventually(what, func() error {
		if err := write(); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), text) {
			return fmt.Errorf("got error %w, want Forbidden with %q", err, text)
		}
		return nil
	})
}

// TestSummaryOfATenant: a tenant with all rights on Towline's kinds in one namespace writes a ClusterSummary that
// belongs to a ClusterProfile, which may read the Secrets of all namespaces.
func TestSummaryOfATenant(t *testing.T) {
	w := newWorld(t)
	tenant := w.tenant()
	isController := true
	claimed := []metav1.OwnerReference{{
		APIVersion: configv1beta1.GroupVersion.String(), Kind: configv1beta1.ClusterProfileKind, Name: "platform", UID: types.UID(w.ns), Controller: &isController,
	}}
	spec := configv1beta1.ClusterSummarySpec{
		ClusterNamespace: w.ns, ClusterName: "mine", ClusterType: libv1beta1.ClusterTypeSveltos,
		ClusterProfileSpec: configv1beta1.ProfileSpec{PolicyRefs: []libv1beta1.PolicyRef{{Kind: "Secret", Namespace: "kube-system", Name: "token"}}},
	}
	const text = "may write one that belongs to a ClusterProfile"
	w.awaitForbidden("a new summary", text, func() error {
		return tenant.Create(t.Context(), &configv1beta1.ClusterSummary{
			ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "forged", OwnerReferences: claimed}, Spec: spec,
		})
	})
	w.awaitForbidden("a summary that belongs to something else", text, func() error {
		other := slices.Clone(claimed)
		other[0].APIVersion, other[0].Kind = "v1", "ConfigMap"
		return tenant.Create(t.Context(), &configv1beta1.ClusterSummary{
			ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "forged", OwnerReferences: other}, Spec: spec,
		})
	})
	for what, owner := range map[string]metav1.OwnerReference{
		"an owner of an unknown kind, which the garbage collector keeps": {APIVersion: "unknown.example.com/v1", Kind: "Foo", Name: "platform", UID: claimed[0].UID},
		"a Profile of another group":                                     {APIVersion: "unknown.example.com/v1", Kind: configv1beta1.ProfileKind, Name: "platform", UID: claimed[0].UID},
		"a Profile of an unknown version": {
			APIVersion: configv1beta1.GroupVersion.Group + "/v9", Kind: configv1beta1.ProfileKind, Name: "platform", UID: claimed[0].UID,
		},
	} {
		w.awaitForbidden("a summary with "+what, text, func() error {
			return tenant.Create(t.Context(), &configv1beta1.ClusterSummary{
				ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "forged", OwnerReferences: []metav1.OwnerReference{owner}}, Spec: spec,
			})
		})
	}
	w.awaitForbidden("a summary with the label of a ClusterProfile", text, func() error {
		return tenant.Create(t.Context(), &configv1beta1.ClusterSummary{
			ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "forged", Labels: map[string]string{configv1beta1.ClusterProfileNameLabel: "platform"}}, Spec: spec,
		})
	})
	// Without an owner and the label, the hub ignores it.
	summary := &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "later"}, Spec: spec}
	w.noError(tenant.Create(t.Context(), summary))
	w.awaitForbidden("an owner that is added", text, func() error {
		changed := summary.DeepCopy()
		changed.OwnerReferences = claimed
		return tenant.Patch(t.Context(), changed, client.MergeFrom(summary))
	})

	// The summary of a ClusterProfile, in the namespace of the tenant.
	cluster := w.pullCluster(tenant, "mine")
	profile := &configv1beta1.ClusterProfile{
		ObjectMeta: metav1.ObjectMeta{Name: w.ns},
		Spec:       configv1beta1.ProfileSpec{ClusterSelector: metav1.LabelSelector{MatchLabels: cluster.Labels}},
	}
	w.noError(w.Create(t.Context(), profile))
	t.Cleanup(func() { _ = w.Delete(w.Context(), profile) })
	var summaries configv1beta1.ClusterSummaryList
	w.eventually("the hub creates the summary", func() error {
		err := w.List(t.Context(), &summaries, client.InNamespace(w.ns), client.MatchingLabels{configv1beta1.ClusterProfileNameLabel: profile.Name})
		if err == nil && len(summaries.Items) == 0 {
			return fmt.Errorf("there is none")
		}
		return err
	})
	existing := &summaries.Items[0]
	w.awaitForbidden("other content", text, func() error {
		changed := existing.DeepCopy()
		changed.Spec.ClusterProfileSpec.PolicyRefs = spec.ClusterProfileSpec.PolicyRefs
		return tenant.Patch(t.Context(), changed, client.MergeFrom(existing))
	})
	w.awaitForbidden("another owner and content", text, func() error {
		changed := existing.DeepCopy()
		changed.OwnerReferences, changed.Labels = nil, nil
		changed.Spec.ClusterProfileSpec.PolicyRefs = spec.ClusterProfileSpec.PolicyRefs
		return tenant.Patch(t.Context(), changed, client.MergeFrom(existing))
	})
	annotated := existing.DeepCopy()
	metav1.SetMetaDataAnnotation(&annotated.ObjectMeta, "note", "harmless")
	w.noError(tenant.Patch(t.Context(), annotated, client.MergeFrom(existing)))
}

// TestSummaryForAForeignCluster: a tenant writes a summary of the tenant's Profile, for a cluster of another namespace.
func TestSummaryForAForeignCluster(t *testing.T) {
	w := newWorld(t)
	tenant, foreign := w.tenant(), w.hub.Namespace(t, "victim")
	victim := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: foreign, Name: "prod"}, Spec: libv1beta1.SveltosClusterSpec{PullMode: true}}
	w.noError(w.Create(t.Context(), victim))
	// A paused Profile does not delete the summary, although it matches no cluster.
	profile := &configv1beta1.Profile{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "mine", Annotations: map[string]string{libv1beta1.ProfilePausedAnnotation: "true"}},
		Spec:       configv1beta1.ProfileSpec{ClusterSelector: metav1.LabelSelector{MatchLabels: w.labels()}},
	}
	w.noError(tenant.Create(t.Context(), profile))
	summary := &configv1beta1.ClusterSummary{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "prod", OwnerReferences: []metav1.OwnerReference{
			*metav1.NewControllerRef(profile, configv1beta1.GroupVersion.WithKind(configv1beta1.ProfileKind)),
		}},
		Spec: configv1beta1.ClusterSummarySpec{ClusterNamespace: foreign, ClusterName: "prod", ClusterType: libv1beta1.ClusterTypeSveltos},
	}
	w.noError(tenant.Create(t.Context(), summary))
	w.eventually("the hub reads the cluster from the namespace of the tenant", func() error {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(summary), summary); err != nil {
			return err
		}
		return wantText(summary.Status.FailureMessage, "cluster "+w.ns+"/prod does not exist")
	})
	groups := &libv1beta1.ConfigurationGroupList{}
	if err := w.List(t.Context(), groups, client.InNamespace(foreign)); err != nil || len(groups.Items) > 0 {
		t.Errorf("the foreign cluster got %d groups (error %v), want none", len(groups.Items), err)
	}
}

// TestSummaryWithTheUIDOfAProfile: the namespace of a tenant has a summary that names the UID of a ClusterProfile, or
// of another user's Profile, as its owner. An earlier version allowed the tenant to create it. Then the tenant labels a
// cluster so that the ClusterProfile matches: the hub must not read a Secret for the content of that summary, and not
// deploy it to the namespace of others.
func TestSummaryWithTheUIDOfAProfile(t *testing.T) {
	w := newWorld(t)
	tenant, foreign := w.tenant(), w.hub.Namespace(t, "victim")
	w.noError(w.Create(t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: foreign, Name: "victim"}, StringData: map[string]string{"password": "s3cret"},
	}))
	selector := map[string]string{"test": w.ns, "go": "yes"}
	profile := &configv1beta1.ClusterProfile{ObjectMeta: metav1.ObjectMeta{Name: w.ns}, Spec: configv1beta1.ProfileSpec{
		SyncMode: configv1beta1.SyncModeOneTime, ClusterSelector: metav1.LabelSelector{MatchLabels: selector},
		PolicyRefs: []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Namespace: foreign, Name: "harmless", Optional: true}},
	}}
	w.noError(w.Create(t.Context(), profile))
	t.Cleanup(func() { _ = w.Delete(w.Context(), profile) })
	theirs := &configv1beta1.Profile{ObjectMeta: metav1.ObjectMeta{Namespace: foreign, Name: "theirs"}}
	w.noError(w.Create(t.Context(), theirs))
	w.noError(tenant.Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "content", Annotations: map[string]string{libv1beta1.TemplateAnnotation: "ok"}},
		Data: map[string]string{"a.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: " + foreign +
			", name: stolen}\ndata: {password: '{{ .MgmtResources.victim.data.password }}'}\n"},
	}))
	cluster := w.pullCluster(tenant, "mine")
	forge := func(name string, owner metav1.OwnerReference) *configv1beta1.ClusterSummary {
		t.Helper()
		forged := &configv1beta1.ClusterSummary{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: w.ns, Name: name, Finalizers: []string{configv1beta1.ClusterSummaryFinalizer}, OwnerReferences: []metav1.OwnerReference{owner},
			},
			Spec: configv1beta1.ClusterSummarySpec{
				ClusterNamespace: w.ns, ClusterName: "mine", ClusterType: libv1beta1.ClusterTypeSveltos,
				ClusterProfileSpec: configv1beta1.ProfileSpec{
					SyncMode: configv1beta1.SyncModeOneTime,
					TemplateResourceRefs: []configv1beta1.TemplateResourceRef{
						{Identifier: "victim", Resource: corev1.ObjectReference{APIVersion: "v1", Kind: "Secret", Namespace: foreign, Name: "victim"}},
					},
					PolicyRefs: []libv1beta1.PolicyRef{{
						Kind: libv1beta1.SourceConfigMap, Namespace: w.ns, Name: "content", DeploymentType: libv1beta1.DeploymentTypeLocal,
					}},
				},
			},
		}
		w.noError(w.Create(t.Context(), forged))
		return forged
	}
	forged := forge("forged", metav1.OwnerReference{APIVersion: "unknown.example.com/v1", Kind: "Foo", Name: "x", UID: profile.UID})
	// The owner has an unknown version, so that the garbage collector keeps the summary.
	unknown, isController := configv1beta1.GroupVersion.Group+"/v9", true
	ofProfile := forge("profile", metav1.OwnerReference{
		APIVersion: unknown, Kind: configv1beta1.ProfileKind, Name: "theirs", UID: theirs.UID, Controller: &isController,
	})

	relabelled := cluster.DeepCopy()
	relabelled.Labels = selector
	w.noError(tenant.Patch(t.Context(), relabelled, client.MergeFrom(cluster)))
	w.eventually("the ClusterProfile has a summary of its own", func() error {
		stolen := &corev1.ConfigMap{}
		if err := w.Get(t.Context(), client.ObjectKey{Namespace: foreign, Name: "stolen"}, stolen); err == nil {
			t.Fatalf("the hub has written %v to the namespace of others", stolen.Data)
		}
		var all configv1beta1.ClusterSummaryList
		if err := w.List(t.Context(), &all, client.InNamespace(w.ns), client.MatchingLabels{configv1beta1.ClusterProfileNameLabel: profile.Name}); err != nil {
			return err
		}
		for _, summary := range all.Items {
			if summary.Name == forged.Name {
				t.Fatalf("the summary of the tenant belongs to %+v", summary.OwnerReferences)
			}
			if metav1.IsControlledBy(&summary, profile) && summary.Spec.ClusterProfileSpec.PolicyRefs[0].Name == "harmless" {
				return nil
			}
		}
		return fmt.Errorf("got %d summaries", len(all.Items))
	})

	// The Profile of the others neither deletes the summary nor waits for it.
	w.noError(w.Delete(t.Context(), theirs))
	w.eventually("the Profile of the others is deleted", func() error {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(theirs), theirs); !apierrors.IsNotFound(err) {
			return fmt.Errorf("error %w, finalizers %v", err, theirs.Finalizers)
		}
		return nil
	})
	w.noError(w.Get(t.Context(), client.ObjectKeyFromObject(ofProfile), ofProfile))
	if ofProfile.DeletionTimestamp != nil {
		t.Error("the Profile of the others has deleted the summary of the tenant")
	}
}

// TestLabelsOfClusters: a tenant labels a cluster so that a ClusterProfile delivers to it. The administrator has
// applied the policy and the example of docs/tenants.md.
func TestLabelsOfClusters(t *testing.T) {
	w := newWorld(t)
	w.ns = "team-b"
	for _, file := range []string{"../../config/policies/cluster-labels.yaml", "../../examples/tenants.yaml"} {
		raw, err := os.ReadFile(file)
		w.noError(err)
		for document := range strings.SplitSeq(string(raw), "\n---\n") {
			obj := &unstructured.Unstructured{}
			w.noError(yaml.Unmarshal([]byte(document), obj))
			if obj.GetKind() == "ValidatingAdmissionPolicyBinding" {
				// The other tests use the same hub.
				w.noError(unstructured.SetNestedField(obj.Object, w.ns, "spec", "matchResources", "namespaceSelector", "matchLabels", corev1.LabelMetadataName))
			}
			w.noError(client.IgnoreAlreadyExists(w.Create(t.Context(), obj)))
		}
	}
	tenant := w.tenant()
	cluster := func(name string, labels map[string]string) *libv1beta1.SveltosCluster {
		return &libv1beta1.SveltosCluster{
			ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name, Labels: labels}, Spec: libv1beta1.SveltosClusterSpec{PullMode: true},
		}
	}
	w.awaitForbidden("a cluster with a label of others", "may not have these values of labels: env", func() error {
		return tenant.Create(t.Context(), cluster("stolen", map[string]string{"env": "production", "tier": "web"}))
	})
	mine := cluster("mine", map[string]string{"env": "test", "tier": "web"})
	w.noError(tenant.Create(t.Context(), mine))
	relabel := func(user client.Client, labels map[string]string) error {
		w.noError(w.Get(t.Context(), client.ObjectKeyFromObject(mine), mine))
		changed := mine.DeepCopy()
		changed.Labels = labels
		return user.Patch(t.Context(), changed, client.MergeFrom(mine))
	}
	w.awaitForbidden("a changed label", "may not have these values of labels: env", func() error {
		return relabel(tenant, map[string]string{"env": "production"})
	})
	w.noError(relabel(w, map[string]string{"env": "production", "tier": "web", "restricted": "true"}))
	w.noError(relabel(tenant, map[string]string{"env": "production", "tier": "api", "restricted": "true"}))
	w.awaitForbidden("a removed label", "only an administrator may remove these labels: restricted", func() error {
		return relabel(tenant, map[string]string{"env": "production"})
	})
}

// TestPatchesOfAgents: a tenant uses the ConfigMap of another namespace as patches, to read it in the agent's manifest.
func TestPatchesOfAgents(t *testing.T) {
	w := newWorld(t)
	foreign := w.hub.Namespace(t, "foreign")
	w.noError(w.Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: foreign, Name: "settings"}, Data: map[string]string{"a": "{kind: Deployment, metadata: {labels: {password: secret}}}"},
	}))
	cluster := &libv1beta1.SveltosCluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "mine", Annotations: map[string]string{libv1beta1.AgentConfigAnnotation: foreign + "/settings"}},
		Spec:       libv1beta1.SveltosClusterSpec{PullMode: true},
	}
	w.noError(w.tenant().Create(t.Context(), cluster))
	w.eventually("the hub refuses the patches", func() error {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
			return err
		}
		return wantText(cluster.Status.FailureMessage, kube.LabelAgentPatches)
	})
}
