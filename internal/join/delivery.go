package join

import (
	"context"
	"errors"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

const (
	// vacantLimit is how long a registration waits for an earlier namespace of the same name to go: deleting what agents
	// have in it takes Kubernetes some seconds.
	vacantLimit = 30 * time.Second
	vacantPoll  = time.Second / 4
)

// errClaimed says that a namespace already carries the deliveries of another cluster.
var errClaimed = errors.New("carries the deliveries of another cluster")

// deliveryNamespace returns the hub namespace in which the groups and bundles of a pull-mode cluster live, and its own
// namespace in push mode.
func deliveryNamespace(cluster *libv1beta1.SveltosCluster) string {
	namespace, _ := fleet.DeliveryNamespace(cluster)
	return namespace
}

// derivedNamespace returns the name of the namespace that is made for the deliveries of a cluster which cannot have its
// own one for them.
func derivedNamespace(r Request) string { return fleet.DerivedNamespace(r.Namespace, r.Name) }

// holderOf returns what the claim of a cluster to a namespace says: its name in its own one, and both names elsewhere.
func holderOf(r Request, namespace string) string {
	return fleet.DeliveryHolder(r.Namespace, r.Name, namespace)
}

// checkPlace refuses a cluster whose name does not fit into labels, or whose annotation names the namespace of others.
func checkPlace(cluster *libv1beta1.SveltosCluster) error {
	if long := fleet.NameTooLong(cluster); long != "" {
		return errors.New(long)
	}
	if _, foreign := fleet.DeliveryNamespace(cluster); foreign {
		return fmt.Errorf("annotation %s names namespace %s, which is not the cluster's", kube.AnnotationDeliveryNS, cluster.Annotations[kube.AnnotationDeliveryNS])
	}
	return nil
}

// claimDelivery finds the namespace for the deliveries of a cluster, and makes it that cluster's alone: the cluster's
// own namespace if no other pull-mode cluster has it, else one derived from both names. A cluster keeps the one that it
// has claimed, whatever its annotation says; that of a new one is empty.
func (l *ledger) claimDelivery(ctx context.Context, r Request, cluster *libv1beta1.SveltosCluster) (string, error) {
	claimed, err := l.claimedDelivery(ctx, r)
	if claimed != "" || err != nil {
		return claimed, err
	}
	if err := checkPlace(cluster); err != nil {
		return "", err
	}
	// Bundles for several members live in kube.AgentNamespace, so that no single cluster may claim it.
	if deliveryNamespace(cluster) == r.Namespace && r.Namespace != kube.AgentNamespace {
		err := l.claim(ctx, r.Namespace, holderOf(r, r.Namespace))
		if err == nil {
			return r.Namespace, nil
		}
		if !errors.Is(err, errClaimed) {
			return "", err
		}
	}
	derived := derivedNamespace(r)
	if err := l.awaitVacant(ctx, derived); err != nil {
		return "", err
	}
	holder := holderOf(r, derived)
	created, err := l.makeNamespace(ctx, derived, map[string]string{kube.AnnotationDeliveryHolder: holder})
	if err != nil || created {
		return derived, err
	}
	return derived, l.claim(ctx, derived, holder)
}

// claimedDelivery returns the namespace that is claimed for the deliveries of a cluster, "" if there is none or it is
// being deleted. A derived one comes first: with an annotation that was lost, the cluster may have claimed its own one
// besides.
func (l *ledger) claimedDelivery(ctx context.Context, r Request) (string, error) {
	for _, name := range []string{derivedNamespace(r), r.Namespace} {
		namespace := &corev1.Namespace{}
		err := l.hubClient.Get(ctx, client.ObjectKey{Name: name}, namespace)
		if client.IgnoreNotFound(err) != nil {
			return "", fmt.Errorf("read namespace %s: %w", name, err)
		}
		if err != nil || namespace.DeletionTimestamp != nil || namespace.Annotations[kube.AnnotationDeliveryHolder] != holderOf(r, name) {
			continue
		}
		if name != r.Namespace && namespace.Labels[registrationLabel] == r.Name || name == r.Namespace && name != kube.AgentNamespace {
			return name, nil
		}
	}
	return "", nil
}

// awaitVacant waits while the namespace is going away, as that of a cluster does which has just been deregistered.
func (l *ledger) awaitVacant(ctx context.Context, name string) error {
	limited, cancel := context.WithTimeout(ctx, vacantLimit)
	defer cancel()
	going := false
	err := wait.PollUntilContextCancel(limited, vacantPoll, true, func(ctx context.Context) (bool, error) {
		namespace := &corev1.Namespace{}
		err := l.hubClient.Get(ctx, client.ObjectKey{Name: name}, namespace)
		if apierrors.IsNotFound(err) {
			return true, nil
		}
		going = err == nil && namespace.DeletionTimestamp != nil
		return !going, err
	})
	if err != nil && going && ctx.Err() == nil {
		return fmt.Errorf("namespace %s has been going away for longer than %s; something in it cannot be deleted", name, vacantLimit)
	}
	if err != nil {
		return fmt.Errorf("read namespace %s: %w", name, err)
	}
	return nil
}

// claim writes holder into the namespace's claim unless another one is there, which is errClaimed. A namespace that is
// not the cluster's own must have been made for it, or else this fails with ErrForeign.
func (l *ledger) claim(ctx context.Context, name, holder string) error {
	return kube.RetryOnConflict(ctx, func() error {
		namespace := &corev1.Namespace{}
		if err := l.hubClient.Get(ctx, client.ObjectKey{Name: name}, namespace); err != nil {
			return fmt.Errorf("read namespace %s: %w", name, err)
		}
		// What is delivered can be read by whoever may read in the namespace, so that it must not be somebody else's.
		if name != l.request.Namespace && namespace.Labels[registrationLabel] != l.request.Name {
			return fmt.Errorf("namespace %s, which the deliveries of the cluster need, %w", name, ErrForeign)
		}
		switch namespace.Annotations[kube.AnnotationDeliveryHolder] {
		case holder:
			return nil
		case "":
			if err := l.checkUnused(ctx, name); err != nil {
				return err
			}
		default:
			return fmt.Errorf("namespace %s %w", name, errClaimed)
		}
		// Noted before the request, since a request that was cut off may have done its work.
		l.undo = append(l.undo, func(ctx context.Context) error { return l.giveUp(ctx, name, holder) })
		return l.writeClaim(ctx, namespace, holder)
	})
}

// checkUnused returns errClaimed if the Lease of another cluster's agent is in a namespace without a claim: the claim
// was lost then.
func (l *ledger) checkUnused(ctx context.Context, name string) error {
	leases := &metav1.PartialObjectMetadataList{}
	leases.SetGroupVersionKind(coordinationv1.SchemeGroupVersion.WithKind("LeaseList"))
	if err := l.hubClient.List(ctx, leases, client.InNamespace(name), client.HasLabels{registrationLabel}); err != nil {
		return fmt.Errorf("list Leases in namespace %s: %w", name, err)
	}
	for i := range leases.Items {
		if leases.Items[i].Labels[registrationLabel] != l.request.Name {
			return fmt.Errorf("namespace %s %w", name, errClaimed)
		}
	}
	return nil
}

// giveUp releases a claim, unless another registration of the same cluster relies on it.
func (l *ledger) giveUp(ctx context.Context, name, holder string) error {
	if relied, err := l.reliedOn(ctx); relied || err != nil {
		return err
	}
	return releaseClaim(ctx, l.hubClient, name, holder)
}

// reliedOn says whether another registration of the same cluster succeeded meanwhile: the ServiceAccount is still there
// then.
func (l *ledger) reliedOn(ctx context.Context) (bool, error) {
	account := &corev1.ServiceAccount{}
	err := l.hubClient.Get(ctx, client.ObjectKey{Namespace: l.request.Namespace, Name: l.request.Name}, account)
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("read ServiceAccount %s: %w", l.request.key(), err)
	}
	return err == nil && account.Labels[registrationLabel] == l.request.Name && account.DeletionTimestamp == nil, nil
}

func (l *ledger) writeClaim(ctx context.Context, namespace *corev1.Namespace, holder string) error {
	before := namespace.DeepCopy()
	if namespace.Annotations == nil {
		namespace.Annotations = map[string]string{}
	}
	namespace.Annotations[kube.AnnotationDeliveryHolder] = holder
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	err := l.hubClient.Patch(ctx, namespace, patch, client.FieldOwner(kube.FieldManager))
	if err != nil && !apierrors.IsConflict(err) {
		return fmt.Errorf("claim namespace %s: %w", namespace.Name, err)
	}
	return err
}

// releaseClaim takes the claim of holder off a namespace; any other claim stays.
func releaseClaim(ctx context.Context, hubClient client.Client, name, holder string) error {
	err := kube.RetryOnConflict(ctx, func() error {
		namespace := &corev1.Namespace{}
		if err := hubClient.Get(ctx, client.ObjectKey{Name: name}, namespace); err != nil {
			return client.IgnoreNotFound(err)
		}
		if namespace.Annotations[kube.AnnotationDeliveryHolder] != holder {
			return nil
		}
		before := namespace.DeepCopy()
		delete(namespace.Annotations, kube.AnnotationDeliveryHolder)
		patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
		return client.IgnoreNotFound(hubClient.Patch(ctx, namespace, patch, client.FieldOwner(kube.FieldManager)))
	})
	if err != nil {
		return fmt.Errorf("release namespace %s: %w", name, err)
	}
	return nil
}
