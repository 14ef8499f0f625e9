package join

import (
	"cmp"
	"context"
	"fmt"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// Retracted is what a retraction did.
type Retracted struct {
	// Deleted are the deleted objects, in that order.
	Deleted []kube.Ref
	// Kept are the objects that stay although their names are those of a registration.
	Kept []Kept
}

// Retract deletes what the registration of cluster made on the hub, in either mode, and what waits there for its agent.
// Its credentials go last but for the namespace of its deliveries. The identity that the sveltosctl of Sveltos made for
// the agent of a pull-mode cluster goes first, as far as nothing else uses it. Retract leaves alone the SveltosCluster
// itself, everything else that others made, and what belongs to another cluster. A namespace that was made for the
// deliveries goes only if kinds can tell that nobody has anything in it; kinds may be nil. hub must read from the API
// server. It can be interrupted and run again.
func Retract(ctx context.Context, hub client.Client, kinds Kinds, cluster *libv1beta1.SveltosCluster) (Retracted, error) {
	r := &retraction{hub: hub, kinds: kinds, cluster: cluster, request: Request{Namespace: cluster.Namespace, Name: cluster.Name}}
	if err := r.run(ctx); err != nil {
		return r.done, fmt.Errorf("take back the registration of cluster %s: %w", r.request.key(), err)
	}
	return r.done, nil
}

// retraction takes one registration back.
type retraction struct {
	hub     client.Client
	kinds   Kinds
	cluster *libv1beta1.SveltosCluster
	request Request
	done    Retracted
}

func (r *retraction) run(ctx context.Context) error {
	// An agent that is not ours must not see its deliveries go.
	if err := r.removeForeign(ctx); err != nil {
		return err
	}
	held, err := r.held(ctx)
	if err != nil {
		return err
	}
	for _, namespace := range held {
		if err := r.dropDeliveries(ctx, namespace.Name); err != nil {
			return err
		}
	}
	objects, err := r.present(ctx)
	if err != nil {
		return err
	}
	for _, obj := range objects {
		if err := r.remove(ctx, obj); err != nil {
			return err
		}
	}
	// The claims go last: what is in a namespace is this cluster's as long as it has one.
	for _, namespace := range held {
		if err := r.leave(ctx, namespace); err != nil {
			return err
		}
	}
	return nil
}

// held are the namespaces that carry the deliveries of this cluster: only its own one and the derived one can, whatever
// its annotation says.
func (r *retraction) held(ctx context.Context) ([]*corev1.Namespace, error) {
	var held []*corev1.Namespace
	for _, name := range []string{r.request.Namespace, derivedNamespace(r.request)} {
		namespace := &corev1.Namespace{}
		err := r.hub.Get(ctx, client.ObjectKey{Name: name}, namespace)
		if client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("read namespace %s: %w", name, err)
		}
		if err == nil && namespace.Annotations[kube.AnnotationDeliveryHolder] == holderOf(r.request, name) {
			held = append(held, namespace)
		}
	}
	return held, nil
}

// objects are all that a registration may have made. The ServiceAccount is last: without it no credential is worth
// anything.
func (r *retraction) objects(held []*corev1.Namespace) []client.Object {
	q := r.request
	objects := []client.Object{
		&corev1.Secret{ObjectMeta: named(q.Namespace, r.kubeconfigSecret())},
		&corev1.Secret{ObjectMeta: named(q.Namespace, AuthoritySecret(q.Name))},
		&rbacv1.RoleBinding{ObjectMeta: named(kube.AgentNamespace, sharedBinding(q))},
	}
	for _, namespace := range held {
		// Before the binding, which tells whose it is.
		objects = append(objects, &coordinationv1.Lease{ObjectMeta: named(namespace.Name, q.Name)})
		if namespace.Name != q.Namespace {
			objects = append(objects,
				&rbacv1.RoleBinding{ObjectMeta: named(namespace.Name, q.Name)},
				&rbacv1.Role{ObjectMeta: named(namespace.Name, q.Name)})
		}
	}
	return append(objects,
		&rbacv1.RoleBinding{ObjectMeta: named(q.Namespace, q.Name)},
		&rbacv1.Role{ObjectMeta: named(q.Namespace, q.Name)},
		&corev1.Secret{ObjectMeta: named(q.Namespace, RegistrationSecret(q.Name))},
		&corev1.Secret{ObjectMeta: named(q.Namespace, AnchorSecret(q.Name))},
		&corev1.ServiceAccount{ObjectMeta: named(q.Namespace, q.Name)})
}

func (r *retraction) kubeconfigSecret() string {
	return cmp.Or(fleet.FromSveltosCluster(r.cluster).KubeconfigSecret, KubeconfigSecret(r.request.Name))
}

// present reads those of the objects that exist and are this cluster's.
func (r *retraction) present(ctx context.Context) ([]client.Object, error) {
	held, err := r.held(ctx)
	if err != nil {
		return nil, err
	}
	var present []client.Object
	for _, obj := range r.objects(held) {
		err := r.hub.Get(ctx, client.ObjectKeyFromObject(obj), obj)
		if client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("read %T %s: %w", obj, client.ObjectKeyFromObject(obj), err)
		}
		if err != nil {
			continue
		}
		owned := r.owns(obj)
		if lease, ok := obj.(*coordinationv1.Lease); ok && !owned {
			if owned, err = agentMayWrite(ctx, r.hub, lease); err != nil {
				return nil, err
			}
		}
		if owned {
			present = append(present, obj)
		}
	}
	return present, nil
}

// owns says whether a registration of this cluster made obj. Clusters of one name in several namespaces tell theirs
// apart by who owns them.
func (r *retraction) owns(obj client.Object) bool {
	if obj.GetLabels()[registrationLabel] != r.request.Name {
		return false
	}
	for _, owner := range obj.GetOwnerReferences() {
		if owner.Kind != libv1beta1.SveltosClusterKind {
			continue
		}
		// An owner lives in the namespace of what it owns.
		if obj.GetNamespace() != r.request.Namespace || r.cluster.UID != "" && owner.UID != r.cluster.UID {
			return false
		}
	}
	return true
}

// dropDeliveries deletes what was left on the hub for the agent. No agent takes that for a withdrawal.
func (r *retraction) dropDeliveries(ctx context.Context, delivery string) error {
	if len(r.request.Name) > fleet.MaxPullName {
		return nil // nothing was ever made for it, and no label can have its name
	}
	for _, kind := range []string{libv1beta1.ConfigurationGroupKind, libv1beta1.ConfigurationBundleKind} {
		list := &metav1.PartialObjectMetadataList{}
		list.SetGroupVersionKind(libv1beta1.GroupVersion.WithKind(kind + "List"))
		err := r.hub.List(ctx, list, client.InNamespace(delivery), client.MatchingLabels{libv1beta1.PullClusterNameLabel: r.request.Name})
		if err != nil {
			return fmt.Errorf("list %ss in namespace %s: %w", kind, delivery, err)
		}
		for i := range list.Items {
			item := &list.Items[i]
			item.SetGroupVersionKind(libv1beta1.GroupVersion.WithKind(kind))
			if err := r.remove(ctx, item); err != nil {
				return err
			}
		}
	}
	return nil
}

// remove deletes an object as it was read.
func (r *retraction) remove(ctx context.Context, obj client.Object) error {
	uid := obj.GetUID()
	err := r.hub.Delete(ctx, obj, client.Preconditions{UID: &uid})
	if apierrors.IsConflict(err) {
		// It was made anew, by somebody else.
		return nil
	}
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete %s: %w", refOf(r.hub, obj), err)
	}
	r.done.Deleted = append(r.done.Deleted, refOf(r.hub, obj))
	if lease, ok := obj.(*coordinationv1.Lease); ok && len(lease.Finalizers) > 0 {
		return r.free(ctx, lease)
	}
	return nil
}

// free takes the finalizers off a Lease that is being deleted: its agent, which may write it, must not hold a namespace
// up. Nobody can add one from now on.
func (r *retraction) free(ctx context.Context, lease *coordinationv1.Lease) error {
	err := r.hub.Patch(ctx, lease, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`)))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("take the finalizers off %s: %w", refOf(r.hub, lease), err)
	}
	return nil
}

// leave gives a namespace back, and deletes one that was made for this cluster alone and holds nothing else.
func (r *retraction) leave(ctx context.Context, namespace *corev1.Namespace) error {
	q := r.request
	if namespace.Name != q.Namespace && namespace.Labels[registrationLabel] == q.Name {
		stranger, err := tenants{hub: r.hub, kinds: r.kinds, request: q}.stranger(ctx, namespace.Name)
		if err != nil {
			return err
		}
		if stranger == "" {
			return r.remove(ctx, namespace)
		}
	}
	return releaseClaim(ctx, r.hub, namespace.Name, holderOf(q, namespace.Name))
}

// refOf names obj, also where only its metadata was read.
func refOf(hub client.Client, obj client.Object) kube.Ref {
	ref := kube.Ref{Namespace: obj.GetNamespace(), Name: obj.GetName()}
	// Every kind here is in the scheme, or the request before this would have failed.
	if gvk, err := apiutil.GVKForObject(obj, hub.Scheme()); err == nil {
		ref.Group, ref.Version, ref.Kind = gvk.Group, gvk.Version, gvk.Kind
	}
	return ref
}
