package departures

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// How long a member that can be reached and leaves by force may take; what does not go is left behind. Together they are the half minute that
// people are told of.
const (
	// forcedLimit is for withdrawing everything.
	forcedLimit = 20 * time.Second
	// orderLimit is for its agent then to remove itself.
	orderLimit = 10 * time.Second
)

// force finds out whether the member can be reached, and stops waiting for one that cannot be when its time is up, or when the namespace goes
// that its identity is in. The time of one that leaves by force begins here.
func (c *Controller) force(ctx context.Context, s *state) error {
	var err error
	if s.away, err = c.Reach.Away(ctx, s.cluster); err != nil {
		return err
	}
	if !s.member.Forced {
		doomed, err := c.Reach.doomed(ctx, s.member)
		if err != nil {
			return err
		}
		grace := s.cluster.Spec.CleanupGracePeriod
		expired := s.away != "" && grace != nil && c.Clock.Since(s.cluster.DeletionTimestamp.Time) >= grace.Duration
		if doomed == "" && !expired {
			return nil
		}
		if err := c.option(ctx, s, kube.DeregisterForce); err != nil {
			return err
		}
	}
	if _, set := c.deadline(s.cluster); set {
		return nil
	}
	bound := s.cluster.DeepCopy()
	c.setDeadline(bound)
	if err := c.Live.Patch(ctx, bound, client.MergeFrom(s.cluster), client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("note until when it is waited for: %w", err)
	}
	s.cluster = bound
	return nil
}

// option adds one to how the cluster is deregistered.
func (c *Controller) option(ctx context.Context, s *state, option string) error {
	changed := s.cluster.DeepCopy()
	if err := join.AnnotateDeparture(ctx, c.Live, changed, option); err != nil {
		return err
	}
	s.cluster, s.member = changed, fleet.FromSveltosCluster(changed)
	return nil
}

// deadline says until when a cluster that leaves by force is waited for, if the hub has noted that: it never notes what is later than the limit.
func (c *Controller) deadline(cluster *libv1beta1.SveltosCluster) (until time.Time, set bool) {
	until, err := time.Parse(time.RFC3339, cluster.Annotations[kube.AnnotationDeadline])
	return until, err == nil && !until.After(c.Clock.Now().Add(forcedLimit))
}

// setDeadline lets the time begin of what is waited for next.
func (c *Controller) setDeadline(cluster *libv1beta1.SveltosCluster) {
	limit := forcedLimit
	if cluster.Annotations[kube.AnnotationAgentOrder] == kube.AgentOrderRemove {
		limit = orderLimit
	}
	until := c.Clock.Now().Add(limit).UTC().Format(time.RFC3339)
	metav1.SetMetaDataAnnotation(&cluster.ObjectMeta, kube.AnnotationDeadline, until)
}

// remaining is how long a cluster that leaves by force is waited for yet. The time of every one of them was set before this is asked.
func (c *Controller) remaining(s *state) time.Duration {
	until, _ := c.deadline(s.cluster)
	return min(until.Sub(c.Clock.Now()), forcedLimit)
}

// leave gives something on the member up, for good: what is for the list, note is for an event.
func (c *Controller) leave(ctx context.Context, s *state, what, note string) error {
	noted, err := join.LeaveBehind(ctx, c.Live, s.cluster, what)
	if err != nil {
		return err
	}
	s.cluster = noted
	c.tell(s, corev1.EventTypeWarning, "LeftBehind", note)
	return nil
}
