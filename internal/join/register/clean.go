package register

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// clean removes from the cluster what the registration made, the way to the control plane last: with it, another run
// knows what to do. An agent that was told to go does the same, so anything may be gone already.
func (u *unregistration) clean(ctx context.Context) error {
	if u.there.empty() {
		return nil
	}
	steps := []func(context.Context) error{
		u.cleanDeployment,
		func(ctx context.Context) error {
			return u.member.removeLease(ctx, u.request.Namespace, u.request.ClusterName)
		},
		func(ctx context.Context) error { return u.member.unbind(ctx, subject(u.request.Namespace)) },
		u.cleanRole,
		func(ctx context.Context) error {
			if u.there.account == nil {
				return nil
			}
			return u.remove(ctx, "ServiceAccount", u.there.account)
		},
		u.cleanNamespaces,
		func(ctx context.Context) error {
			if u.there.secret == nil {
				return nil
			}
			return u.remove(ctx, "Secret", u.there.secret)
		},
	}
	for _, step := range steps {
		if err := step(ctx); err != nil {
			return err
		}
	}
	u.request.Progress(fmt.Sprintf("Successfully unregister cluster (%s) from control plane.", u.request.ClusterName))
	return nil
}

// remove deletes exactly the object that was found.
func (u *unregistration) remove(ctx context.Context, kind string, found client.Object) error {
	uid := found.GetUID()
	err := u.member.Delete(ctx, found.DeepCopyObject().(client.Object), client.Preconditions{UID: &uid}, client.PropagationPolicy("Background"))
	switch {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return nil
	case err != nil:
		return fmt.Errorf("delete %s %s/%s on the cluster: %w", kind, found.GetNamespace(), found.GetName(), err)
	}
	u.request.Progress(fmt.Sprintf("Successfully delete %s (%s/%s) from the cluster.", kind, found.GetNamespace(), found.GetName()))
	return nil
}

// cleanDeployment deletes the Deployment and waits until the agent is gone, which still has its rights then. One that
// hangs is left to its cluster.
func (u *unregistration) cleanDeployment(ctx context.Context) error {
	if u.there.deployment == nil {
		return nil
	}
	if err := u.remove(ctx, "Deployment", u.there.deployment); err != nil {
		return err
	}
	if !u.member.awaitPods(ctx, u.request.Namespace) && ctx.Err() == nil {
		u.request.Progress("the agent's pods are still there; the cluster removes them")
	}
	return nil
}

// cleanRole deletes the ClusterRole of the agents if there is no other agent.
func (u *unregistration) cleanRole(ctx context.Context) error {
	role := &rbacv1.ClusterRole{}
	found, err := u.member.find(ctx, client.ObjectKey{Name: AgentRole}, role)
	if err != nil || !found || !madeHere(role) {
		return err
	}
	if others, err := u.member.bound(ctx); others || err != nil {
		return err
	}
	return u.remove(ctx, "ClusterRole", role)
}

// cleanNamespaces deletes the agent's namespace if the registration made it, and that of its records if an agent did,
// unless anything else is there.
func (u *unregistration) cleanNamespaces(ctx context.Context) error {
	namespace := &corev1.Namespace{}
	found, err := u.member.find(ctx, client.ObjectKey{Name: u.request.Namespace}, namespace)
	if err != nil {
		return err
	}
	if found && ownNamespace(namespace, u.request.ClusterName) {
		if err := u.member.removeNamespace(ctx, namespace); err != nil {
			return err
		}
	}
	return u.member.removeRecords(ctx, u.request.ClusterNamespace)
}
