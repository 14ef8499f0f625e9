package karmada

import (
	"context"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

// RemoveMember removes from a member what the registration of cluster by the hub hubID made there, and lists it: the
// objects that are its own, and of those that it shares with other registrations the ones that nobody uses any more,
// the namespace only if nobody else has anything in it. member may be the account that goes: whatever is done, it is
// done by one last request, after which the member's garbage collector goes on. member must read from the API server.
// It can be interrupted and repeated.
func RemoveMember(ctx context.Context, member client.Client, cluster, clusterNamespace, hubID string) (removed []kube.Ref, err error) {
	r := &removal{footprint: footprint{member: member, cluster: cluster, namespace: clusterNamespace, hubID: hubID}}
	if err := r.run(ctx); err != nil {
		return r.removed, fmt.Errorf("remove the registration of cluster %s from it: %w", cluster, err)
	}
	return r.removed, nil
}

// removal is one run of RemoveMember.
type removal struct {
	footprint
	removed []kube.Ref
}

func (r *removal) run(ctx context.Context) error {
	shared := r.shared()
	for i := len(shared) - 1; i > 0; i-- {
		if err := r.leave(ctx, shared[i]); err != nil {
			return err
		}
	}
	mine, err := r.present(ctx)
	if err != nil {
		return err
	}
	last, err := r.leaveNamespace(ctx)
	if err != nil {
		return err
	}
	if last != nil {
		mine = append(mine, last)
	}
	if len(mine) == 0 {
		return nil
	}
	anchor := anchorOf(mine)
	for _, obj := range mine {
		if obj == anchor {
			continue
		}
		if err := r.tie(ctx, obj, anchor); err != nil {
			return err
		}
	}
	if err := r.delete(ctx, anchor); err != nil {
		return err
	}
	for _, obj := range mine {
		r.removed = append(r.removed, r.ref(obj))
	}
	return nil
}

// present reads the objects that are this registration's own, the role first.
func (r *removal) present(ctx context.Context) ([]client.Object, error) {
	var mine []client.Object
	for _, obj := range r.own() {
		live, found, err := r.find(ctx, obj)
		if err != nil {
			return nil, err
		}
		if found && r.isOurs(live) && live.GetDeletionTimestamp().IsZero() {
			mine = append(mine, live)
		}
	}
	return mine, nil
}

// anchorOf chooses the object that the others are to go with. One that is in no namespace can own all others; without
// one, the account takes its token along, and the namespace everything.
func anchorOf(mine []client.Object) client.Object {
	anchor := mine[0]
	for _, obj := range mine {
		switch obj.(type) {
		case *rbacv1.ClusterRole:
			return obj
		case *rbacv1.ClusterRoleBinding, *corev1.Namespace:
			anchor = obj
		}
	}
	return anchor
}

// tie lets obj go with anchor, if it can be owned by it.
func (r *removal) tie(ctx context.Context, obj, anchor client.Object) error {
	if anchor.GetNamespace() != "" && anchor.GetNamespace() != obj.GetNamespace() {
		return nil
	}
	ref := r.ref(anchor)
	version := metav1.GroupVersion{Group: ref.Group, Version: ref.Version}.String()
	obj.SetOwnerReferences([]metav1.OwnerReference{{APIVersion: version, Kind: ref.Kind, Name: ref.Name, UID: anchor.GetUID()}})
	// The update fails if the object is not as it was read: somebody may have begun to use it.
	if err := r.member.Update(ctx, obj, client.FieldOwner(kube.FieldManager)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("let %s go with %s: %w", r.ref(obj), ref, err)
	}
	return nil
}

func (r *removal) delete(ctx context.Context, obj client.Object) error {
	uid := obj.GetUID()
	err := r.member.Delete(ctx, obj, client.Preconditions{UID: &uid}, client.PropagationPolicy(metav1.DeletePropagationBackground))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete %s: %w", r.ref(obj), err)
	}
	return nil
}

// leave takes this registration out of the users of a shared object, which goes with the last one.
func (r *removal) leave(ctx context.Context, obj client.Object) error {
	gone, err := r.drop(ctx, obj, func(string) bool { return true })
	if gone != nil {
		r.removed = append(r.removed, r.ref(gone))
	}
	return err
}

// leaveNamespace takes this registration out of the users of the namespace, unless it is the last one and nobody else
// has anything there: that namespace is returned, and is to go.
func (r *removal) leaveNamespace(ctx context.Context) (last client.Object, err error) {
	namespace := r.shared()[0]
	live, found, err := r.find(ctx, namespace)
	if err != nil || !found || !live.GetDeletionTimestamp().IsZero() {
		return nil, err
	}
	users := usersOf(live)
	if !isShared(live) || len(users) == 1 && users[0] == r.user() {
		strange := "it was not made by a registration"
		if isShared(live) {
			if strange, err = r.stranger(ctx); err != nil {
				return nil, err
			}
		}
		if strange == "" {
			return live, nil
		}
	}
	return nil, r.update(ctx, namespace, func(live client.Object) bool {
		return isShared(live) && dropUser(live, r.user())
	})
}

// dropUser takes a user off live, and says whether it was there.
func dropUser(live client.Object, user string) bool {
	annotations := maps.Clone(live.GetAnnotations())
	if _, used := annotations[user]; !used {
		return false
	}
	delete(annotations, user)
	live.SetAnnotations(annotations)
	return true
}

// update changes an object that exists, unless change says that there is nothing to do. It looks again if others were
// faster.
func (f footprint) update(ctx context.Context, obj client.Object, change func(live client.Object) bool) error {
	return insist(ctx, func() error {
		live, found, err := f.find(ctx, obj)
		if err != nil || !found || !change(live) {
			return err
		}
		if err := f.member.Update(ctx, live, client.FieldOwner(kube.FieldManager)); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("write %s on the cluster: %w", f.ref(obj), err)
		}
		return nil
	})
}

// drop takes this registration out of the users of a shared object if what it noted there is wanted, and deletes the
// object if nobody uses it any more. It returns the one that it deleted, or nil.
func (f footprint) drop(ctx context.Context, obj client.Object, wanted func(note string) bool) (gone client.Object, err error) {
	err = insist(ctx, func() error {
		live, found, err := f.find(ctx, obj)
		if err != nil || !found || !isShared(live) || !live.GetDeletionTimestamp().IsZero() || !wanted(live.GetAnnotations()[f.user()]) {
			return err
		}
		dropUser(live, f.user())
		if len(usersOf(live)) > 0 {
			return client.IgnoreNotFound(f.member.Update(ctx, live, client.FieldOwner(kube.FieldManager)))
		}
		// A user who comes in between makes this a conflict.
		uid, version := live.GetUID(), live.GetResourceVersion()
		err = f.member.Delete(ctx, live, client.Preconditions{UID: &uid, ResourceVersion: &version})
		if err == nil {
			gone = live
		}
		return client.IgnoreNotFound(err)
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("leave %s on the cluster: %w", f.ref(obj), err)
	}
	return gone, nil
}
