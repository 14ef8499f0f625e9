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

// errClaimed says that a namespace already carries the deliveries of another cluster.
var errClaimed = errors.New("carries the deliveries of another cluster")

// deliveryNamespace returns the hub namespace in which the groups and bundles of a pull-mode cluster live, and its own
// namespace in push mode.
func deliveryNamespace(cluster *libv1beta1.SveltosCluster) string {
	namespace, _ := fleet.DeliveryNamespace(cluster)
	return namespace
}

// derivedNamespace returns the name of the delivery namespace of a cluster whose own namespace another cluster uses.
func derivedNamespace(r Request) string { return fleet.DerivedNamespace(r.Namespace, r.Name) }

// holderOf returns the value of a cluster's claim to a delivery namespace: the cluster's name in its own namespace, and
// its namespace and name in another one.
func holderOf(r Request, namespace string) string {
	return fleet.DeliveryHolder(r.Namespace, r.Name, namespace)
}

// checkDelivery refuses a cluster whose name does not fit into labels, or whose annotation names the namespace of
// others.
func checkDelivery(cluster *libv1beta1.SveltosCluster) error {
	if long := fleet.ValidatePullName(cluster); long != "" {
		return errors.New(long)
	}
	if _, foreign := fleet.DeliveryNamespace(cluster); foreign {
		return fmt.Errorf("annotation %s names namespace %s, which is not the cluster's", kube.AnnotationDeliveryNS, cluster.Annotations[kube.AnnotationDeliveryNS])
	}
	return nil
}

// claimDelivery finds the namespace for the deliveries of a cluster, and claims it for that cluster alone: the
// cluster's own namespace if no other pull-mode cluster has claimed it, else one derived from both names. A cluster
// keeps the namespace that it has claimed, whatever its annotation is.
func (r *registration) claimDelivery(ctx context.Context, cluster *libv1beta1.SveltosCluster) (string, error) {
	claimed, err := r.claimedDelivery(ctx, r.hub)
	if claimed != "" || err != nil {
		return claimed, err
	}
	return r.claimFreeDelivery(ctx, cluster)
}

// claimFreeDelivery is claimDelivery for a cluster that has claimed no namespace.
func (r *registration) claimFreeDelivery(ctx context.Context, cluster *libv1beta1.SveltosCluster) (string, error) {
	if err := checkDelivery(cluster); err != nil {
		return "", err
	}
	// Bundles for several members live in kube.AgentNamespace, so that no single cluster may claim it.
	if own := r.request.Namespace; deliveryNamespace(cluster) == own && own != kube.AgentNamespace {
		if err := r.claim(ctx, own); !errors.Is(err, errClaimed) {
			return own, err
		}
	}
	derived := derivedNamespace(r.request)
	namespace := labelled(&corev1.Namespace{ObjectMeta: named("", derived)}, r.request.Name)
	namespace.Annotations = map[string]string{kube.AnnotationDeliveryHolder: holderOf(r.request, derived)}
	if r.isNew {
		if err := r.hub.Create(ctx, namespace.DeepCopy(), client.FieldOwner(kube.FieldManager)); !apierrors.IsAlreadyExists(err) {
			return derived, err
		}
	}
	if err := r.ensureNamespace(ctx, namespace); err != nil {
		return "", err
	}
	return derived, r.claim(ctx, derived)
}

// claimedDelivery returns the namespace that is claimed for the deliveries of a cluster, "" if there is none or it is
// being deleted.
func (r *registration) claimedDelivery(ctx context.Context, reader client.Reader) (string, error) {
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

// claimedNamespaces returns the namespaces that are claimed for the deliveries of a cluster. The derived one is
// the first: a cluster that has lost its annotation can have claimed its own one too.
func claimedNamespaces(ctx context.Context, hub client.Reader, r Request) ([]*metav1.PartialObjectMetadata, error) {
	var claimed []*metav1.PartialObjectMetadata
	for _, name := range []string{derivedNamespace(r), r.Namespace} {
		namespace := metadataOf("Namespace")
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

// claim annotates the namespace with its holder. It returns errClaimed if the namespace has another one. A namespace
// that is not the cluster's own must have been created for it: every user who may read in a namespace can read the
// deliveries. If the cache is stale, the write request fails, and the namespace is read from the hub.
func (r *registration) claim(ctx context.Context, name string) error {
	holder, reader := holderOf(r.request, name), r.cache
	isStale := func(err error) bool { return apierrors.IsConflict(err) || apierrors.IsNotFound(err) }
	err := kube.RetryOn(ctx, isStale, func() error {
		namespace := metadataOf("Namespace")
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

// patchHolder writes the holder of a namespace, "" for none, if nobody has changed the namespace since it was read.
func patchHolder(ctx context.Context, hub client.Client, namespace *metav1.PartialObjectMetadata, holder string) error {
	before := namespace.DeepCopy()
	metav1.SetMetaDataAnnotation(&namespace.ObjectMeta, kube.AnnotationDeliveryHolder, holder)
	if holder == "" {
		delete(namespace.Annotations, kube.AnnotationDeliveryHolder)
	}
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	return hub.Patch(ctx, namespace, patch, client.FieldOwner(kube.FieldManager))
}

// checkUnused returns errClaimed if the Lease of another cluster's agent is in a namespace without a claim: the claim
// was lost then.
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

// releaseClaim removes the claim of holder from a namespace; any other claim stays.
func releaseClaim(ctx context.Context, hub client.Client, name, holder string) error {
	err := kube.RetryOnConflict(ctx, func() error {
		namespace := metadataOf("Namespace")
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
