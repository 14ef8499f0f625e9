package deregistration

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// The timeouts of a forced deregistration of a reachable member. Objects and agents that are not removed in time stay
// on the member. The documentation names their sum, half a minute.
const (
	// forceTimeout is the timeout for all withdrawals.
	forceTimeout = 20 * time.Second
	// agentTimeout is the timeout for the agent to remove itself after the withdrawals.
	agentTimeout = 10 * time.Second
)

// checkForce checks whether the member is reachable. It forces the deregistration of an unreachable member when its
// grace period has expired, or when the namespace with its identity is being deleted. It sets the deadline of a forced
// deregistration.
func (c *Controller) checkForce(ctx context.Context, s *state) error {
	var err error
	if s.unreachable, err = c.Reachability.UnreachableReason(ctx, s.cluster); err != nil {
		return err
	}
	if !s.member.Forced {
		terminating, err := c.Reachability.terminatingNamespace(ctx, s.member)
		if err != nil {
			return err
		}
		grace := s.cluster.Spec.CleanupGracePeriod
		expired := s.unreachable != "" && grace != nil && c.Clock.Since(s.cluster.DeletionTimestamp.Time) >= grace.Duration
		if terminating == "" && !expired {
			return nil
		}
		if err := c.addOption(ctx, s, kube.DeregisterForce); err != nil {
			return err
		}
	}
	if _, set := c.deadline(s.cluster); set {
		return nil
	}
	changed := s.cluster.DeepCopy()
	c.setDeadline(changed)
	if err := c.Live.Patch(ctx, changed, client.MergeFrom(s.cluster), client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("set the deadline: %w", err)
	}
	s.cluster = changed
	return nil
}

// addOption adds an option to the deregistration.
func (c *Controller) addOption(ctx context.Context, s *state, option string) error {
	changed := s.cluster.DeepCopy()
	if err := fleet.AddDeregisterOptions(ctx, c.Live, changed, option); err != nil {
		return err
	}
	s.cluster, s.member = changed, fleet.FromSveltosCluster(changed)
	return nil
}

// deadline returns the deadline of a forced deregistration; set is false if there is none. It ignores a deadline more
// than forceTimeout from now, which the hub cannot have written.
func (c *Controller) deadline(cluster *libv1beta1.SveltosCluster) (until time.Time, set bool) {
	until, err := time.Parse(time.RFC3339, cluster.Annotations[kube.AnnotationDeadline])
	return until, err == nil && !until.After(c.Clock.Now().Add(forceTimeout))
}

// setDeadline sets the deadline of a forced deregistration in the annotation: the deadline of the withdrawals, or, once
// the agent was ordered to remove itself, the deadline of its answer.
func (c *Controller) setDeadline(cluster *libv1beta1.SveltosCluster) {
	limit := forceTimeout
	if cluster.Annotations[kube.AnnotationAgentRequest] == kube.AgentRequestRemove {
		limit = agentTimeout
	}
	until := c.Clock.Now().Add(limit).UTC().Format(time.RFC3339)
	metav1.SetMetaDataAnnotation(&cluster.ObjectMeta, kube.AnnotationDeadline, until)
}

// timeLeft returns the time until the deadline of a forced deregistration, zero or less after it. checkForce has set
// the deadline.
func (c *Controller) timeLeft(s *state) time.Duration {
	until, _ := c.deadline(s.cluster)
	return min(until.Sub(c.Clock.Now()), forceTimeout)
}

// recordLeftBehind records that item stays on the member, in the annotation of the cluster and in an event with the
// text note.
func (c *Controller) recordLeftBehind(ctx context.Context, s *state, item, note string) error {
	changed, err := fleet.RecordLeftBehind(ctx, c.Live, s.cluster, item)
	if err != nil {
		return err
	}
	s.cluster = changed
	c.recordEvent(s, corev1.EventTypeWarning, "LeftBehind", note)
	return nil
}
