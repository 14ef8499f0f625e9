package bootstrap

import (
	"context"
	"fmt"
	"maps"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	"github.com/towline/towline/internal/kube"
)

// ensure makes obj what it is to be on the hub. A binding to another role is made anew, for its role cannot be changed.
func ensure(ctx context.Context, hub client.Client, obj client.Object) error {
	gvk, err := apiutil.GVKForObject(obj, hub.Scheme())
	if err != nil {
		return fmt.Errorf("prepare %T: %w", obj, err)
	}
	labels := systemLabels()
	maps.Copy(labels, obj.GetLabels())
	obj.SetLabels(labels)
	if err := replaceOther(ctx, hub, obj); err != nil {
		return err
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(obj)
	if err != nil {
		return fmt.Errorf("encode %s %s: %w", gvk.Kind, obj.GetName(), err)
	}
	desired := &unstructured.Unstructured{Object: content}
	desired.SetGroupVersionKind(gvk)
	unstructured.RemoveNestedField(desired.Object, "metadata", "creationTimestamp")
	err = hub.Apply(ctx, client.ApplyConfigurationFromUnstructured(desired), client.FieldOwner(kube.FieldManager), client.ForceOwnership)
	if err != nil {
		return fmt.Errorf("write %s %s: %w", gvk.Kind, client.ObjectKeyFromObject(obj), err)
	}
	return nil
}

// replaceOther deletes a binding in the place of obj that is to another role.
func replaceOther(ctx context.Context, hub client.Client, obj client.Object) error {
	var (
		live client.Object
		same func() bool
	)
	switch desired := obj.(type) {
	case *rbacv1.ClusterRoleBinding:
		found := &rbacv1.ClusterRoleBinding{}
		live, same = found, func() bool { return found.RoleRef == desired.RoleRef }
	case *rbacv1.RoleBinding:
		found := &rbacv1.RoleBinding{}
		live, same = found, func() bool { return found.RoleRef == desired.RoleRef }
	default:
		return nil
	}
	if err := hub.Get(ctx, client.ObjectKeyFromObject(obj), live); err != nil {
		if client.IgnoreNotFound(err) == nil {
			return nil
		}
		return fmt.Errorf("read binding %s: %w", client.ObjectKeyFromObject(obj), err)
	}
	if same() {
		return nil
	}
	uid := live.GetUID()
	if err := hub.Delete(ctx, live, client.Preconditions{UID: &uid}); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete binding %s: %w", client.ObjectKeyFromObject(obj), err)
	}
	return nil
}
