package join

import (
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// sharedRole is the Role in kube.AgentNamespace that lets agents read a bundle whose name they know. It names no
// bundle: the names are HMACs, and an agent without the verbs list and watch cannot find a name that the hub has not
// sent to it.
const sharedRole = "towline-shared-bundles"

// AnchorSecret returns the name of the Secret, beside the SveltosCluster, that the tokens of the cluster's agent are
// bound to: they are invalid after it is deleted. It has no data.
func AnchorSecret(cluster string) string { return cluster + anchorSuffix }

const anchorSuffix = "-sveltos-agent"

// RegistrationSecret returns the name of the Secret, beside the SveltosCluster, that the tokens of the cluster's
// manifests are bound to. While the cluster waits for its agent the hub keeps a manifest in it, under ManifestKey.
func RegistrationSecret(cluster string) string { return cluster + "-sveltos-registration" }

// identityObjects returns the objects of an agent's identity on the hub, in the order of their creation.
func identityObjects(r Request, delivery string) []client.Object {
	account := &corev1.ServiceAccount{ObjectMeta: named(r.Namespace, r.Name)}
	// The agent writes its spec.
	lease := &coordinationv1.Lease{ObjectMeta: named(delivery, r.Name)}
	anchor := &corev1.Secret{ObjectMeta: named(r.Namespace, AnchorSecret(r.Name))}
	objects := []client.Object{account, anchor, lease}
	own, deliveryRules := ownRules(r), deliveryNamespaceRules(r)
	if delivery == r.Namespace {
		objects = append(objects, role(r.Namespace, r.Name, append(own, deliveryRules...)), binding(r, r.Namespace, r.Name, r.Name))
	} else {
		objects = append(objects, role(r.Namespace, r.Name, own), binding(r, r.Namespace, r.Name, r.Name),
			role(delivery, r.Name, deliveryRules), binding(r, delivery, r.Name, r.Name))
	}
	return append(objects, binding(r, kube.AgentNamespace, sharedBinding(r), sharedRole))
}

// sharedBinding returns the name of a cluster's RoleBinding in kube.AgentNamespace. DNS labels have no colon, so that
// the names of two clusters differ.
func sharedBinding(r Request) string { return r.Namespace + ":" + r.Name }

// ownRules are for the objects with the cluster's name in the cluster's namespace.
func ownRules(r Request) []rbacv1.PolicyRule {
	self := []string{r.Name}
	return []rbacv1.PolicyRule{
		{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"sveltosclusters"}, ResourceNames: self, Verbs: []string{"get", "list", "watch"}},
		{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"sveltosclusters/status"}, ResourceNames: self, Verbs: []string{"patch"}},
		{APIGroups: []string{""}, Resources: []string{"serviceaccounts/token"}, ResourceNames: self, Verbs: []string{"create"}},
	}
}

// deliveryNamespaceRules are for the delivery namespace, which has no objects of other clusters.
func deliveryNamespaceRules(r Request) []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"configurationgroups"}, Verbs: []string{"get", "list", "watch"}},
		{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"configurationgroups/status"}, Verbs: []string{"patch"}},
		{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"configurationbundles"}, Verbs: []string{"get"}},
		{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, ResourceNames: []string{r.Name}, Verbs: []string{"get", "update", "patch"}},
	}
}

func sharedRules() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"configurationbundles"}, Verbs: []string{"get"}},
	}
}

func role(namespace, name string, rules []rbacv1.PolicyRule) *rbacv1.Role {
	return &rbacv1.Role{ObjectMeta: named(namespace, name), Rules: rules}
}

// binding gives the agent of r the Role roleName in namespace.
func binding(r Request, namespace, name, roleName string) *rbacv1.RoleBinding {
	return &rbacv1.RoleBinding{
		ObjectMeta: named(namespace, name),
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: roleName},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: r.Namespace, Name: r.Name}},
	}
}

func named(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name}
}
