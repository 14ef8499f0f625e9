package attacks

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/agent"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// accountLabels name a ServiceAccount of the member.
func accountLabels(namespace, name string) map[string]string {
	return map[string]string{libv1beta1.ServiceAccountNamespaceLabel: namespace, libv1beta1.ServiceAccountNameLabel: name}
}

// TestAccountsOfProfiles: a tenant's Profiles must deploy as one ServiceAccount. The tenant writes a Profile that
// deploys with the rights of the hub, or as another ServiceAccount, or is withdrawn as another one.
func TestAccountsOfProfiles(t *testing.T) {
	w := newWorld(t)
	w.ns = "team-d"
	for _, file := range []string{"../../config/policies/profile-accounts.yaml", "../../examples/tenants-accounts.yaml"} {
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
	const text = "must name a ServiceAccount of namespace team-d: team-d/deployer"
	for what, labels := range map[string]map[string]string{
		"no account": nil, "an account of others": accountLabels("team-c", "deployer"), "another account": accountLabels("", "admin"), "a namespace": accountLabels("team-d", ""),
	} {
		w.awaitForbidden("a Profile with "+what, text, func() error {
			return tenant.Create(t.Context(), &configv1beta1.Profile{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "forged", Labels: labels}})
		})
		w.awaitForbidden("a ClusterSummary with "+what, text, func() error {
			return tenant.Create(t.Context(), &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "forged", Labels: labels},
				Spec: configv1beta1.ClusterSummarySpec{ClusterNamespace: w.ns, ClusterName: "mine", ClusterType: libv1beta1.ClusterTypeSveltos}})
		})
	}
	profile := &configv1beta1.Profile{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "mine", Labels: accountLabels("team-d", "deployer")}}
	w.noError(tenant.Create(t.Context(), profile))
	w.awaitForbidden("a Profile that loses its labels", text, func() error {
		changed := profile.DeepCopy()
		changed.Labels = nil
		return tenant.Patch(t.Context(), changed, client.MergeFrom(profile))
	})
	w.noError(w.Get(t.Context(), client.ObjectKeyFromObject(profile), profile))
	w.noError(tenant.Delete(t.Context(), profile))
	w.attackWithdrawal(tenant)
}

// attackWithdrawal has a tenant, whose Profiles must deploy as team-d/deployer, name another account while the summary
// is being deleted: hooks of charts would run as that account.
func (w *world) attackWithdrawal(tenant client.Client) {
	w.Helper()
	delivery := fleet.FromSveltosCluster(w.pullCluster(tenant, "mine")).DeliveryNamespace
	w.noError(tenant.Create(w.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "content"}, Data: configMap("default", "mine")}))
	profile := &configv1beta1.Profile{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "withdrawn", Labels: accountLabels("team-d", "deployer")},
		Spec: configv1beta1.ProfileSpec{
			ClusterSelector: metav1.LabelSelector{MatchLabels: w.labels()},
			PolicyRefs:      []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Namespace: w.ns, Name: "content"}},
		},
	}
	w.noError(tenant.Create(w.Context(), profile))
	wantGroup := func(action libv1beta1.Action) {
		w.Helper()
		w.eventually("the action of the group is "+string(action), func() error {
			groups := &libv1beta1.ConfigurationGroupList{}
			if err := w.List(w.Context(), groups, client.InNamespace(delivery)); err != nil || len(groups.Items) != 1 {
				return fmt.Errorf("got %d groups, error %w", len(groups.Items), err)
			}
			spec := groups.Items[0].Spec
			if account := spec.ServiceAccountNamespace + "/" + spec.ServiceAccountName; account != "team-d/deployer" {
				w.Fatalf("the action for the agent is %s as %s", spec.Action, account)
			}
			if spec.Action != action {
				return fmt.Errorf("the action for the agent is %s", spec.Action)
			}
			return nil
		})
	}
	wantGroup(libv1beta1.ActionDeploy)
	summaries := &configv1beta1.ClusterSummaryList{}
	w.noError(w.List(w.Context(), summaries, client.InNamespace(w.ns), client.MatchingLabels{configv1beta1.ProfileNameLabel: profile.Name}))
	summary := &summaries.Items[0]

	// A pause of the summary stops the withdrawal, so that the tenant has time to change the labels.
	paused := summary.DeepCopy()
	metav1.SetMetaDataAnnotation(&paused.ObjectMeta, libv1beta1.ProfilePausedAnnotation, "true")
	w.noError(tenant.Patch(w.Context(), paused, client.MergeFrom(summary)))
	w.noError(tenant.Delete(w.Context(), paused))
	change := func(user client.Client, change func(*configv1beta1.ClusterSummary)) error {
		w.noError(w.Get(w.Context(), client.ObjectKeyFromObject(summary), summary))
		changed := summary.DeepCopy()
		change(changed)
		return user.Patch(w.Context(), changed, client.MergeFrom(summary))
	}
	setAccount := func(s *configv1beta1.ClusterSummary) { maps.Copy(s.Labels, accountLabels("kube-system", "admin")) }
	w.awaitForbidden("another account for the withdrawal", "must name a ServiceAccount of namespace team-d", func() error { return change(tenant, setAccount) })

	// The withdrawal also uses the account of the delivery without the policy.
	w.noError(change(w, setAccount))
	w.awaitForbidden("other content of a deleted summary", "must name a ServiceAccount of namespace team-d", func() error {
		return change(tenant, func(s *configv1beta1.ClusterSummary) { s.Spec.ClusterProfileSpec.PolicyRefs = nil })
	})
	w.noError(change(tenant, func(s *configv1beta1.ClusterSummary) { delete(s.Annotations, libv1beta1.ProfilePausedAnnotation) }))
	wantGroup(libv1beta1.ActionRemove)
	// The tenant may still remove the finalizer of a summary that is being deleted.
	w.noError(change(tenant, func(s *configv1beta1.ClusterSummary) { s.Finalizers = nil }))
}

// registerPushCluster registers a control plane as a member in push mode, with all rights.
func (w *world) registerPushCluster(name string, member *localkube.Plane) {
	w.Helper()
	raw, err := os.ReadFile(member.Kubeconfig)
	w.noError(err)
	w.noError(w.Create(w.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: fleet.KubeconfigSecretName(name)}, Data: map[string][]byte{"kubeconfig": raw},
	}))
	w.noError(w.Create(w.Context(), &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name, Labels: w.labels()}}))
	w.awaitReady(name)
}

// registerPullCluster registers a control plane as a cluster of the test in pull mode, and runs its agent.
func (w *world) registerPullCluster(name string, plane *localkube.Plane) {
	w.Helper()
	var manifest bytes.Buffer
	w.noError(join.RegisterPull(w.Context(), w.hub.Config, join.PullRequest{Request: join.Request{Namespace: w.ns, Name: name, Labels: w.labels()}}, &manifest))
	objects, err := kube.DecodeManifest(manifest.Bytes())
	w.noError(err)
	member := w.clientFor(plane.Config)
	for _, obj := range objects {
		// The agent runs in this process: it needs only the Secret with its kubeconfig.
		if obj.GetKind() == "Namespace" || obj.GetKind() == "Secret" {
			w.noError(member.Create(w.Context(), obj))
		}
	}
	ctx, cancel := context.WithCancel(w.Context())
	ended := make(chan error, 1)
	go func() { ended <- agent.Run(ctx, agent.Options{Member: plane.Config, Namespace: w.ns, Name: name}) }()
	w.Cleanup(func() { cancel(); w.noError(<-ended) })
	w.awaitReady(name)
}

// awaitReady waits until a cluster of the test is ready.
func (w *world) awaitReady(name string) {
	w.Helper()
	cluster := &libv1beta1.SveltosCluster{}
	w.eventually("cluster "+name+" is ready", func() error {
		err := w.Get(w.Context(), client.ObjectKey{Namespace: w.ns, Name: name}, cluster)
		if err == nil && !cluster.Status.Ready {
			err = fmt.Errorf("the status is %+v", cluster.Status)
		}
		return err
	})
}

// TestProfileAsServiceAccount: a tenant may write ConfigMaps in one namespace of a shared member. The tenant tries to
// write in other namespaces, to take over another client's object, and to use rights that the ServiceAccount no longer
// has.
func TestProfileAsServiceAccount(t *testing.T) {
	for mode, register := range map[string]func(*world, string, *localkube.Plane){"push": (*world).registerPushCluster, "pull": (*world).registerPullCluster} {
		t.Run(mode, func(t *testing.T) { newWorld(t).attackSharedMember(t, register) })
	}
}

func (w *world) attackSharedMember(t *testing.T, register func(w *world, name string, plane *localkube.Plane)) {
	t.Helper()
	plane := localkube.ForTest(t, localkube.Named("shared"))
	member := w.clientFor(plane.Config)
	const own, foreign = "tenant", "foreign"
	meta := metav1.ObjectMeta{Namespace: own, Name: "deployer"}
	role := &rbacv1.Role{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"create", "patch"}}}}
	theirs := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: own, Name: "theirs"}, Data: map[string]string{"text": "theirs"}}
	for _, obj := range []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: own}}, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: foreign}}, role,
		&rbacv1.RoleBinding{ObjectMeta: meta, Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: own, Name: meta.Name}},
			RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: meta.Name}},
		theirs,
	} {
		w.noError(member.Create(t.Context(), obj))
	}
	register(w, "shared", plane)
	tenant := w.tenant()
	manifest := func(kind, namespace, name string) string {
		return fmt.Sprintf("apiVersion: v1\nkind: %s\nmetadata: {namespace: %s, name: %s}\ndata: {text: bWluZQ==}\n---\n", kind, namespace, name)
	}
	content := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "content"}, Data: map[string]string{"content": manifest("ConfigMap", foreign, "forged")}}
	w.noError(tenant.Create(t.Context(), content))
	profile := &configv1beta1.Profile{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "forged", Labels: accountLabels(own, meta.Name)}, Spec: configv1beta1.ProfileSpec{
		ClusterSelector: metav1.LabelSelector{MatchLabels: w.labels()}, SyncMode: configv1beta1.SyncModeContinuousWithDriftDetection,
		PolicyRefs: []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Namespace: w.ns, Name: "content"}},
	}}
	w.noError(tenant.Create(t.Context(), profile))
	deploy := func(text string) {
		t.Helper()
		content.Data = map[string]string{"content": text}
		w.noError(tenant.Update(t.Context(), content))
	}
	user := "system:serviceaccount:" + own + ":" + meta.Name
	w.awaitFailure("forged", hasTexts(foreign+"/forged", user, "cannot patch resource \"configmaps\""))
	deploy(manifest("Secret", own, "forged"))
	w.awaitFailure("forged", hasTexts(own+"/forged", user, "cannot patch resource \"secrets\""))

	t.Log("objects of others stay, although the tenant may change them; the tenant's objects are corrected with the tenant's rights")
	deploy(manifest("ConfigMap", own, "theirs") + manifest("ConfigMap", own, "mine"))
	text := func(name string) string {
		found := &corev1.ConfigMap{}
		_ = member.Get(t.Context(), client.ObjectKey{Namespace: own, Name: name}, found)
		return found.Data["text"]
	}
	want := func(what, name, value string) {
		t.Helper()
		w.eventually(what, func() error {
			if got := text(name); got != value {
				return fmt.Errorf("%s has text %q, want %q", name, got, value)
			}
			return nil
		})
	}
	want("deployed", "mine", "bWluZQ==")
	role.Rules = nil
	w.noError(member.Update(t.Context(), role))
	w.eventually("the member has revoked the rights", func() error {
		review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User: user, ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: own, Resource: "configmaps", Verb: "patch"},
		}}
		if err := member.Create(t.Context(), review); err != nil || review.Status.Allowed {
			return fmt.Errorf("allowed: %t, error %w", review.Status.Allowed, err)
		}
		return nil
	})
	t.Log("without rights, drift is not corrected")
	mine := &corev1.ConfigMap{}
	w.noError(member.Get(t.Context(), client.ObjectKey{Namespace: own, Name: "mine"}, mine))
	mine.Data["text"] = "drifted"
	w.noError(member.Update(t.Context(), mine))
	w.awaitFailure("forged", hasTexts("ConfigMap "+own+"/mine", user))
	w.noError(tenant.Delete(t.Context(), profile))
	want("what he has created is withdrawn", "mine", "")
	if found := (&corev1.ConfigMap{}); member.Get(t.Context(), client.ObjectKeyFromObject(theirs), found) != nil {
		t.Error("the object of others was deleted")
	}
	if err := member.Get(t.Context(), client.ObjectKey{Namespace: foreign, Name: "forged"}, &corev1.ConfigMap{}); err == nil {
		t.Error("an object in a foreign namespace was created")
	}
}
