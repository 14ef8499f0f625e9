package karmada

import (
	"context"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/join/foreign"
	"github.com/towline/towline/internal/kube"
)

// DeleteMemberObjects deletes the objects that a cluster's registration by the hub hubID has on the member, and returns
// them: its own objects, and the shared objects that no other cluster uses. The namespace is deleted only if it
// contains no foreign objects. member may use the hub's ServiceAccount, which is deleted too: it sets owner references,
// and its last request deletes the owner, so that the member's garbage collector deletes the other objects. It can be
// interrupted and repeated.
func DeleteMemberObjects(ctx context.Context, member *rest.Config, cluster, clusterNamespace, hubID string) (removed []kube.Ref, err error) {
	m, err := newMemberObjects(member, cluster, clusterNamespace, hubID)
	if err != nil {
		return nil, err
	}
	return m.remove(ctx)
}

func (m *memberRegistration) remove(ctx context.Context) (removed []kube.Ref, err error) {
	r := &removal{memberRegistration: m}
	if err := r.run(ctx); err != nil {
		return r.removed, fmt.Errorf("remove the registration of cluster %s from it: %w", m.cluster, err)
	}
	return r.removed, nil
}

// removal is one run of memberRegistration.remove: of DeleteMemberObjects, of Unjoin or of a rollback.
type removal struct {
	*memberRegistration
	removed []kube.Ref
}

func (r *removal) run(ctx context.Context) error {
	shared := r.shared()
	for i := len(shared) - 1; i > 0; i-- {
		if err := r.removeUsedBy(ctx, shared[i], true); err != nil {
			return err
		}
	}
	// If a registration writes an object concurrently, the removal gets a conflict.
	return retryStale(ctx, func() error { return r.removeOwn(ctx, shared[0]) })
}

// removeOwn deletes the own objects, and the namespace if it must be deleted.
func (r *removal) removeOwn(ctx context.Context, sharedNamespace client.Object) error {
	remaining, err := r.listOwn(ctx)
	if err != nil {
		return err
	}
	namespace, err := r.chooseNamespace(ctx, sharedNamespace)
	if err != nil {
		return err
	}
	if namespace != nil {
		remaining = append(remaining, namespace)
	}
	if len(remaining) == 0 {
		return nil
	}
	owner := chooseOwner(remaining)
	for _, obj := range remaining {
		if err := r.setOwner(ctx, obj, owner); err != nil {
			return err
		}
	}
	uid, version := owner.GetUID(), owner.GetResourceVersion()
	err = r.client.Delete(ctx, owner, client.Preconditions{UID: &uid, ResourceVersion: &version}, client.PropagationPolicy(metav1.DeletePropagationBackground))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete %s: %w", r.ref(owner), err)
	}
	for _, obj := range remaining {
		r.removed = append(r.removed, r.ref(obj))
	}
	return nil
}

// listOwn reads the existing own objects that are to be removed.
func (r *removal) listOwn(ctx context.Context) ([]client.Object, error) {
	var existing []client.Object
	for _, obj := range r.own() {
		live, found, err := r.get(ctx, obj)
		if err != nil {
			return nil, err
		}
		if found && r.isRemovable(live) && live.GetDeletionTimestamp().IsZero() {
			existing = append(existing, live)
		}
	}
	return existing, nil
}

// chooseOwner returns the object that becomes the owner of the others. It prefers a cluster-scoped object, which can
// own all others. The ServiceAccount can own the Secret for its token.
func chooseOwner(objects []client.Object) client.Object {
	owner := objects[0]
	for _, obj := range objects {
		switch obj.(type) {
		case *rbacv1.ClusterRole:
			return obj
		case *rbacv1.ClusterRoleBinding, *corev1.Namespace:
			owner = obj
		}
	}
	return owner
}

// setOwner sets the owner reference of obj, unless obj is owner, or owner is in another namespace.
func (r *removal) setOwner(ctx context.Context, obj, owner client.Object) error {
	if obj == owner || owner.GetNamespace() != "" && owner.GetNamespace() != obj.GetNamespace() {
		return nil
	}
	ref := r.ref(owner)
	version := metav1.GroupVersion{Group: ref.Group, Version: ref.Version}.String()
	obj.SetOwnerReferences([]metav1.OwnerReference{{APIVersion: version, Kind: ref.Kind, Name: ref.Name, UID: owner.GetUID()}})
	// The update fails if obj has changed since it was read: it may have another user.
	if err := r.client.Update(ctx, obj, client.FieldOwner(kube.FieldManager)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("make %s a dependent of %s: %w", r.ref(obj), ref, err)
	}
	return nil
}

// chooseNamespace returns the namespace if it must be deleted: a registration created it, and it has no other users
// and no foreign objects. Otherwise it removes this cluster from the users of the namespace and returns nil.
func (r *removal) chooseNamespace(ctx context.Context, namespace client.Object) (client.Object, error) {
	live, found, err := r.get(ctx, namespace)
	if err != nil || !found || !live.GetDeletionTimestamp().IsZero() || !isShared(live) || !r.isRemovableUser(live) {
		return nil, err
	}
	users := usedByAnnotations(live)
	if len(users) == 1 && users[0] == r.usedByAnnotation() && r.namespace != systemNamespace {
		object, err := foreign.Find(ctx, r.client, r.resources, r.namespace, func(item *metav1.PartialObjectMetadata) bool {
			return (item.Kind == "ServiceAccount" || item.Kind == "Secret") && item.Name == r.account() && r.isRemovable(item)
		})
		if err != nil || object == "" {
			return live, err
		}
	}
	return nil, r.removeUsedBy(ctx, namespace, false)
}

// removeUsedBy removes this cluster's annotation from a shared object. If deleteUnused is set and no other cluster uses
// the object, removeUsedBy deletes the object instead.
func (r *removal) removeUsedBy(ctx context.Context, obj client.Object, deleteUnused bool) error {
	err := retryStale(ctx, func() error {
		live, found, err := r.get(ctx, obj)
		if err != nil || !found || !isShared(live) || !r.isRemovableUser(live) || !live.GetDeletionTimestamp().IsZero() {
			return err
		}
		annotations := maps.Clone(live.GetAnnotations())
		delete(annotations, r.usedByAnnotation())
		live.SetAnnotations(annotations)
		if len(usedByAnnotations(live)) > 0 || !deleteUnused {
			return client.IgnoreNotFound(r.client.Update(ctx, live, client.FieldOwner(kube.FieldManager)))
		}
		// The API server returns a conflict if another cluster has begun to use the object.
		err = deleteIfUnchanged(ctx, r.client, live)
		if err == nil {
			r.removed = append(r.removed, r.ref(live))
		}
		return err
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("remove the cluster from the users of %s on it: %w", r.ref(obj), err)
	}
	return nil
}
