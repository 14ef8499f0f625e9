package deliver

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// errUnclaimed is the error if no namespace is claimed for the deliveries of a member yet.
var errUnclaimed = errors.New("no namespace is claimed for its deliveries yet")

// checkClaim returns nil if m.DeliveryNamespace has m's claim, which is an annotation on the namespace. It returns
// errUnclaimed if none of the namespaces that Towline chooses for m has it, and another error if another one of them
// has it. m.DeliveryNamespace comes from an annotation on the cluster object, which can be lost or changed: with the
// wrong namespace, the agent of another cluster could read m's bundles, and m's deployed bundles would seem to be
// missing.
func (t *PullTransport) checkClaim(ctx context.Context, m fleet.Member) error {
	if m.DeliveryNamespace == "" {
		return errors.New("it has no delivery namespace")
	}
	if m.Type != fleet.TypeSveltos {
		return nil // only Sveltos clusters can name their namespace in an annotation
	}
	claimed, err := t.isClaimed(ctx, m, m.DeliveryNamespace)
	if claimed || err != nil {
		return err
	}
	for _, other := range []string{fleet.DerivedNamespace(m.Namespace, m.Name), m.Namespace} {
		if other == m.DeliveryNamespace {
			continue
		}
		claimed, err := t.isClaimed(ctx, m, other)
		if err != nil {
			return err
		}
		if claimed {
			return fmt.Errorf("namespace %s carries its deliveries; annotation %s of the cluster does not name it", other, kube.AnnotationDeliveryNS)
		}
	}
	return errUnclaimed
}

// isClaimed returns whether namespace has m's claim.
func (t *PullTransport) isClaimed(ctx context.Context, m fleet.Member, namespace string) (bool, error) {
	obj := &metav1.PartialObjectMetadata{}
	obj.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	if err := t.hub.Get(ctx, client.ObjectKey{Name: namespace}, obj); client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("read namespace %s: %w", namespace, err)
	}
	return obj.Annotations[kube.AnnotationDeliveryHolder] == fleet.DeliveryHolder(m.Namespace, m.Name, namespace), nil
}
