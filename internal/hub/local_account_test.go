package hub_test

import (
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/kube"
)

// TestLocalObjectsAreDeletedAsTheirServiceAccount withdraws objects that the hub may read and not delete.
func TestLocalObjectsAreDeletedAsTheirServiceAccount(t *testing.T) {
	w := newPrivateWorld(t)
	config := w.installHub()
	sharedTransport := &routingTransport{tests: map[string]*fakeTransport{w.ns: w.fakeTransport}}
	w.start(config, hub.Options{InstallCRDs: true, CacheDir: t.TempDir(), Transports: map[fleet.Mode]deliver.Transport{fleet.Push: sharedTransport, fleet.Pull: sharedTransport}})
	w.eventually("CRDs", func() error { return w.List(t.Context(), &libv1beta1.SveltosClusterList{}) })
	reader := metav1.ObjectMeta{Name: "reads-limits"}
	w.create(&rbacv1.ClusterRole{ObjectMeta: reader, Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"limitranges"}, Verbs: []string{"get", "list", "watch"}}}})
	w.create(&rbacv1.ClusterRoleBinding{
		ObjectMeta: reader, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: reader.Name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: kube.AgentNamespace, Name: "towline-hub"}},
	})
	deployer := metav1.ObjectMeta{Namespace: w.ns, Name: "deployer"}
	role := &rbacv1.Role{ObjectMeta: deployer, Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"limitranges"}, Verbs: []string{"create", "patch"}}}}
	w.create(&corev1.ServiceAccount{ObjectMeta: deployer})
	w.create(role)
	w.create(&rbacv1.RoleBinding{
		ObjectMeta: deployer, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: deployer.Name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: w.ns, Name: deployer.Name}},
	})

	limits := func(name string) string {
		return "apiVersion: v1\nkind: LimitRange\nmetadata: {namespace: " + w.ns + ", name: " + name + "}\nspec: {limits: [{type: Pod, max: {cpu: 1}}]}\n---\n"
	}
	content := w.createConfigMap("manifests", limits("one")+limits("two"))
	w.createReadyMember("one", w.prodLabels())
	profile := &configv1beta1.Profile{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "limits", Labels: map[string]string{libv1beta1.ServiceAccountNameLabel: deployer.Name}},
		Spec: configv1beta1.ProfileSpec{
			ClusterSelector: metav1.LabelSelector{MatchLabels: w.prodLabels()},
			PolicyRefs:      []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Namespace: w.ns, Name: "manifests", DeploymentType: libv1beta1.DeploymentTypeLocal}},
		},
	}
	w.create(profile)
	w.wantProvisioned(profile, "one")

	t.Log("neither the hub nor the ServiceAccount may delete")
	update(w, content, func(cm *corev1.ConfigMap) { cm.Data = map[string]string{"content": limits("one")} })
	w.eventually("the status has both identities", func() error {
		summary, err := w.getSummary(profile, "one")
		if err != nil {
			return err
		}
		message := summary.Status.FeatureSummaries[0].FailureMessage
		for _, part := range []string{
			`"system:serviceaccount:projectsveltos:towline-hub" cannot delete resource "limitranges"`, `"system:serviceaccount:` + w.ns + `:deployer" cannot delete resource "limitranges"`,
		} {
			if !strings.Contains(message, part) {
				return errors.New(message)
			}
		}
		return nil
	})
	t.Log("the ServiceAccount may delete")
	update(w, role, func(r *rbacv1.Role) { r.Rules[0].Verbs = append(r.Rules[0].Verbs, "delete") })
	w.eventually("deletion of the unwanted object", func() error { return w.checkNotFound(&corev1.LimitRange{}, w.ns, "two") })
	w.wantProvisioned(profile, "one")
	w.must(w.Delete(t.Context(), profile))
	w.eventually("deletion of the other object and of the profile", func() error {
		return errors.Join(w.checkNotFound(&corev1.LimitRange{}, w.ns, "one"), w.checkNotFound(profile, w.ns, profile.Name))
	})
}
