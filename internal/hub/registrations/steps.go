package registrations

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// messagePrefix is the prefix of the failureMessage of a cluster that cannot be registered; the reason follows.
const messagePrefix = "registering: "

// state is shared by the steps of one reconcile.
type state struct {
	cluster *libv1beta1.SveltosCluster
	// delivery is the delivery namespace of the cluster, which also has its agent's Lease.
	delivery string
	// manifestAfter is the delay before the manifest must be checked again; zero for none.
	manifestAfter time.Duration
}

// ensureIdentity creates or repairs the identity of the cluster's agent.
func (c *Controller) ensureIdentity(ctx context.Context, s *state) error {
	delivery, err := join.Establish(ctx, c.Live, s.cluster)
	if err != nil {
		return err
	}
	s.delivery = delivery
	// The cache does not have the annotation yet, and the manifest names the namespace.
	s.cluster = s.cluster.DeepCopy()
	metav1.SetMetaDataAnnotation(&s.cluster.ObjectMeta, kube.AnnotationDeliveryNS, delivery)
	return nil
}

// deleteExchangedSecret deletes the Secret that the manifest's token is bound to when the agent has exchanged the
// token. Copies of the manifest are invalid afterwards.
func (c *Controller) deleteExchangedSecret(ctx context.Context, s *state) error {
	lease := &coordinationv1.Lease{}
	err := c.Hub.Get(ctx, types.NamespacedName{Namespace: s.delivery, Name: s.cluster.Name}, lease)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("read Lease of the agent: %w", err)
	}
	exchanged := types.UID(lease.Annotations[kube.AnnotationExchanged])
	if exchanged == "" {
		return nil
	}
	secret := &corev1.Secret{}
	secret.Namespace, secret.Name = s.cluster.Namespace, join.RegistrationSecret(s.cluster.Name)
	err = c.Live.Get(ctx, client.ObjectKeyFromObject(secret), secret)
	if err != nil || secret.UID != exchanged {
		return client.IgnoreNotFound(err)
	}
	if err := c.Live.Delete(ctx, secret, client.Preconditions{UID: &exchanged}); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete Secret %s: %w", client.ObjectKeyFromObject(secret), err)
	}
	return nil
}

// ensureManifest maintains the manifest while the cluster needs one.
func (c *Controller) ensureManifest(ctx context.Context, s *state) error {
	after, err := c.EnsureManifest(ctx, s.cluster)
	s.manifestAfter = after
	return err
}

// report records an event for a failure, and sets it as failureMessage unless another controller has set one.
func (c *Controller) report(ctx context.Context, s *state, failure error) error {
	if errors.Is(failure, context.Canceled) {
		return nil
	}
	old, message := s.cluster.Status.FailureMessage, ""
	if failure != nil {
		message = messagePrefix + strings.Join(strings.Fields(failure.Error()), " ")
		if message != old {
			c.Events.Eventf(s.cluster, nil, corev1.EventTypeWarning, "NotRegistered", libv1beta1.SveltosClusterKind, "%s", failure)
		}
	}
	ours := old == "" || strings.HasPrefix(old, messagePrefix)
	if s.cluster.Status.Ready || !s.cluster.Spec.PullMode || !ours || message == old {
		return nil
	}
	changed := s.cluster.DeepCopy()
	changed.Status.FailureMessage = message
	err := c.Live.Status().Patch(ctx, changed, client.MergeFrom(s.cluster), client.FieldOwner(kube.FieldManager))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("report on cluster %s: %w", client.ObjectKeyFromObject(s.cluster), err)
	}
	return nil
}
