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

// Kept is an object on the hub that has the name of an object of a registration, but was not created by Towline.
type Kept struct {
	Ref kube.Ref
}

// String returns the reason why the object stays, and a command that deletes it.
func (k Kept) String() string {
	command := "kubectl delete " + strings.ToLower(k.Ref.Kind) + " " + k.Ref.Name
	if k.Ref.Namespace != "" {
		command += " -n " + k.Ref.Namespace
	}
	return fmt.Sprintf("%s: Towline did not create it; to delete it: %s", k.Ref, command)
}

// HubCleanupResult is the result of DeleteHubObjects.
type HubCleanupResult struct {
	// Deleted are the deleted objects, in the order of their deletion.
	Deleted []kube.Ref
	Kept    []Kept
}

// DeleteHubObjects deletes the objects that registrations of cluster created on the hub, in either mode, and its
// deliveries. It deletes the credentials last, except for the delivery namespace. It does not delete the
// SveltosCluster, nor objects without the registration label, such as those that the sveltosctl of Sveltos created. It
// keeps a derived delivery namespace with foreign objects, without the claim. hub must read from the API server. It can
// be interrupted and called again.
func DeleteHubObjects(ctx context.Context, hub client.Client, resources foreign.Resources, cluster *libv1beta1.SveltosCluster) (HubCleanupResult, error) {
	r := newHubCleanup(hub, resources, cluster)
	if err := r.run(ctx); err != nil {
		return r.result, fmt.Errorf("take back the registration of cluster %s: %w", r.request.key(), err)
	}
	return r.result, nil
}

// hubCleanup is one run of DeleteHubObjects.
type hubCleanup struct {
	hub       client.Client
	resources foreign.Resources
	cluster   *libv1beta1.SveltosCluster
	request   Request
	result    HubCleanupResult
}

func newHubCleanup(hub client.Client, resources foreign.Resources, cluster *libv1beta1.SveltosCluster) *hubCleanup {
	return &hubCleanup{hub: hub, resources: resources, cluster: cluster, request: Request{Namespace: cluster.Namespace, Name: cluster.Name}}
}

// run deletes the deliveries, the objects of the registration, and the claims or the claimed namespaces.
func (r *hubCleanup) run(ctx context.Context) error {
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
	r.result.Kept = kept
	if err != nil {
		return err
	}
	for _, obj := range objects {
		if err := r.deleteObject(ctx, obj); err != nil {
			return err
		}
	}
	// A claim reserves the namespace for this cluster until all its objects are deleted.
	for _, namespace := range claimed {
		if err := r.releaseNamespace(ctx, namespace); err != nil {
			return err
		}
	}
	return nil
}

// readObjects reads the objects with the names of this cluster's registration. own are the objects that a registration
// created, in the order of their deletion: the ServiceAccount is last, since its deletion invalidates all credentials.
// kept are the objects that another party created, such as the sveltosctl of Sveltos.
func (r *hubCleanup) readObjects(ctx context.Context, claimed []*metav1.PartialObjectMetadata) (own []client.Object, kept []Kept, err error) {
	q := r.request
	// Only other parties create these three. If the user may not read them, they are ignored.
	objects := []client.Object{
		&corev1.Secret{ObjectMeta: objectMeta(q.Namespace, q.Name)},
		&rbacv1.ClusterRole{ObjectMeta: objectMeta("", q.Namespace+"-"+q.Name)},
		&rbacv1.ClusterRoleBinding{ObjectMeta: objectMeta("", q.Namespace+"-"+q.Name)},
	}
	foreignCount := len(objects)
	objects = append(objects,
		&corev1.Secret{ObjectMeta: objectMeta(q.Namespace, cmp.Or(fleet.FromSveltosCluster(r.cluster).KubeconfigSecret, KubeconfigSecret(q.Name)))},
		&corev1.Secret{ObjectMeta: objectMeta(q.Namespace, AuthoritySecret(q.Name))},
		&rbacv1.RoleBinding{ObjectMeta: objectMeta(kube.AgentNamespace, sharedBinding(q))})
	for _, namespace := range claimed {
		objects = append(objects, &coordinationv1.Lease{ObjectMeta: objectMeta(namespace.Name, q.Name)})
		if namespace.Name != q.Namespace {
			objects = append(objects,
				&rbacv1.RoleBinding{ObjectMeta: objectMeta(namespace.Name, q.Name)},
				&rbacv1.Role{ObjectMeta: objectMeta(namespace.Name, q.Name)})
		}
	}
	objects = append(objects,
		&rbacv1.RoleBinding{ObjectMeta: objectMeta(q.Namespace, q.Name)},
		&rbacv1.Role{ObjectMeta: objectMeta(q.Namespace, q.Name)},
		&corev1.Secret{ObjectMeta: objectMeta(q.Namespace, RegistrationSecret(q.Name))},
		&corev1.Secret{ObjectMeta: objectMeta(q.Namespace, AnchorSecret(q.Name))},
		&corev1.ServiceAccount{ObjectMeta: objectMeta(q.Namespace, q.Name)})
	for i, obj := range objects {
		found, err := read(ctx, r.hub, obj, client.ObjectKeyFromObject(obj))
		switch {
		case err != nil && (i >= foreignCount || !apierrors.IsForbidden(err)):
			return nil, nil, err
		case found && i >= foreignCount && r.owns(obj):
			own = append(own, obj)
		case found && obj.GetLabels()[registrationLabel] == "" && r.isIdentityObject(obj):
			kept = append(kept, Kept{Ref: kube.RefIn(r.hub.Scheme(), obj)})
		}
	}
	return own, kept, nil
}

// owns returns whether a registration of this cluster created obj. A cluster with the same name in another namespace
// has the same label, and another owner reference.
func (r *hubCleanup) owns(obj client.Object) bool {
	return obj.GetLabels()[registrationLabel] == r.request.Name &&
		!slices.ContainsFunc(obj.GetOwnerReferences(), func(owner metav1.OwnerReference) bool {
			return owner.Kind == libv1beta1.SveltosClusterKind &&
				(obj.GetNamespace() != r.request.Namespace || r.cluster.UID != "" && owner.UID != r.cluster.UID)
		})
}

// deleteDeliveries deletes the deliveries in a namespace. Agents do not treat a missing group as a withdrawal.
func (r *hubCleanup) deleteDeliveries(ctx context.Context, delivery string) error {
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

func (r *hubCleanup) deleteObject(ctx context.Context, obj client.Object) error {
	err := deleteObject(ctx, r.hub, obj)
	if apierrors.IsConflict(err) {
		return nil // another party has deleted and created it since
	}
	if err == nil {
		r.result.Deleted = append(r.result.Deleted, kube.RefIn(r.hub.Scheme(), obj))
	}
	return err
}

// releaseNamespace deletes a derived namespace that was created for this cluster and has no foreign objects. It removes
// the claim from any other namespace.
func (r *hubCleanup) releaseNamespace(ctx context.Context, namespace *metav1.PartialObjectMetadata) error {
	if namespace.Name != r.request.Namespace && namespace.Labels[registrationLabel] == r.request.Name {
		isDeleted, err := foreign.DeleteNamespace(ctx, r.hub, r.resources, namespace, func(item *metav1.PartialObjectMetadata) bool {
			return item.Labels[registrationLabel] == r.request.Name
		})
		if isDeleted {
			r.result.Deleted = append(r.result.Deleted, kube.RefIn(r.hub.Scheme(), namespace))
		}
		if isDeleted || err != nil {
			return err
		}
	}
	return releaseClaim(ctx, r.hub, namespace.Name, holderOf(r.request, namespace.Name))
}

// isIdentityObject returns whether a foreign object is the kubeconfig of the cluster, or belongs to the ServiceAccount
// of its agent. The name is not sufficient for a Secret or a binding.
func (r *hubCleanup) isIdentityObject(obj client.Object) bool {
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
