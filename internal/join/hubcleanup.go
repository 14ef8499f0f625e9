package join

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join/foreign"
	"github.com/towline/towline/internal/kube"
)

// Kept is an object on the hub that a deregistration does not delete: it has the name of an object of the cluster's
// registration, and no registration of Towline created it.
type Kept struct {
	Ref kube.Ref
}

// String returns the reason, and the command that deletes the object.
func (k Kept) String() string {
	command := "kubectl delete " + strings.ToLower(k.Ref.Kind) + " " + k.Ref.Name
	if k.Ref.Namespace != "" {
		command += " -n " + k.Ref.Namespace
	}
	return fmt.Sprintf("%s: Towline did not create it; to delete it: %s", k.Ref, command)
}

// Retracted is what a retraction did.
type Retracted struct {
	// Deleted are the deleted objects, in that order.
	Deleted []kube.Ref
	// Kept are the objects that stay although their names are those of a registration.
	Kept []Kept
}

// Retract deletes the objects that the registration of cluster created on the hub, in either mode, and the deliveries
// for its agent. The credentials are deleted last, except for the delivery namespace. Retract does not touch the
// SveltosCluster and objects without the registration label, such as the identity that the sveltosctl of Sveltos
// created. A namespace that was created for the deliveries stays if it holds foreign objects. hub must read from the
// API server. Retract can be interrupted and called again.
func Retract(ctx context.Context, hub client.Client, resources foreign.Resources, cluster *libv1beta1.SveltosCluster) (Retracted, error) {
	r := newRetraction(hub, resources, cluster)
	if err := r.deleteOwn(ctx); err != nil {
		return r.done, fmt.Errorf("take back the registration of cluster %s: %w", r.request.key(), err)
	}
	return r.done, nil
}

// retraction deletes the objects of one registration.
type retraction struct {
	hub       client.Client
	resources foreign.Resources
	cluster   *libv1beta1.SveltosCluster
	request   Request
	done      Retracted
}

func newRetraction(hub client.Client, resources foreign.Resources, cluster *libv1beta1.SveltosCluster) *retraction {
	return &retraction{hub: hub, resources: resources, cluster: cluster, request: Request{Namespace: cluster.Namespace, Name: cluster.Name}}
}

// deleteOwn deletes the objects that registrations of the cluster created.
func (r *retraction) deleteOwn(ctx context.Context) error {
	claimed, err := claimedNamespaces(ctx, r.hub, r.request)
	if err != nil {
		return err
	}
	for _, namespace := range claimed {
		if err := r.deleteDeliveries(ctx, namespace.Name); err != nil {
			return err
		}
	}
	objects, kept, err := r.readObjects(ctx, claimed)
	r.done.Kept = kept
	if err != nil {
		return err
	}
	for _, obj := range objects {
		if err := r.deleteObject(ctx, obj); err != nil {
			return err
		}
	}
	// The claim says that the objects in the namespace are this cluster's, so that it is removed last.
	for _, namespace := range claimed {
		if err := r.releaseNamespace(ctx, namespace); err != nil {
			return err
		}
	}
	return nil
}

// readObjects reads the objects with the names of a registration of this cluster. It returns those that one created, in
// the order in which they are deleted, and those that another party created, such as the sveltosctl of Sveltos. The
// ServiceAccount is last: without it all credentials are invalid.
func (r *retraction) readObjects(ctx context.Context, claimed []*metav1.PartialObjectMetadata) (own []client.Object, kept []Kept, err error) {
	q := r.request
	// Registrations of Towline do not create these. Users who may not read them get no list of them.
	objects := []client.Object{
		&corev1.Secret{ObjectMeta: named(q.Namespace, q.Name)},
		&rbacv1.ClusterRole{ObjectMeta: named("", q.Namespace+"-"+q.Name)},
		&rbacv1.ClusterRoleBinding{ObjectMeta: named("", q.Namespace+"-"+q.Name)},
	}
	foreign := len(objects)
	objects = append(objects,
		&corev1.Secret{ObjectMeta: named(q.Namespace, r.kubeconfigSecret())},
		&corev1.Secret{ObjectMeta: named(q.Namespace, AuthoritySecret(q.Name))},
		&rbacv1.RoleBinding{ObjectMeta: named(kube.AgentNamespace, sharedBinding(q))})
	for _, namespace := range claimed {
		objects = append(objects, &coordinationv1.Lease{ObjectMeta: named(namespace.Name, q.Name)})
		if namespace.Name != q.Namespace {
			objects = append(objects,
				&rbacv1.RoleBinding{ObjectMeta: named(namespace.Name, q.Name)},
				&rbacv1.Role{ObjectMeta: named(namespace.Name, q.Name)})
		}
	}
	objects = append(objects,
		&rbacv1.RoleBinding{ObjectMeta: named(q.Namespace, q.Name)},
		&rbacv1.Role{ObjectMeta: named(q.Namespace, q.Name)},
		&corev1.Secret{ObjectMeta: named(q.Namespace, RegistrationSecret(q.Name))},
		&corev1.Secret{ObjectMeta: named(q.Namespace, AnchorSecret(q.Name))},
		&corev1.ServiceAccount{ObjectMeta: named(q.Namespace, q.Name)})
	for i, obj := range objects {
		found, err := read(ctx, r.hub, obj, client.ObjectKeyFromObject(obj))
		switch {
		case err != nil && (i >= foreign || !apierrors.IsForbidden(err)):
			return nil, nil, err
		case found && i >= foreign && r.owns(obj):
			own = append(own, obj)
		case found && obj.GetLabels()[registrationLabel] == "" && r.isIdentity(obj):
			kept = append(kept, Kept{Ref: kube.RefIn(r.hub.Scheme(), obj)})
		}
	}
	return own, kept, nil
}

func (r *retraction) kubeconfigSecret() string {
	return cmp.Or(fleet.FromSveltosCluster(r.cluster).KubeconfigSecret, KubeconfigSecret(r.request.Name))
}

// owns returns whether a registration of this cluster created obj. The owner distinguishes clusters of one name in
// several namespaces.
func (r *retraction) owns(obj client.Object) bool {
	return obj.GetLabels()[registrationLabel] == r.request.Name &&
		!slices.ContainsFunc(obj.GetOwnerReferences(), func(owner metav1.OwnerReference) bool {
			return owner.Kind == libv1beta1.SveltosClusterKind &&
				(obj.GetNamespace() != r.request.Namespace || r.cluster.UID != "" && owner.UID != r.cluster.UID)
		})
}

// deleteDeliveries deletes the deliveries for the agent. Agents do not take that for a withdrawal.
func (r *retraction) deleteDeliveries(ctx context.Context, delivery string) error {
	if len(r.request.Name) > fleet.MaxPullName {
		return nil // a label cannot have this name, and nothing was created for it
	}
	for _, kind := range []schema.GroupVersionKind{
		libv1beta1.GroupVersion.WithKind(libv1beta1.ConfigurationGroupKind), libv1beta1.GroupVersion.WithKind(libv1beta1.ConfigurationBundleKind),
		corev1.SchemeGroupVersion.WithKind("Secret"), // the key of the content
	} {
		list := &metav1.PartialObjectMetadataList{}
		list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
		err := r.hub.List(ctx, list, client.InNamespace(delivery), client.MatchingLabels{libv1beta1.PullClusterNameLabel: r.request.Name})
		if err != nil {
			return fmt.Errorf("list %ss in namespace %s: %w", kind.Kind, delivery, err)
		}
		for i := range list.Items {
			list.Items[i].SetGroupVersionKind(kind)
			if err := r.deleteObject(ctx, &list.Items[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

// deleteObject deletes an object that has been read, and records that.
func (r *retraction) deleteObject(ctx context.Context, obj client.Object) error {
	err := deleteObject(ctx, r.hub, obj)
	if apierrors.IsConflict(err) {
		return nil // another party has deleted and created it since
	}
	if err == nil {
		r.done.Deleted = append(r.done.Deleted, kube.RefIn(r.hub.Scheme(), obj))
	}
	return err
}

// releaseNamespace deletes a delivery namespace that was created for this cluster and holds no foreign objects, and
// removes the claim from any other.
func (r *retraction) releaseNamespace(ctx context.Context, namespace *metav1.PartialObjectMetadata) error {
	if namespace.Name != r.request.Namespace && namespace.Labels[registrationLabel] == r.request.Name {
		isDeleted, err := foreign.DeleteNamespace(ctx, r.hub, r.resources, namespace, func(item *metav1.PartialObjectMetadata) bool {
			return item.Labels[registrationLabel] == r.request.Name
		})
		if isDeleted {
			r.done.Deleted = append(r.done.Deleted, kube.RefIn(r.hub.Scheme(), namespace))
		}
		if isDeleted || err != nil {
			return err
		}
	}
	return releaseClaim(ctx, r.hub, namespace.Name, holderOf(r.request, namespace.Name))
}

// isIdentity returns whether an object that another party created is the kubeconfig of the cluster, or belongs to the
// ServiceAccount of its agent. A Secret or a binding may only have the same name.
func (r *retraction) isIdentity(obj client.Object) bool {
	isAccount := func(s rbacv1.Subject) bool {
		return s.Kind == rbacv1.ServiceAccountKind && s.Namespace == r.request.Namespace && s.Name == r.request.Name
	}
	isPull := r.cluster.Spec.PullMode
	switch obj := obj.(type) {
	case *corev1.Secret:
		return obj.Name != r.request.Name || isPull && obj.Annotations[corev1.ServiceAccountNameKey] == r.request.Name
	case *rbacv1.RoleBinding:
		return isPull && slices.ContainsFunc(obj.Subjects, isAccount)
	case *rbacv1.ClusterRoleBinding:
		return isPull && slices.ContainsFunc(obj.Subjects, isAccount)
	}
	return isPull
}
