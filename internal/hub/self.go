package hub

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// selfRegistration registers the hub itself as a member.
type selfRegistration struct{ hub client.Client }

// Start implements manager.Runnable. It creates the SveltosCluster of the hub if it does not exist. The cluster has no
// kubeconfig: the hub uses its own.
func (r selfRegistration) Start(ctx context.Context) error {
	if err := ensureNamespace(ctx, r.hub, fleet.HubNamespace); err != nil {
		return err
	}
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: fleet.HubNamespace, Name: fleet.HubName}}
	err := r.hub.Create(ctx, cluster, client.FieldOwner(kube.FieldManager))
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("register the hub as %s/%s: %w", fleet.HubNamespace, fleet.HubName, err)
	}
	return nil
}
