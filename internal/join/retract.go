package join

import (
	"context"
	"fmt"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// Retract deletes what the registration of cluster made on the hub, in either mode, and what waits there for its agent, and returns what it
// deleted, in that order. Its credentials go last but for the namespace of its deliveries. It leaves alone the SveltosCluster itself, what
// others made, and what belongs to another cluster. hub must read from the API server. It can be interrupted and run again.
func Retract(ctx context.Context, hub client.Client, cluster *libv1beta1.SveltosCluster) ([]kube.Ref, error) {
	r := &retraction{hub: hub, cluster: cluster, request: Request{Namespace: cluster.Namespace, Name: cluster.Name}}
	if err := r.run(ctx); err != nil {
		return r.deleted, fmt.Errorf("take back the registration of cluster %s: %w", r.request.key(), err)
	}
	return r.deleted, nil
}

// retraction takes one registration back.
type retraction struct {
	hub     client.Client
	cluster *libv1beta1.SveltosCluster
	request Request
	deleted []kube.Ref
}

func (r *retraction) run(ctx context.Context) error {
	delivery := deliveryNamespace(r.cluster)
	if err := r.dropDeliveries(ctx, delivery); err != nil {
		return err
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
	return r.leaveDelivery(ctx, delivery)
}

// objects are all that a registration may have made. The ServiceAccount is last: it remembers the delivery namespace.
func (r *retraction) objects() []client.Object {
	q, delivery := r.request, deliveryNamespace(r.cluster)
	secret := fleet.FromSveltosCluster(r.cluster).KubeconfigSecret
	if secret == "" {
		secret = KubeconfigSecret(q.Name)
	}
	objects := []client.Object{
		&corev1.Secret{ObjectMeta: named(q.Namespace, secret)},
		&corev1.Secret{ObjectMeta: named(q.Namespace, AuthoritySecret(q.Name))},
		&rbacv1.RoleBinding{ObjectMeta: named(kube.AgentNamespace, sharedBinding(q))},
	}
	if delivery != q.Namespace {
		objects = append(objects,
			&rbacv1.RoleBinding{ObjectMeta: named(delivery, q.Name)},
			&rbacv1.Role{ObjectMeta: named(delivery, q.Name)})
	}
	return append(objects,
		&rbacv1.RoleBinding{ObjectMeta: named(q.Namespace, q.Name)},
		&rbacv1.Role{ObjectMeta: named(q.Namespace, q.Name)},
		&coordinationv1.Lease{ObjectMeta: named(delivery, q.Name)},
		&corev1.Secret{ObjectMeta: named(q.Namespace, RegistrationSecret(q.Name))},
		&corev1.Secret{ObjectMeta: named(q.Namespace, AnchorSecret(q.Name))},
		&corev1.ServiceAccount{ObjectMeta: named(q.Namespace, q.Name)})
}

// present reads those of the objects that exist and are this cluster's.
func (r *retraction) present(ctx context.Context) ([]client.Object, error) {
	var present []client.Object
	for _, obj := range r.objects() {
		err := r.hub.Get(ctx, client.ObjectKeyFromObject(obj), obj)
		if client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("read %T %s: %w", obj, client.ObjectKeyFromObject(obj), err)
		}
		if err == nil && r.owns(obj) {
			present = append(present, obj)
		}
	}
	return present, nil
}

// owns says whether a registration of this cluster made obj. Clusters of one name in several namespaces tell theirs apart by who owns them.
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
	if !r.cluster.Spec.PullMode {
		return nil
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
	r.deleted = append(r.deleted, refOf(r.hub, obj))
	return nil
}

// leaveDelivery gives a shared namespace back and deletes one that was made for this cluster alone and holds nothing else.
func (r *retraction) leaveDelivery(ctx context.Context, delivery string) error {
	q := r.request
	if !r.cluster.Spec.PullMode {
		return nil
	}
	if delivery == q.Namespace {
		return releaseClaim(ctx, r.hub, delivery, q.Name)
	}
	namespace := &corev1.Namespace{}
	if err := r.hub.Get(ctx, client.ObjectKey{Name: delivery}, namespace); err != nil {
		return client.IgnoreNotFound(err)
	}
	if namespace.Annotations[kube.AnnotationDeliveryHolder] != q.key() {
		return nil
	}
	used, err := r.used(ctx, delivery)
	if err != nil {
		return err
	}
	if used || namespace.Labels[registrationLabel] != q.Name {
		return releaseClaim(ctx, r.hub, delivery, q.key())
	}
	return r.remove(ctx, namespace)
}

// used says whether somebody else put something into the namespace that was made for the deliveries of the cluster.
func (r *retraction) used(ctx context.Context, namespace string) (bool, error) {
	for _, gvk := range []schema.GroupVersionKind{
		libv1beta1.GroupVersion.WithKind(libv1beta1.SveltosClusterKind),
		libv1beta1.GroupVersion.WithKind(libv1beta1.ConfigurationGroupKind),
		corev1.SchemeGroupVersion.WithKind("Secret"),
		corev1.SchemeGroupVersion.WithKind("ConfigMap"),
		corev1.SchemeGroupVersion.WithKind("ServiceAccount"),
	} {
		list := &metav1.PartialObjectMetadataList{}
		list.SetGroupVersionKind(gvk.GroupVersion().WithKind(gvk.Kind + "List"))
		if err := r.hub.List(ctx, list, client.InNamespace(namespace)); err != nil {
			return false, fmt.Errorf("list %ss in namespace %s: %w", gvk.Kind, namespace, err)
		}
		for i := range list.Items {
			// Kubernetes puts these two into every namespace.
			if name := list.Items[i].Name; name != "kube-root-ca.crt" && name != "default" {
				return true, nil
			}
		}
	}
	return false, nil
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
