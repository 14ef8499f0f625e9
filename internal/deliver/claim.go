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

// checkClaim returns whether the delivery namespace of m is claimed for it. The annotation of a cluster object that
// names the namespace can be lost or changed; the claim is on the namespace itself. It fails if the claim of m is on
// its other namespace: otherwise the agent of another cluster could read m's bundles, and its deployed bundles would
// seem to be missing.
func (o *PullTransport) checkClaim(ctx context.Context, m fleet.Member) (claimed bool, err error) {
	if m.DeliveryNamespace == "" {
		return false, errors.New("it has no delivery namespace")
	}
	if m.Type != fleet.TypeSveltos {
		return true, nil // no annotation names it
	}
	claimed, err = o.isClaimed(ctx, m, m.DeliveryNamespace)
	if claimed || err != nil {
		return claimed, err
	}
	for _, other := range []string{fleet.DerivedNamespace(m.Namespace, m.Name), m.Namespace} {
		if other == m.DeliveryNamespace {
			continue
		}
		claimed, err = o.isClaimed(ctx, m, other)
		if err != nil {
			return false, err
		}
		if claimed {
			return false, fmt.Errorf("namespace %s carries its deliveries; annotation %s of the cluster does not name it", other, kube.AnnotationDeliveryNS)
		}
	}
	return false, nil
}

// isClaimed returns whether namespace is claimed for the deliveries of m.
func (o *PullTransport) isClaimed(ctx context.Context, m fleet.Member, namespace string) (bool, error) {
	obj := &metav1.PartialObjectMetadata{}
	obj.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	if err := o.hub.Get(ctx, client.ObjectKey{Name: namespace}, obj); client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("read namespace %s: %w", namespace, err)
	}
	return obj.Annotations[kube.AnnotationDeliveryHolder] == fleet.DeliveryHolder(m.Namespace, m.Name, namespace), nil
}
