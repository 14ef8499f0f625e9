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
	Engines func(ctx context.Context, m fleet.Member) (Inventory, error)
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

// FindDeployed returns what the records on m say of id.
func (d *Direct) FindDeployed(ctx context.Context, m fleet.Member, id bundle.ID) (bundle.Deployed, bool, error) {
	engine, err := d.Engines(ctx, m)
	if err != nil {
		return bundle.Deployed{}, false, fmt.Errorf("reach member %s: %w", m.Key(), err)
	}
	found, ok, err := engine.FindDeployed(ctx, id)
	if err != nil {
		return bundle.Deployed{}, false, fmt.Errorf("look for %s on member %s: %w", id, m.Key(), err)
	}
	return found, ok, nil
}

// ListDeployed lists what the records on m say.
func (d *Direct) ListDeployed(ctx context.Context, m fleet.Member) ([]bundle.Deployed, error) {
	engine, err := d.Engines(ctx, m)
	if err != nil {
		return nil, fmt.Errorf("reach member %s: %w", m.Key(), err)
	}
	all, err := engine.ListDeployed(ctx)
	if err != nil {
		return nil, fmt.Errorf("list bundles on member %s: %w", m.Key(), err)
	}
	return all, nil
}
