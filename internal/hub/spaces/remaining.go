package spaces

import (
	"context"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// withdrawRemaining withdraws this hub's deployments that belong to no summary and no Work: those for the member on the
// hub, and those on the member. It records the deployments of others, which stay.
func (c *Controller) withdrawRemaining(ctx context.Context, s *state) error {
	// After the order to the agent, all has been withdrawn.
	if c.WithdrawRemaining == nil || s.cluster.Annotations[kube.AnnotationAgentOrder] != "" {
		return nil
	}
	pending, kept, err := c.WithdrawRemaining(ctx, s.member.OnHub())
	if err == nil && len(pending) == 0 && !s.member.Abandoned {
		pending, kept, err = c.WithdrawRemaining(ctx, s.member)
	}
	if err != nil { // as pending work it ends, at the latest, when the removal is stalled
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
