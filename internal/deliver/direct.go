package deliver

import (
	"context"
	"fmt"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
)

// Direct is the Transport of push: it runs the engine here, through a client of the member.
type Direct struct {
	// Engines returns the engine of a member. It is called for every delivery and keeps what should be kept.
	Engines func(ctx context.Context, m fleet.Member) (Engine, error)
}

var _ Transport = (*Direct)(nil)

// Deliver converges m to b now. The report is valid also when the error is not nil, as far as the engine came.
func (d *Direct) Deliver(ctx context.Context, m fleet.Member, b bundle.Bundle) (bundle.Report, error) {
	engine, err := d.Engines(ctx, m)
	if err != nil {
		return bundle.Report{ID: b.ID, State: bundle.StatePending}, fmt.Errorf("reach member %s: %w", m.Key(), err)
	}
	report, err := engine.Converge(ctx, b)
	if err != nil {
		return report, fmt.Errorf("converge member %s to %s: %w", m.Key(), b.ID, err)
	}
	return report, nil
}

// Withdraw withdraws w from m now.
func (d *Direct) Withdraw(ctx context.Context, m fleet.Member, w bundle.Withdrawal) (bool, error) {
	engine, err := d.Engines(ctx, m)
	if err != nil {
		return false, fmt.Errorf("reach member %s: %w", m.Key(), err)
	}
	done, err := engine.Withdraw(ctx, w)
	if err != nil {
		return false, fmt.Errorf("withdraw %s from member %s: %w", w.ID, m.Key(), err)
	}
	return done, nil
}
