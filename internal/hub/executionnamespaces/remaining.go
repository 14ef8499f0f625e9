package executionnamespaces

import (
	"context"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// withdrawRemaining withdraws this hub's deployments that have no summary or Work: first the deployments for the member
// on the hub's own cluster, then the deployments on the member. It records the deployments of other owners, which stay.
func (c *Controller) withdrawRemaining(ctx context.Context, s *state) error {
	// Only a later step sets this annotation, so everything is withdrawn already.
	if c.WithdrawRemaining == nil || s.cluster.Annotations[kube.AnnotationAgentRequest] != "" {
		return nil
	}
	pending, kept, err := c.WithdrawRemaining(ctx, s.member.OnHub())
	if err == nil && len(pending) == 0 && !s.member.Abandoned {
		pending, kept, err = c.WithdrawRemaining(ctx, s.member)
	}
	if err != nil { // the error counts as pending work: it blocks the removal only until the removal is stalled
		pending = []string{"its other deployments (" + err.Error() + ")"}
	}
	if s.cluster, err = fleet.RecordLeftBehind(ctx, c.Live, s.cluster, kept...); err != nil {
		return err
	}
	if len(pending) == 0 {
		return nil
	}
	pendingWork := pending[0] + " to be withdrawn"
	if stalled, err := c.checkStalled(ctx, s, pendingWork); err != nil || !stalled {
		return errorOrWait(err, pendingWork)
	}
	return c.abandon(ctx, s)
}
