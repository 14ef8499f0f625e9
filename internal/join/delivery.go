package join

import (
	"context"
	"errors"
	"fmt"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// errClaimed is returned for a namespace that another cluster uses for its deliveries.
var errClaimed = errors.New("carries the deliveries of another cluster")

// deliveryNamespace returns the delivery namespace in the annotation of a cluster. Default: the cluster's own
// namespace.
func deliveryNamespace(cluster *libv1beta1.SveltosCluster) string {
	namespace, _ := fleet.DeliveryNamespace(cluster)
	return namespace
}

// holderOf returns the value of the claim annotation with which the cluster of r holds namespace.
func holderOf(r Request, namespace string) string {
	return fleet.DeliveryHolder(r.Namespace, r.Name, namespace)
}

// checkDelivery returns an error if the cluster's name is too long for a label, or its annotation names a foreign
// namespace.
func checkDelivery(cluster *libv1beta1.SveltosCluster) error {
	if problem := fleet.ValidatePullName(cluster); problem != "" {
		return errors.New(problem)
	}
	if _, isForeign := fleet.DeliveryNamespace(cluster); isForeign {
		return fmt.Errorf("annotation %s names namespace %s, which is not the cluster's", kube.AnnotationDeliveryNS, cluster.Annotations[kube.AnnotationDeliveryNS])
	}
	return nil
}

// claimFreeNamespace claims a delivery namespace for a cluster without a claim, and returns its name: the cluster's own
// namespace if no other pull-mode cluster has claimed that, else a new namespace whose name is derived from the
// cluster's namespace and name.
func (r *registration) claimFreeNamespace(ctx context.Context, cluster *libv1beta1.SveltosCluster) (string, error) {
	if err := checkDelivery(cluster); err != nil {
		return "", err
	}
	// No cluster may claim kube.AgentNamespace, which has the shared bundles of several members.
	if own := r.request.Namespace; deliveryNamespace(cluster) == own && own != kube.AgentNamespace {
		if err := r.claimNamespace(ctx, own); !errors.Is(err, errClaimed) {
			return own, err
		}
	}
	derived := fleet.DerivedNamespace(r.request.Namespace, r.request.Name)
	namespace := withRegistrationLabel(&corev1.Namespace{ObjectMeta: objectMeta("", derived)}, r.request.Name)
	namespace.Annotations = map[string]string{kube.AnnotationDeliveryHolder: holderOf(r.request, derived)}
	if r.isNew {
		if err := r.hub.Create(ctx, namespace.DeepCopy(), client.FieldOwner(kube.FieldManager)); !apierrors.IsAlreadyExists(err) {
			return derived, err
		}
	}
	if err := r.ensureNamespace(ctx, namespace); err != nil {
		return "", err
	}
	return derived, r.claimNamespace(ctx, derived)
}

// claimedDeliveryNamespace returns the namespace that the cluster has claimed, or "" without a claim and if the
// namespace is being deleted. A cluster keeps its claim, independent of its annotation.
func (r *registration) claimedDeliveryNamespace(ctx context.Context, reader client.Reader) (string, error) {
	claimed, err := claimedNamespaces(ctx, reader, r.request)
	for _, namespace := range claimed {
		isOwn := namespace.Name == r.request.Namespace
		isCreated := namespace.Labels[registrationLabel] == r.request.Name
		if namespace.DeletionTimestamp == nil && (isOwn && namespace.Name != kube.AgentNamespace || !isOwn && isCreated) {
			return namespace.Name, err
		}
	}
	return "", err
}

// claimedNamespaces returns the namespaces that the cluster has claimed, the derived one first. There are two if the
// cluster claimed its own namespace after it had lost its annotation.
func claimedNamespaces(ctx context.Context, hub client.Reader, r Request) ([]*metav1.PartialObjectMetadata, error) {
	var claimed []*metav1.PartialObjectMetadata
	for _, name := range []string{fleet.DerivedNamespace(r.Namespace, r.Name), r.Namespace} {
		namespace := newPartialMetadata("Namespace")
		found, err := read(ctx, hub, namespace, client.ObjectKey{Name: name})
		if err != nil {
			return nil, err
		}
		if found && namespace.Annotations[kube.AnnotationDeliveryHolder] == holderOf(r, name) {
			claimed = append(claimed, namespace)
		}
	}
	return claimed, nil
}

// claimNamespace annotates the namespace with its holder. It returns errClaimed if another cluster holds the namespace.
// A derived namespace must have been created for the cluster: users who may read in an existing namespace could read
// the deliveries. If the cache is stale, the write fails, and claimNamespace reads the namespace from the hub.
func (r *registration) claimNamespace(ctx context.Context, name string) error {
	holder, reader := holderOf(r.request, name), r.cache
	isStale := func(err error) bool { return apierrors.IsConflict(err) || apierrors.IsNotFound(err) }
	err := kube.RetryOn(ctx, isStale, func() error {
		namespace := newPartialMetadata("Namespace")
		err := reader.Get(ctx, client.ObjectKey{Name: name}, namespace)
		reader = r.hub
		if err != nil {
			return err
		}
		if name != r.request.Namespace && namespace.Labels[registrationLabel] != r.request.Name {
			return fmt.Errorf("namespace %s, which the deliveries of the cluster need, %w", name, ErrForeign)
		}
		switch namespace.Annotations[kube.AnnotationDeliveryHolder] {
		case holder:
			return nil
		case "":
			if err := r.checkUnused(ctx, name); err != nil {
				return err
			}
		default:
			return fmt.Errorf("namespace %s %w", name, errClaimed)
		}
		return patchHolder(ctx, r.hub, namespace, holder)
	})
	if err != nil {
		return fmt.Errorf("claim namespace %s: %w", name, err)
	}
	return nil
}

// patchHolder writes the claim, or removes it if holder is "". It returns a conflict if the namespace has changed since
// its read.
func patchHolder(ctx context.Context, hub client.Client, namespace *metav1.PartialObjectMetadata, holder string) error {
	before := namespace.DeepCopy()
	metav1.SetMetaDataAnnotation(&namespace.ObjectMeta, kube.AnnotationDeliveryHolder, holder)
	if holder == "" {
		delete(namespace.Annotations, kube.AnnotationDeliveryHolder)
	}
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	return hub.Patch(ctx, namespace, patch, client.FieldOwner(kube.FieldManager))
}

// checkUnused returns errClaimed if a namespace without a claim has the Lease of another cluster's agent: that
// cluster's claim was lost.
func (r *registration) checkUnused(ctx context.Context, name string) error {
	leases := &coordinationv1.LeaseList{}
	if err := r.cache.List(ctx, leases, client.InNamespace(name), client.HasLabels{registrationLabel}); err != nil {
		return fmt.Errorf("list Leases in namespace %s: %w", name, err)
	}
	for i := range leases.Items {
		if leases.Items[i].Labels[registrationLabel] != r.request.Name {
			return fmt.Errorf("namespace %s %w", name, errClaimed)
		}
	}
	return nil
}

// releaseClaim removes the claim of holder from a namespace. Another claim stays.
func releaseClaim(ctx context.Context, hub client.Client, name, holder string) error {
	err := kube.RetryOnConflict(ctx, func() error {
		namespace := newPartialMetadata("Namespace")
		found, err := read(ctx, hub, namespace, client.ObjectKey{Name: name})
		if err != nil || !found || namespace.Annotations[kube.AnnotationDeliveryHolder] != holder {
			return err
		}
		return client.IgnoreNotFound(patchHolder(ctx, hub, namespace, ""))
	})
	if err != nil {
		return fmt.Errorf("release namespace %s: %w", name, err)
	}
	return nil
}
