package karmada

import (
	"context"
	"errors"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/join/register"
)

// uninstaller removes the agent from its member. The ClusterRole of the registration owns the agent's objects. When it
// is deleted, the garbage collector deletes them all, even if the agent has ended or has no permissions any more.
type uninstaller struct {
	*session.OwnerClient
	opts        Options
	credentials credentialStore
	// agentNamespace is the namespace of the agent. stateObject is the Secret or ConfigMap that has its state.
	agentNamespace string
	stateObject    session.ObjectRef
}

func newUninstaller(o Options, credentials credentialStore) (*uninstaller, error) {
	u := &uninstaller{opts: o, credentials: credentials, agentNamespace: o.ElectNamespace}
	u.stateObject = u.configMap()
	if store, ok := credentials.(secretStore); ok {
		u.agentNamespace = store.namespace
		u.stateObject = session.NewObjectRef(corev1.SchemeGroupVersion.WithResource("secrets"), store.namespace, store.name)
	}
	var err error
	u.OwnerClient, err = session.NewOwnerClient(o.Member, "ClusterRole", register.AgentRole(u.agentNamespace))
	return u, err
}

// role returns the ClusterRole of the registration.
func (u *uninstaller) role() session.ObjectRef {
	return session.NewObjectRef(rbacv1.SchemeGroupVersion.WithResource("clusterroles"), "", u.Name)
}

// objects returns the agent's namespaced objects, which are not foreign in a namespace.
func (u *uninstaller) objects() []session.ObjectRef {
	return []session.ObjectRef{
		session.NewObjectRef(corev1.SchemeGroupVersion.WithResource("serviceaccounts"), u.agentNamespace, register.AgentServiceAccount),
		session.NewObjectRef(corev1.SchemeGroupVersion.WithResource("secrets"), u.agentNamespace, register.KubeconfigSecret),
		session.NewObjectRef(appsv1.SchemeGroupVersion.WithResource("deployments"), u.agentNamespace, register.DefaultAgentDeployment),
		u.lease(), u.stateObject,
	}
}

// lease returns the Lease for the leader election, which the agent has created.
func (u *uninstaller) lease() session.ObjectRef {
	return session.NewObjectRef(coordinationv1.SchemeGroupVersion.WithResource("leases"), u.opts.ElectNamespace, electionName(u.opts.Cluster))
}

// configMap returns the ConfigMap with the state of an agent outside the member.
func (u *uninstaller) configMap() session.ObjectRef {
	return session.NewObjectRef(corev1.SchemeGroupVersion.WithResource("configmaps"), u.opts.ElectNamespace, electionName(u.opts.Cluster))
}

// namespaces returns the namespaces of the agent and of the inventories.
func (u *uninstaller) namespaces() []session.ObjectRef {
	resource := corev1.SchemeGroupVersion.WithResource("namespaces")
	return []session.ObjectRef{session.NewObjectRef(resource, "", u.agentNamespace), session.NewObjectRef(resource, "", u.opts.ClusterNamespace)}
}

// deleteRegistration makes the objects that the agent has created, and the namespaces that nobody else uses, dependents
// of the ClusterRole, and deletes the ClusterRole. Without a registration on the member it deletes only the Lease and
// the ConfigMap of the agent.
func (u *uninstaller) deleteRegistration(ctx context.Context) error {
	role, err := u.Get(ctx, u.role())
	if apierrors.IsNotFound(err) || err == nil && role.Labels[register.RegistrationLabel] != u.opts.Cluster {
		return errors.Join(u.deleteIfExists(ctx, u.lease()), u.deleteIfExists(ctx, u.configMap()))
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", u.role(), err)
	}
	owner := &metav1.OwnerReference{APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: u.Kind, Name: u.Name, UID: role.UID}
	for _, o := range []session.ObjectRef{u.lease(), u.stateObject} {
		if err := u.SetOwner(ctx, o, owner); err != nil {
			return err
		}
	}
	for _, o := range u.namespaces() {
		desired := owner
		if removable, err := u.isRemovable(ctx, o); err != nil || !removable {
			// A namespace that cannot be checked may be used by others.
			desired = nil
		}
		if err := u.SetOwner(ctx, o, desired); err != nil {
			return err
		}
	}
	return u.Delete(ctx, u.role(), role.UID)
}

func (u *uninstaller) deleteIfExists(ctx context.Context, o session.ObjectRef) error {
	live, err := u.Get(ctx, o)
	if err == nil {
		err = u.Delete(ctx, o, live.UID)
	}
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// isRemovable returns whether a namespace exists, was created for this agent, and has no foreign objects.
func (u *uninstaller) isRemovable(ctx context.Context, o session.ObjectRef) (bool, error) {
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
	reason, err := u.ReasonToKeepNamespace(ctx, o.Name, u.objects())
	return reason == "" && err == nil, err
}
