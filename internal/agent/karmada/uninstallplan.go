package karmada

import (
	"context"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/join/register"
	"github.com/towline/towline/internal/kube"
)

const (
	// uninstallRole is the name of the Role and RoleBinding that let an agent which shares its ClusterRole finish its
	// uninstallation without it.
	uninstallRole = "karmada-agent-leaving"
	// hubAnnotationPrefix begins the annotations of a namespace that push-mode registrations use.
	hubAnnotationPrefix = "hub.towline.dev/"
)

// The methods of an uninstallation. All end with the deletion of the objects in the plan.
const (
	// deleteRole: the agent has its own ClusterRole, and all its objects are dependents of that.
	deleteRole = iota
	// deleteAccount: other agents of the member use the ClusterRole. The objects are dependents of the ServiceAccount,
	// or are in a namespace that is deleted.
	deleteAccount
	// deleteEach: the agent runs outside the member and keeps its permissions, so it deletes each object.
	deleteEach
)

// uninstaller removes the agent from its member. It first makes the agent's objects dependents of one object. The
// deletion of that object then removes them all, although it removes the agent's permissions too and the agent may end.
type uninstaller struct {
	opts        Options
	member      kubernetes.Interface
	credentials credentialStore
	// roleOwner and accountOwner set the ClusterRole or the ServiceAccount of the agent as owner.
	roleOwner, accountOwner *session.OwnerClient
	// agentNamespace is the namespace of the agent, and stateObject the Secret or ConfigMap that has its state.
	agentNamespace string
	stateObject    session.Object
}

func newUninstaller(o Options, member kubernetes.Interface, credentials credentialStore) (*uninstaller, error) {
	u := &uninstaller{opts: o, member: member, credentials: credentials, agentNamespace: o.ElectNamespace}
	u.stateObject = session.NewObject(corev1.SchemeGroupVersion.WithResource("configmaps"), o.ElectNamespace, electionName(o.Cluster))
	if store, ok := credentials.(secretStore); ok {
		u.agentNamespace = store.namespace
		u.stateObject = session.NewObject(corev1.SchemeGroupVersion.WithResource("secrets"), store.namespace, store.name)
	}
	var err error
	if u.roleOwner, err = session.NewOwnerClient(o.Member, "ClusterRole", register.AgentRole); err != nil {
		return nil, err
	}
	u.accountOwner, err = session.NewOwnerClient(o.Member, rbacv1.ServiceAccountKind, register.AgentAccount)
	return u, err
}

// dependents returns the agent's namespaced objects without the state object.
func (u *uninstaller) dependents() []session.Object {
	return []session.Object{
		u.serviceAccount(),
		session.NewObject(appsv1.SchemeGroupVersion.WithResource("deployments"), u.agentNamespace, register.DefaultAgentName),
		session.NewObject(coordinationv1.SchemeGroupVersion.WithResource("leases"), u.opts.ElectNamespace, electionName(u.opts.Cluster)),
	}
}

func (u *uninstaller) serviceAccount() session.Object {
	return session.NewObject(corev1.SchemeGroupVersion.WithResource("serviceaccounts"), u.agentNamespace, register.AgentAccount)
}

func (u *uninstaller) clusterRole() session.Object {
	return session.NewObject(rbacv1.SchemeGroupVersion.WithResource("clusterroles"), "", register.AgentRole)
}

func (u *uninstaller) binding() session.Object {
	return session.NewObject(rbacv1.SchemeGroupVersion.WithResource("clusterrolebindings"), "", register.AgentRole)
}

// namespaceObject is the agent's namespace, and inventoryObject the namespace of the inventories.
func (u *uninstaller) namespaceObject() session.Object {
	return session.NewObject(corev1.SchemeGroupVersion.WithResource("namespaces"), "", u.agentNamespace)
}

func (u *uninstaller) inventoryObject() session.Object {
	return session.NewObject(corev1.SchemeGroupVersion.WithResource("namespaces"), "", u.opts.ClusterNamespace)
}

// deletion is an object to delete.
type deletion struct {
	session.Object
	uid types.UID
}

// uninstallPlan describes an uninstallation.
type uninstallPlan struct {
	method int
	// deletions are the objects to delete, in this order. After the first deletion the agent may have no permissions
	// left.
	deletions []deletion
}

// plan decides how to uninstall the agent.
func (u *uninstaller) plan(ctx context.Context) (uninstallPlan, error) {
	binding, err := u.member.RbacV1().ClusterRoleBindings().Get(ctx, register.AgentRole, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err) {
		return uninstallPlan{}, fmt.Errorf("read ClusterRoleBinding %s: %w", register.AgentRole, err)
	}
	if err == nil && len(binding.Subjects) == 1 && u.isAgent(binding.Subjects[0]) {
		role, err := u.ensureOwnRole(ctx)
		return uninstallPlan{deleteRole, []deletion{role}}, err
	}
	account, accountErr := u.roleOwner.Get(ctx, u.serviceAccount())
	switch {
	case accountErr == nil:
		p := uninstallPlan{deleteAccount, []deletion{{u.serviceAccount(), account.UID}}}
		if namespace, ok, err := u.findRemovable(ctx, u.namespaceObject()); err == nil && ok {
			p.deletions = []deletion{namespace}
		}
		return p, nil
	case !apierrors.IsNotFound(accountErr):
		return uninstallPlan{}, fmt.Errorf("read %s: %w", u.serviceAccount(), accountErr)
	}
	return u.planEach(ctx)
}

func (u *uninstaller) planEach(ctx context.Context) (uninstallPlan, error) {
	p := uninstallPlan{method: deleteEach}
	for _, o := range append(u.dependents(), u.stateObject) {
		live, err := u.roleOwner.Get(ctx, o)
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return p, fmt.Errorf("read %s: %w", o, err)
		}
		p.deletions = append(p.deletions, deletion{o, live.UID})
	}
	// The state object is deleted last, because it records the uninstallation. Only its namespace may follow.
	for _, o := range []session.Object{u.inventoryObject(), u.namespaceObject()} {
		found, ok, err := u.findRemovable(ctx, o)
		if err != nil {
			return p, err
		}
		if ok {
			p.deletions = slices.Insert(p.deletions, max(len(p.deletions)-1, 0), found)
		}
	}
	return p, nil
}

func (u *uninstaller) isAgent(subject rbacv1.Subject) bool {
	return subject.Kind == rbacv1.ServiceAccountKind && subject.Namespace == u.agentNamespace && subject.Name == register.AgentAccount
}

// ensureOwnRole returns the agent's ClusterRole. If it was deleted, it creates one without rules.
func (u *uninstaller) ensureOwnRole(ctx context.Context) (deletion, error) {
	roles := u.member.RbacV1().ClusterRoles()
	role, err := roles.Get(ctx, register.AgentRole, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		role, err = roles.Create(ctx, &rbacv1.ClusterRole{ObjectMeta: u.newMeta(register.AgentRole)}, metav1.CreateOptions{FieldManager: kube.FieldManager})
	}
	if err != nil {
		return deletion{}, fmt.Errorf("read ClusterRole %s: %w", register.AgentRole, err)
	}
	return deletion{u.clusterRole(), role.UID}, nil
}

// setOwners makes the agent's objects dependents of the first object in the plan.
func (u *uninstaller) setOwners(ctx context.Context, p uninstallPlan) error {
	switch p.method {
	case deleteRole:
		return u.setRoleAsOwner(ctx, p.deletions[0].uid)
	case deleteAccount:
		account, err := u.roleOwner.Get(ctx, u.serviceAccount())
		if err != nil {
			return fmt.Errorf("read %s: %w", u.serviceAccount(), err)
		}
		return u.setAccountAsOwner(ctx, &metav1.OwnerReference{
			APIVersion: "v1", Kind: rbacv1.ServiceAccountKind, Name: register.AgentAccount, UID: account.UID,
		})
	}
	return nil
}

func (u *uninstaller) setRoleAsOwner(ctx context.Context, uid types.UID) error {
	owner := &metav1.OwnerReference{APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: "ClusterRole", Name: register.AgentRole, UID: uid}
	for _, o := range append(u.dependents(), u.binding(), u.stateObject) {
		if err := u.roleOwner.SetOwner(ctx, o, owner); err != nil {
			return err
		}
	}
	for _, o := range []session.Object{u.namespaceObject(), u.inventoryObject()} {
		desired := owner
		if _, ok, err := u.findRemovable(ctx, o); err != nil || !ok {
			// A namespace that cannot be checked may be used by others.
			desired = nil
		}
		if err := u.roleOwner.SetOwner(ctx, o, desired); err != nil {
			return err
		}
	}
	return nil
}

// setAccountAsOwner makes the objects in the agent's namespace dependents of its ServiceAccount. The ServiceAccount
// keeps its permissions in that namespace to the end.
func (u *uninstaller) setAccountAsOwner(ctx context.Context, owner *metav1.OwnerReference) error {
	meta := u.newMeta(uninstallRole)
	meta.Namespace, meta.OwnerReferences = u.agentNamespace, []metav1.OwnerReference{*owner}
	rbac, create := u.member.RbacV1(), metav1.CreateOptions{FieldManager: kube.FieldManager}
	_, err := rbac.Roles(u.agentNamespace).Create(ctx, &rbacv1.Role{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{rbacv1.APIGroupAll}, Resources: []string{rbacv1.ResourceAll}, Verbs: []string{rbacv1.VerbAll}},
	}}, create)
	if err == nil || apierrors.IsAlreadyExists(err) {
		_, err = rbac.RoleBindings(u.agentNamespace).Create(ctx, &rbacv1.RoleBinding{
			ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: uninstallRole},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: u.agentNamespace, Name: register.AgentAccount}},
		}, create)
	}
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create Role %s/%s: %w", u.agentNamespace, uninstallRole, err)
	}
	for _, o := range append(u.dependents(), u.stateObject) {
		if o == u.serviceAccount() || o.Namespace != u.agentNamespace {
			continue
		}
		if err := u.accountOwner.SetOwner(ctx, o, owner); err != nil {
			return err
		}
	}
	return nil
}

// removeFromBinding removes the agent from the shared ClusterRoleBinding. Without the permission to read it, the agent
// was removed before.
func (u *uninstaller) removeFromBinding(ctx context.Context) error {
	bindings := u.member.RbacV1().ClusterRoleBindings()
	err := kube.RetryOnConflict(ctx, func() error {
		binding, err := bindings.Get(ctx, register.AgentRole, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(binding.Subjects, u.isAgent) {
			return nil
		}
		binding.Subjects = slices.DeleteFunc(binding.Subjects, u.isAgent)
		_, err = bindings.Update(ctx, binding, metav1.UpdateOptions{FieldManager: kube.FieldManager})
		return err
	})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err) {
		return fmt.Errorf("remove the agent from ClusterRoleBinding %s: %w", register.AgentRole, err)
	}
	return nil
}

func (u *uninstaller) deleteUninstallRole(ctx context.Context) error {
	rbac := u.member.RbacV1()
	for _, err := range []error{
		rbac.RoleBindings(u.agentNamespace).Delete(ctx, uninstallRole, metav1.DeleteOptions{}), rbac.Roles(u.agentNamespace).Delete(ctx, uninstallRole, metav1.DeleteOptions{}),
	} {
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete Role %s/%s: %w", u.agentNamespace, uninstallRole, err)
		}
	}
	return nil
}

// findRemovable returns the deletion of a namespace, and true if the namespace was created for this agent and has no
// foreign objects.
func (u *uninstaller) findRemovable(ctx context.Context, o session.Object) (deletion, bool, error) {
	live, err := u.roleOwner.Get(ctx, o)
	if apierrors.IsNotFound(err) {
		return deletion{}, false, nil
	}
	if err != nil {
		return deletion{}, false, fmt.Errorf("read %s: %w", o, err)
	}
	if cluster := live.Labels[register.RegistrationLabel]; live.Labels[clusterv1alpha1.SystemLabel] != "true" || (cluster != "" && cluster != u.opts.Cluster) {
		return deletion{}, false, nil
	}
	for key := range live.Annotations {
		if strings.HasPrefix(key, hubAnnotationPrefix) {
			return deletion{}, false, nil
		}
	}
	expected := map[string]bool{"roles.rbac.authorization.k8s.io/" + uninstallRole: true, "rolebindings.rbac.authorization.k8s.io/" + uninstallRole: true}
	for _, object := range append(u.dependents(), u.stateObject) {
		if object.Namespace == o.Name {
			expected[object.Resource.GroupResource().String()+"/"+object.Name] = true
		}
	}
	check := session.NamespaceCheck{Discovery: u.member.Discovery(), Objects: u.roleOwner.Metadata, Namespace: o.Name, Expected: expected}
	foreign, err := check.FindForeignObject(ctx)
	return deletion{o, live.UID}, foreign == "" && err == nil, err
}

// newMeta returns the metadata of the objects that an uninstallation creates.
func (u *uninstaller) newMeta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: name, Labels: map[string]string{clusterv1alpha1.SystemLabel: "true", register.RegistrationLabel: u.opts.Cluster}}
}
