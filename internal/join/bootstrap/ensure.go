package bootstrap

import (
	"context"
	"maps"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/join/rollback"
)

// ensureObject creates obj on the hub or corrects it. It replaces a binding to another role, since the API server does
// not change the role of a binding.
func ensureObject(ctx context.Context, hub client.Client, obj client.Object) error {
	labels := systemLabels()
	maps.Copy(labels, obj.GetLabels())
	obj.SetLabels(labels)
	log := rollback.New(hub, "")
	_, _, err := log.Apply(ctx, obj, nil)
	_, isClusterBinding := obj.(*rbacv1.ClusterRoleBinding)
	_, isBinding := obj.(*rbacv1.RoleBinding)
	if apierrors.IsInvalid(err) && (isBinding || isClusterBinding) {
		if _, err := log.Delete(ctx, obj); err != nil {
			return err
		}
		_, _, err = log.Apply(ctx, obj, nil)
	}
	return err
}
