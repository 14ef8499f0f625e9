package spaces

import (
	"context"

	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// withdrawRest withdraws what the member holds of this hub without a summary or Work, and lists what others deployed, which stays on it.
func (c *Controller) withdrawRest(ctx context.Context, s *state) error {
	if c.WithdrawRest == nil || s.member.Abandoned || s.cluster.Annotations[kube.AnnotationAgentOrder] != "" {
		return nil
	}
	pending, kept, err := c.WithdrawRest(ctx, s.member)
	if err != nil {
		pending = []string{"what else it holds (" + err.Error() + ")"}
	}
	if s.cluster, err = join.LeaveBehind(ctx, c.Live, s.cluster, kept...); err != nil {
		return err
	}
	if len(pending) == 0 {
		return nil
	}
	what := pending[0] + " to be withdrawn"
	if hopeless, err := c.hopeless(ctx, s, what); err != nil || !hopeless {
		return waiting(err, what)
	}
	return c.abandon(ctx, s)
}
