package join

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// defaultAccount is the ServiceAccount that Kubernetes gives every namespace.
const defaultAccount = "default"

// Kept is an object on the hub that a deregistration does not delete: it has the name of an object of the cluster's
// registration, but no registration of Towline created it, and it may have other users.
type Kept struct {
	Ref    kube.Ref
	Reason string
}

// String returns the reason, and the command that deletes the object.
func (k Kept) String() string {
	command := "kubectl delete " + strings.ToLower(k.Ref.Kind) + " " + k.Ref.Name
	if k.Ref.Namespace != "" {
		command += " -n " + k.Ref.Namespace
	}
	return fmt.Sprintf("%s: %s; to delete it: %s", k.Ref, k.Reason, command)
}

// foreignIdentity is the identity of a pull-mode cluster's agent under the names that the sveltosctl of Sveltos gives.
// An object that is not on the hub has no uid.
type foreignIdentity struct {
	request        Request
	account        *corev1.ServiceAccount
	token          *corev1.Secret
	role           *rbacv1.Role
	clusterRole    *rbacv1.ClusterRole
	binding        *rbacv1.RoleBinding
	clusterBinding *rbacv1.ClusterRoleBinding
	// grants are all RoleBindings and ClusterRoleBindings of the hub.
	grants []grant
	// users name what else uses the ServiceAccount or its token.
	users []string
	// unknown says why it is not known who uses the identity, "" if that is known.
	unknown string
}

// decision says why an object stays, "" if it is to be deleted.
type decision struct {
	obj    client.Object
	reason string
}

func newForeignIdentity(r Request) *foreignIdentity {
	clusterWide := r.Namespace + "-" + r.Name
	return &foreignIdentity{
		request:        r,
		account:        &corev1.ServiceAccount{ObjectMeta: named(r.Namespace, r.Name)},
		token:          &corev1.Secret{ObjectMeta: named(r.Namespace, r.Name)},
		role:           &rbacv1.Role{ObjectMeta: named(r.Namespace, r.Name)},
		clusterRole:    &rbacv1.ClusterRole{ObjectMeta: named("", clusterWide)},
		binding:        &rbacv1.RoleBinding{ObjectMeta: named(r.Namespace, r.Name)},
		clusterBinding: &rbacv1.ClusterRoleBinding{ObjectMeta: named("", clusterWide)},
	}
}

func (i *foreignIdentity) objects() []client.Object {
	return []client.Object{i.account, i.token, i.role, i.clusterRole, i.binding, i.clusterBinding}
}

// decide decides on every object that is on the hub, has to do with the cluster, and was not made by Towline. They are
// in the order in which they are deleted. The ServiceAccount is first: without it no credential is worth anything. The
// bindings are last: they tell whose the other objects are, also after an interruption.
func (i *foreignIdentity) decide() []decision {
	all := []decision{
		{i.account, i.accountReason()},
		{i.token, i.tokenReason()},
		{i.role, i.roleReason(i.role, i.role.Rules)},
		{i.clusterRole, i.roleReason(i.clusterRole, i.clusterRole.Rules)},
		{i.binding, i.bindingReason(grantOf(i.binding))},
		{i.clusterBinding, i.bindingReason(clusterGrantOf(i.clusterBinding))},
	}
	if i.unknown != "" {
		for n := range all {
			all[n].reason = "whether something else uses it is not known: " + i.unknown
		}
	}
	return slices.DeleteFunc(all, func(d decision) bool { return !isForeign(d.obj) || i.isUnrelated(d.obj) })
}

// isForeign says whether obj is on the hub and no registration of Towline made it.
func isForeign(obj client.Object) bool {
	return obj.GetUID() != "" && obj.GetLabels()[registrationLabel] == ""
}

// isUnrelated says whether obj only happens to have its name. That of a cluster-wide object can also come from another
// namespace and cluster: the subject of the ClusterRoleBinding tells.
func (i *foreignIdentity) isUnrelated(obj client.Object) bool {
	switch obj {
	case i.account:
		return obj.GetName() == defaultAccount
	case i.clusterBinding:
		return !i.hasAccount(i.clusterBinding.Subjects)
	case i.clusterRole:
		if i.clusterBinding.UID == "" {
			return !isAgentRules(i.clusterRole.Rules)
		}
		return !i.hasAccount(i.clusterBinding.Subjects)
	}
	return false
}

// accountReason returns "" if nothing but the cluster's agent uses the ServiceAccount.
func (i *foreignIdentity) accountReason() string {
	if i.account.Name == defaultAccount {
		return "every namespace has one"
	}
	if owner := otherOwner(i.account, i.request); owner != "" {
		return owner
	}
	for _, g := range i.grants {
		if i.hasAccount(g.subjects) && !i.isAgentBinding(g) {
			return g.String() + " names it"
		}
	}
	if len(i.users) > 0 {
		return i.users[0] + " uses it"
	}
	// A binding of ours says nothing of a ServiceAccount that somebody put in the place of ours.
	bound := isForeign(i.binding) && i.isAgentBinding(grantOf(i.binding)) || i.isAgentBinding(clusterGrantOf(i.clusterBinding))
	if bound || i.holdsToken() {
		return ""
	}
	return "nothing shows that it is the agent's"
}

// tokenReason returns "" if the Secret holds a token of a ServiceAccount that does not stay.
func (i *foreignIdentity) tokenReason() string {
	if owner := otherOwner(i.token, i.request); owner != "" {
		return owner
	}
	if !i.holdsToken() {
		return "it is not for a token of ServiceAccount " + i.request.key()
	}
	if isForeign(i.account) && i.accountReason() != "" {
		return "it is for a token of ServiceAccount " + i.request.key() + ", which stays"
	}
	return ""
}

func (i *foreignIdentity) holdsToken() bool {
	return isForeign(i.token) && i.token.Type == corev1.SecretTypeServiceAccountToken &&
		i.token.Annotations[corev1.ServiceAccountNameKey] == i.request.Name
}

// roleReason returns "" if role is an agent's and no binding grants it that stays.
func (i *foreignIdentity) roleReason(role client.Object, rules []rbacv1.PolicyRule) string {
	if owner := otherOwner(role, i.request); owner != "" {
		return owner
	}
	if !isAgentRules(rules) {
		return "its rules are not those of an agent"
	}
	if role.GetNamespace() == "" && i.clusterBinding.UID == "" {
		return "no ClusterRoleBinding says for which agent it is"
	}
	for _, g := range i.grants {
		if g.binds(role) && (!i.isAgentBinding(g) || isForeign(g) && i.bindingReason(g) != "") {
			return g.String() + " grants it"
		}
	}
	return ""
}

// bindingReason returns "" if g grants the agent's role to the agent's ServiceAccount and does nothing else.
func (i *foreignIdentity) bindingReason(g grant) string {
	if owner := otherOwner(g, i.request); owner != "" {
		return owner
	}
	if !i.isAgentBinding(g) {
		role := strings.TrimSuffix(g.kind, "Binding") + " " + g.GetName()
		return fmt.Sprintf("it does not grant %s, as an agent has it, to ServiceAccount %s", role, i.request.key())
	}
	if len(g.subjects) > 1 {
		return "it has other subjects, too"
	}
	return ""
}

// isAgentBinding says whether g is a binding that a registration gives to the agent, be it Sveltos' or ours.
func (i *foreignIdentity) isAgentBinding(g grant) bool {
	if !i.hasAccount(g.subjects) {
		return false
	}
	switch g.GetUID() {
	case "":
		return false
	case i.binding.UID:
		return g.binds(i.role) && (!isForeign(i.role) || isAgentRules(i.role.Rules))
	case i.clusterBinding.UID:
		return g.binds(i.clusterRole) && (!isForeign(i.clusterRole) || isAgentRules(i.clusterRole.Rules))
	}
	return g.GetLabels()[registrationLabel] == i.request.Name
}

// hasAccount says whether the ServiceAccount is one of subjects.
func (i *foreignIdentity) hasAccount(subjects []rbacv1.Subject) bool {
	return slices.ContainsFunc(subjects, func(s rbacv1.Subject) bool {
		if s.Kind == rbacv1.UserKind {
			return s.Name == "system:serviceaccount:"+i.request.Namespace+":"+i.request.Name
		}
		return s.Kind == rbacv1.ServiceAccountKind && s.Namespace == i.request.Namespace && s.Name == i.request.Name
	})
}

// isAgentRules says whether rules are about kinds of Sveltos only, as those of its agents are.
func isAgentRules(rules []rbacv1.PolicyRule) bool {
	for _, rule := range rules {
		foreign := func(group string) bool { return !strings.HasSuffix(group, ".projectsveltos.io") }
		if len(rule.APIGroups) == 0 || slices.ContainsFunc(rule.APIGroups, foreign) {
			return false
		}
	}
	return len(rules) > 0
}

// otherOwner says whom obj belongs to, "" if that is nobody but the SveltosCluster.
func otherOwner(obj client.Object, r Request) string {
	for _, owner := range obj.GetOwnerReferences() {
		if owner.Kind != libv1beta1.SveltosClusterKind || owner.Name != r.Name {
			return "it belongs to " + owner.Kind + " " + owner.Name
		}
	}
	return ""
}

// grant is a RoleBinding or a ClusterRoleBinding.
type grant struct {
	client.Object
	kind     string
	ref      rbacv1.RoleRef
	subjects []rbacv1.Subject
}

func grantOf(b *rbacv1.RoleBinding) grant { return grant{b, "RoleBinding", b.RoleRef, b.Subjects} }

func clusterGrantOf(b *rbacv1.ClusterRoleBinding) grant {
	return grant{b, "ClusterRoleBinding", b.RoleRef, b.Subjects}
}

func (g grant) String() string {
	return kube.Ref{Kind: g.kind, Namespace: g.GetNamespace(), Name: g.GetName()}.String()
}

// binds says whether g grants role, a Role or a ClusterRole.
func (g grant) binds(role client.Object) bool {
	if role.GetNamespace() == "" {
		return g.ref.Kind == "ClusterRole" && g.ref.Name == role.GetName()
	}
	return g.ref.Kind == "Role" && g.ref.Name == role.GetName() && g.GetNamespace() == role.GetNamespace()
}

// deleteForeign deletes the identity that another party created for the cluster's agent, and records the objects that
// stay.
func (r *retraction) deleteForeign(ctx context.Context) error {
	toDelete, kept, err := r.foreignObjects(ctx)
	if err != nil {
		return err
	}
	r.done.Kept = kept
	for _, obj := range toDelete {
		if err := r.deleteObject(ctx, obj); err != nil {
			return err
		}
	}
	return nil
}

// foreignObjects reads the objects of other parties that have the names of a registration.
func (r *retraction) foreignObjects(ctx context.Context) (toDelete []client.Object, kept []Kept, err error) {
	identity, err := r.foreignIdentity(ctx)
	if err != nil {
		return nil, nil, err
	}
	decisions := identity.decide()
	// A Secret with the hub's credentials for the cluster, or its certificate authority, may have other users.
	for _, name := range []string{r.kubeconfigSecret(), AuthoritySecret(r.request.Name)} {
		secret := &corev1.Secret{}
		if _, err := read(ctx, r.hub, secret, client.ObjectKey{Namespace: r.request.Namespace, Name: name}); err != nil {
			return nil, nil, err
		}
		if !isForeign(secret) {
			continue
		}
		reason := "Towline did not make it"
		users, err := r.clustersUsing(ctx, name)
		if err != nil && !apierrors.IsForbidden(err) {
			return nil, nil, err
		}
		if len(users) > 0 {
			reason = users[0] + " uses it, too"
		}
		decisions = append(decisions, decision{secret, reason})
	}
	for _, d := range decisions {
		if d.reason == "" {
			toDelete = append(toDelete, d.obj)
			continue
		}
		kept = append(kept, Kept{Ref: refOf(r.hub, d.obj), Reason: d.reason})
	}
	return toDelete, kept, nil
}

// foreignIdentity reads the identity that another party created for the cluster's agent, and its users.
func (r *retraction) foreignIdentity(ctx context.Context) (*foreignIdentity, error) {
	identity := newForeignIdentity(r.request)
	if !r.cluster.Spec.PullMode {
		return identity, nil
	}
	exists := false
	for _, obj := range identity.objects() {
		_, err := read(ctx, r.hub, obj, client.ObjectKeyFromObject(obj))
		if apierrors.IsForbidden(err) {
			identity.unknown = err.Error()
			continue
		}
		if err != nil {
			return nil, err
		}
		exists = exists || isForeign(obj)
	}
	if !exists {
		return identity, nil
	}
	err := r.readUsers(ctx, identity)
	if apierrors.IsForbidden(err) {
		identity.unknown, err = err.Error(), nil
	}
	return identity, err
}

// readUsers reads the users of the identity.
func (r *retraction) readUsers(ctx context.Context, identity *foreignIdentity) error {
	var bindings rbacv1.RoleBindingList
	if err := r.hub.List(ctx, &bindings); err != nil {
		return fmt.Errorf("list RoleBindings: %w", err)
	}
	for n := range bindings.Items {
		identity.grants = append(identity.grants, grantOf(&bindings.Items[n]))
	}
	var clusterBindings rbacv1.ClusterRoleBindingList
	if err := r.hub.List(ctx, &clusterBindings); err != nil {
		return fmt.Errorf("list ClusterRoleBindings: %w", err)
	}
	for n := range clusterBindings.Items {
		identity.grants = append(identity.grants, clusterGrantOf(&clusterBindings.Items[n]))
	}
	clusters, err := r.clustersUsing(ctx, r.request.Name)
	if err != nil {
		return err
	}
	workloads, err := r.workloads(ctx)
	identity.users = slices.Concat(clusters, workloads)
	return err
}

// clustersUsing returns the names of the other clusters whose kubeconfig is in this Secret of the cluster's namespace.
func (r *retraction) clustersUsing(ctx context.Context, secret string) ([]string, error) {
	var clusters libv1beta1.SveltosClusterList
	if err := r.hub.List(ctx, &clusters, client.InNamespace(r.request.Namespace)); err != nil {
		return nil, fmt.Errorf("list SveltosClusters in namespace %s: %w", r.request.Namespace, err)
	}
	var users []string
	for n := range clusters.Items {
		if other := &clusters.Items[n]; other.Name != r.request.Name && other.Spec.KubeconfigName == secret {
			users = append(users, "SveltosCluster "+client.ObjectKeyFromObject(other).String())
		}
	}
	return users, nil
}

// workloads returns the names of the workloads that use the ServiceAccount.
func (r *retraction) workloads(ctx context.Context) ([]string, error) {
	var users []string
	for _, kind := range []schema.GroupVersionKind{
		{Group: "apps", Version: "v1", Kind: "Deployment"}, {Group: "apps", Version: "v1", Kind: "StatefulSet"},
		{Group: "apps", Version: "v1", Kind: "DaemonSet"}, {Group: "batch", Version: "v1", Kind: "CronJob"},
		{Group: "batch", Version: "v1", Kind: "Job"}, {Version: "v1", Kind: "Pod"},
	} {
		path := []string{"spec", "template", "spec", "serviceAccountName"}
		switch kind.Kind {
		case "CronJob":
			path = slices.Concat([]string{"spec", "jobTemplate"}, path)
		case "Pod":
			path = []string{"spec", "serviceAccountName"}
		}
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
		if err := r.hub.List(ctx, list, client.InNamespace(r.request.Namespace)); err != nil {
			return nil, fmt.Errorf("list %ss in namespace %s: %w", kind.Kind, r.request.Namespace, err)
		}
		for n := range list.Items {
			if account, _, _ := unstructured.NestedString(list.Items[n].Object, path...); account == r.request.Name {
				users = append(users, kube.RefOf(&list.Items[n]).String())
			}
		}
	}
	return users, nil
}
