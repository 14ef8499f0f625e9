package registration

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// messagePrefix is the prefix of the failureMessage of a cluster that cannot be registered; the reason follows.
const messagePrefix = "registering: "

// state is shared by the steps of one reconcile.
type state struct {
	cluster *libv1beta1.SveltosCluster
	// isNew is true if this reconcile has set the finalizer: the cluster has no objects yet.
	isNew bool
	// manifestAfter is the delay before the manifest must be checked again; zero for none.
	manifestAfter time.Duration
}

// ensureManifest maintains the manifest while the cluster needs one.
func (c *Controller) ensureManifest(ctx context.Context, s *state) error {
	after, err := c.EnsureManifest(ctx, s.cluster)
	s.manifestAfter = after
	return err
}

// report records an event for a failure, and writes it to failureMessage of a pull member that is not ready, unless
// another controller has written a message. Without a failure it deletes its earlier message.
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
	isOwnMessage := old == "" || strings.HasPrefix(old, messagePrefix)
	if s.cluster.Status.Ready || !s.cluster.Spec.PullMode || !isOwnMessage || message == old {
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
