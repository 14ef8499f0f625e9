package register

import (
	"context"
	"fmt"
	"slices"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

// isManaged returns whether a registration created obj. The label is the same as that of Karmada.
func isManaged(obj client.Object) bool { return obj.GetLabels()[clusterv1alpha1.SystemLabel] == "true" }

// checkManaged returns an error if no registration created existing, an object that all agents of a cluster share.
func checkManaged(kind string, existing client.Object) error {
	if !isManaged(existing) {
		return fmt.Errorf("%s %s exists on the cluster and was not made by a registration: remove or rename it", kind, existing.GetName())
	}
	return nil
}

// ensureClusterRole creates the ClusterRole of the agents if it does not exist.
func (m memberClient) ensureClusterRole(ctx context.Context, desired *rbacv1.ClusterRole) error {
	existing := &rbacv1.ClusterRole{}
	found, err := m.get(ctx, client.ObjectKeyFromObject(desired), existing)
	if err != nil {
		return err
	}
	if found {
		return checkManaged("ClusterRole", existing)
	}
	if err := m.Create(ctx, desired, client.FieldOwner(kube.FieldManager)); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("write ClusterRole %s to the cluster: %w", desired.Name, err)
	}
	return nil
}

// isConcurrentWrite returns whether another client wrote an object at the same time.
func isConcurrentWrite(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err)
}

// addBindingSubject adds the agent to the subjects of the ClusterRoleBinding, beside those of other namespaces.
func (m memberClient) addBindingSubject(ctx context.Context, desired *rbacv1.ClusterRoleBinding) error {
	err := kube.RetryOn(ctx, isConcurrentWrite, func() error {
		live := &rbacv1.ClusterRoleBinding{}
		found, err := m.get(ctx, client.ObjectKeyFromObject(desired), live)
		switch {
		case err != nil:
			return err
		case !found:
			return m.Create(ctx, desired.DeepCopy(), client.FieldOwner(kube.FieldManager))
		case slices.Contains(live.Subjects, desired.Subjects[0]):
			return nil
		case live.RoleRef != desired.RoleRef:
			return fmt.Errorf("ClusterRoleBinding %s is about %s %s", live.Name, live.RoleRef.Kind, live.RoleRef.Name)
		}
		if err := checkManaged("ClusterRoleBinding", live); err != nil {
			return err
		}
		live.Subjects = append(live.Subjects, desired.Subjects[0])
		return m.Update(ctx, live, client.FieldOwner(kube.FieldManager))
	})
	if err != nil {
		return fmt.Errorf("bind the agent on the cluster: %w", err)
	}
	return nil
}

// removeBindingSubject removes the agent of one namespace from the ClusterRoleBinding. It deletes a binding without
// subjects.
func (m memberClient) removeBindingSubject(ctx context.Context, subject rbacv1.Subject) error {
	err := kube.RetryOn(ctx, isConcurrentWrite, func() error {
		live := &rbacv1.ClusterRoleBinding{}
		found, err := m.get(ctx, client.ObjectKey{Name: AgentClusterRole}, live)
		if err != nil || !found || !slices.Contains(live.Subjects, subject) {
			return err
		}
		live.Subjects = slices.DeleteFunc(live.Subjects, func(s rbacv1.Subject) bool { return s == subject })
		if len(live.Subjects) == 0 && isManaged(live) {
			return client.IgnoreNotFound(m.Delete(ctx, live, client.Preconditions{UID: &live.UID, ResourceVersion: &live.ResourceVersion}))
		}
		return client.IgnoreNotFound(m.Update(ctx, live, client.FieldOwner(kube.FieldManager)))
	})
	if err != nil {
		return fmt.Errorf("take the agent out of ClusterRoleBinding %s on the cluster: %w", AgentClusterRole, err)
	}
	return nil
}
