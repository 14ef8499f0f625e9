package registration

import (
	"context"
	"fmt"
	"maps"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// identityCheck is the last successful check of an agent's identity. While it is current, the next check is skipped.
type identityCheck struct {
	// delivery is the delivery namespace that the cluster has claimed.
	delivery string
	// inputs are the identityInputs of the cluster. They are empty after a check that failed.
	inputs string
	// until is the time of the next check.
	until time.Time
}

// ensureIdentity creates or repairs the identity of the cluster's agent. It sends no request while the last check is
// current, since a cluster is reconciled several times while its agent connects. The first check after a start, and the
// periodic checks, read a snapshot of all identities, and send requests only for a cluster whose identity is not
// complete.
func (c *Controller) ensureIdentity(ctx context.Context, s *state) error {
	key := client.ObjectKeyFromObject(s.cluster)
	last, isChecked := c.checks.Load(key)
	checked, _ := last.(identityCheck)
	isCurrent := isChecked && c.isCurrent(ctx, checked, s.cluster)
	if !isCurrent || !time.Now().Before(checked.until) {
		// A snapshot is used only for the first check after a start and for periodic checks: it can be older than a change,
		// and older than a failed repair.
		delivery := ""
		if isCurrent || !isChecked && !s.isNew {
			delivery = c.snapshots.findEstablished(ctx, c, s.cluster)
		}
		if delivery == "" {
			c.checks.Store(key, identityCheck{})
			var err error
			if delivery, err = c.establish(ctx, s); err != nil {
				return err
			}
		}
		checked = identityCheck{delivery: delivery, inputs: identityInputs(s.cluster), until: time.Now().Add(resyncInterval)}
		c.checks.Store(key, checked)
	}
	// ensureManifest needs the annotation, which the cached cluster may not have yet.
	s.cluster = s.cluster.DeepCopy()
	metav1.SetMetaDataAnnotation(&s.cluster.ObjectMeta, kube.AnnotationDeliveryNS, checked.delivery)
	return nil
}

// establish creates or repairs the identity, and returns the delivery namespace.
func (c *Controller) establish(ctx context.Context, s *state) (delivery string, err error) {
	if !s.isNew {
		return join.Establish(ctx, c.Live, s.cluster)
	}
	if err := c.ensureSharedObjects(ctx); err != nil {
		return "", err
	}
	return join.EstablishNew(ctx, c.Live, c.Hub, s.cluster)
}

// ensureSharedObjects creates the objects that EstablishNew needs, once for all clusters.
func (c *Controller) ensureSharedObjects(ctx context.Context) error {
	c.sharedMu.Lock()
	defer c.sharedMu.Unlock()
	if c.hasSharedObjects {
		return nil
	}
	err := join.EnsureSharedObjects(ctx, c.Live)
	c.hasSharedObjects = err == nil
	return err
}

// isCurrent returns whether the cluster, its claim and its Lease are unchanged since a check of its identity. The other
// objects of the identity are checked again after resyncInterval, see identityCheck.until.
func (c *Controller) isCurrent(ctx context.Context, checked identityCheck, cluster *libv1beta1.SveltosCluster) bool {
	delivery, isForeign := fleet.DeliveryNamespace(cluster)
	if delivery != checked.delivery || isForeign || identityInputs(cluster) != checked.inputs {
		return false
	}
	// A deregistration may have begun while this reconcile waited for the lock.
	key, current := client.ObjectKeyFromObject(cluster), &libv1beta1.SveltosCluster{}
	if err := c.Hub.Get(ctx, key, current); err != nil || !current.DeletionTimestamp.IsZero() {
		return false
	}
	namespace := &metav1.PartialObjectMetadata{}
	namespace.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	if err := c.Hub.Get(ctx, client.ObjectKey{Name: delivery}, namespace); err != nil {
		return false
	}
	isClaimed := namespace.Annotations[kube.AnnotationDeliveryHolder] == fleet.DeliveryHolder(key.Namespace, key.Name, delivery)
	return isClaimed && c.Hub.Get(ctx, client.ObjectKey{Namespace: delivery, Name: key.Name}, &coordinationv1.Lease{}) == nil
}

// identityInputs returns a string that changes if the identity must be checked again. It contains the labels, so that a
// user can trigger a check, and the connection status Down, since a damaged identity makes the agent silent.
func identityInputs(cluster *libv1beta1.SveltosCluster) string {
	annotations := maps.Clone(cluster.Annotations)
	delete(annotations, kube.AnnotationDeliveryNS) // isCurrent compares it
	return fmt.Sprint(cluster.UID, cluster.Generation, cluster.Labels, annotations, cluster.Status.ConnectionStatus == libv1beta1.ConnectionDown)
}
