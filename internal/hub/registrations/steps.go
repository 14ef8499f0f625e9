package registrations

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// prefix begins the failureMessage of a cluster that cannot be registered; why follows.
const prefix = "registering: "

// state is what the steps of one reconcile know.
type state struct {
	cluster *libv1beta1.SveltosCluster
	// delivery is the hub namespace of the cluster's deliveries and of its agent's Lease.
	delivery string
	// again is when the manifest is due.
	again time.Duration
}

// establish makes or repairs the identity of the cluster's agent.
func (c *Controller) establish(ctx context.Context, s *state) error {
	delivery, err := join.Establish(ctx, c.Live, s.cluster)
	s.delivery = delivery
	return err
}

// expire deletes the Secret that the manifest's token is bound to, once the agent has exchanged that token: a copy of the manifest is worthless
// from then on.
func (c *Controller) expire(ctx context.Context, s *state) error {
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

// keep keeps the manifest, while one is needed.
func (c *Controller) keep(ctx context.Context, s *state) error {
	again, err := c.Keep(ctx, s.cluster)
	s.again = again
	return err
}

// report says what is wrong: in an event, and on the cluster while nobody else has anything to say there.
func (c *Controller) report(ctx context.Context, s *state, failure error) error {
	if errors.Is(failure, context.Canceled) {
		return nil
	}
	old, message := s.cluster.Status.FailureMessage, ""
	if failure != nil {
		message = prefix + strings.Join(strings.Fields(failure.Error()), " ")
		if message != old {
			c.Events.Eventf(s.cluster, nil, corev1.EventTypeWarning, "NotRegistered", libv1beta1.SveltosClusterKind, "%s", failure)
		}
	}
	mine := old == "" || strings.HasPrefix(old, prefix)
	if s.cluster.Status.Ready || !s.cluster.Spec.PullMode || !mine || message == old {
		return nil
	}
	written := s.cluster.DeepCopy()
	written.Status.FailureMessage = message
	err := c.Live.Status().Patch(ctx, written, client.MergeFrom(s.cluster), client.FieldOwner(kube.FieldManager))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("report on cluster %s: %w", client.ObjectKeyFromObject(s.cluster), err)
	}
	return nil
}
