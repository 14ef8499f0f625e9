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
	"k8s.io/client-go/kubernetes"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/join/register"
	"github.com/towline/towline/internal/kube"
)

// hubAnnotationPrefix begins the annotations of a namespace that push-mode registrations use.
const hubAnnotationPrefix = "hub.towline.dev/"

// uninstaller removes the agent from its member. It first makes the agent's objects dependents of a ClusterRole that it
// creates for that. The deletion of the ClusterRole then removes them all, although it removes the agent's permissions
// too and the agent may end. Until then the ClusterRole gives the agent all permissions: the ClusterRole of its
// registration may be deleted, or belong to other agents of the member.
type uninstaller struct {
	*session.OwnerClient
	opts        Options
	member      kubernetes.Interface
	credentials credentialStore
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
	u.OwnerClient, err = session.NewOwnerClient(o.Member, "ClusterRole", register.UninstallClusterRole(u.agentNamespace, o.Cluster))
	return u, err
}

// objects returns the agent's namespaced objects.
func (u *uninstaller) objects() []session.Object {
	return []session.Object{
		session.NewObject(corev1.SchemeGroupVersion.WithResource("serviceaccounts"), u.agentNamespace, register.AgentServiceAccount),
		session.NewObject(appsv1.SchemeGroupVersion.WithResource("deployments"), u.agentNamespace, register.DefaultAgentDeployment),
		session.NewObject(coordinationv1.SchemeGroupVersion.WithResource("leases"), u.opts.ElectNamespace, electionName(u.opts.Cluster)),
		u.stateObject,
	}
}

// roles returns the ClusterRole and the ClusterRoleBinding of the registration, which agents of a member may share.
func roles() []session.Object {
	return []session.Object{
		session.NewObject(rbacv1.SchemeGroupVersion.WithResource("clusterroles"), "", register.AgentClusterRole),
		session.NewObject(rbacv1.SchemeGroupVersion.WithResource("clusterrolebindings"), "", register.AgentClusterRole),
	}
}

// namespaces returns the namespaces of the agent and of the inventories.
func (u *uninstaller) namespaces() []session.Object {
	resource := corev1.SchemeGroupVersion.WithResource("namespaces")
	return []session.Object{session.NewObject(resource, "", u.agentNamespace), session.NewObject(resource, "", u.opts.ClusterNamespace)}
}

// setOwners makes the agent's objects dependents of the ClusterRole for the uninstallation, and returns its reference.
func (u *uninstaller) setOwners(ctx context.Context) (*metav1.OwnerReference, error) {
	owner, err := u.ensureOwner(ctx)
	if err != nil {
		return nil, err
	}
	for _, o := range u.objects() {
		if err := u.SetOwner(ctx, o, owner); err != nil {
			return nil, err
		}
	}
	if err := u.setRolesOwner(ctx, owner); err != nil {
		return nil, err
	}
	for _, o := range u.namespaces() {
		desired := owner
		if removable, err := u.isRemovable(ctx, o); err != nil || !removable {
			// A namespace that cannot be checked may be used by others.
			desired = nil
		}
		if err := u.SetOwner(ctx, o, desired); err != nil {
			return nil, err
		}
	}
	return owner, nil
}

// setRolesOwner makes owner the owner of roles, unless other agents use them.
func (u *uninstaller) setRolesOwner(ctx context.Context, owner *metav1.OwnerReference) error {
	binding, err := u.member.RbacV1().ClusterRoleBindings().Get(ctx, register.AgentClusterRole, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read ClusterRoleBinding %s: %w", register.AgentClusterRole, err)
	}
	if len(binding.Subjects) != 1 || !u.isAgent(binding.Subjects[0]) {
		// Another agent may have been bound since the preparation.
		owner = nil
	}
	for _, o := range roles() {
		if err := u.SetOwner(ctx, o, owner); err != nil {
			return err
		}
	}
	return nil
}

// ensureOwner creates the ClusterRole for the uninstallation, and binds it to the agent.
func (u *uninstaller) ensureOwner(ctx context.Context) (*metav1.OwnerReference, error) {
	meta := metav1.ObjectMeta{Name: u.Name, Labels: map[string]string{
		clusterv1alpha1.SystemLabel: "true", register.RegistrationLabel: u.opts.Cluster,
	}}
	rbac, create := u.member.RbacV1(), metav1.CreateOptions{FieldManager: kube.FieldManager}
	role, err := rbac.ClusterRoles().Get(ctx, u.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		role, err = rbac.ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{rbacv1.APIGroupAll}, Resources: []string{rbacv1.ResourceAll}, Verbs: []string{rbacv1.VerbAll}},
		}}, create)
	}
	if err != nil {
		return nil, fmt.Errorf("create ClusterRole %s: %w", u.Name, err)
	}
	owner := metav1.OwnerReference{APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: u.Kind, Name: u.Name, UID: role.UID}
	meta.OwnerReferences = []metav1.OwnerReference{owner}
	_, err = rbac.ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: u.Kind, Name: u.Name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: u.agentNamespace, Name: register.AgentServiceAccount}},
	}, create)
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, fmt.Errorf("create ClusterRoleBinding %s: %w", u.Name, err)
	}
	// It may be a dependent of the ClusterRole of an earlier uninstallation.
	return &owner, u.SetOwner(ctx, session.NewObject(rbacv1.SchemeGroupVersion.WithResource("clusterrolebindings"), "", u.Name), &owner)
}

func (u *uninstaller) isAgent(subject rbacv1.Subject) bool {
	return subject.Kind == rbacv1.ServiceAccountKind && subject.Namespace == u.agentNamespace && subject.Name == register.AgentServiceAccount
}

// removeFromBinding removes the agent from a ClusterRoleBinding that other agents share.
func (u *uninstaller) removeFromBinding(ctx context.Context) error {
	bindings := u.member.RbacV1().ClusterRoleBindings()
	err := kube.RetryOnConflict(ctx, func() error {
		binding, err := bindings.Get(ctx, register.AgentClusterRole, metav1.GetOptions{})
		if err != nil || len(binding.Subjects) < 2 || !slices.ContainsFunc(binding.Subjects, u.isAgent) {
			return err
		}
		binding.Subjects = slices.DeleteFunc(binding.Subjects, u.isAgent)
		_, err = bindings.Update(ctx, binding, metav1.UpdateOptions{FieldManager: kube.FieldManager})
		return err
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("remove the agent from ClusterRoleBinding %s: %w", register.AgentClusterRole, err)
	}
	return nil
}

// isRemovable returns whether a namespace was created for this agent and has no foreign objects.
func (u *uninstaller) isRemovable(ctx context.Context, o session.Object) (bool, error) {
	live, err := u.Get(ctx, o)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read %s: %w", o, err)
	}
	if cluster := live.Labels[register.RegistrationLabel]; live.Labels[clusterv1alpha1.SystemLabel] != "true" || (cluster != "" && cluster != u.opts.Cluster) {
		return false, nil
	}
	for key := range live.Annotations {
		if strings.HasPrefix(key, hubAnnotationPrefix) {
			return false, nil
		}
	}
	foreign, err := u.FindForeignObject(ctx, o.Name, u.objects())
	return foreign == "" && err == nil, err
}
