package deliver

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
)

// PushTransport is the Transport for push members. It runs the engine in this process, with a client of the member.
type PushTransport struct {
	// Engines returns the engine of a member. It is called for every delivery, so it should cache engines.
	Engines func(ctx context.Context, m fleet.Member) (Engine, error)
}

var _ Transport = (*PushTransport)(nil)

// Deliver converges m to b. With an error the report has the changes that were made before. A bundle.TerminalError of
// the engine is not returned: the report has StateFailed, as in pull mode.
func (t *PushTransport) Deliver(ctx context.Context, m fleet.Member, b bundle.Bundle) (bundle.Report, error) {
	engine, err := t.Engines(ctx, m)
	if err != nil {
		return bundle.Report{ID: b.ID, State: bundle.StatePending}, fmt.Errorf("reach member %s: %w", m.Key(), err)
	}
	report, err := engine.Converge(ctx, b)
	if _, isTerminal := errors.AsType[*bundle.TerminalError](err); isTerminal {
		return report, nil
	}
	if err != nil {
		return report, fmt.Errorf("converge member %s to %s: %w", m.Key(), b.ID, err)
	}
	return report, nil
}

// Withdraw withdraws w from m.
func (t *PushTransport) Withdraw(ctx context.Context, m fleet.Member, w bundle.Withdrawal) (bool, error) {
	engine, err := t.Engines(ctx, m)
	if err != nil {
		return false, fmt.Errorf("reach member %s: %w", m.Key(), err)
	}
	done, err := engine.Withdraw(ctx, w)
	if err != nil {
		return false, fmt.Errorf("withdraw %s from member %s: %w", w.ID, m.Key(), err)
	}
	return done, nil
}

// FindDeployed returns the bundle id according to the inventory on m.
func (t *PushTransport) FindDeployed(ctx context.Context, m fleet.Member, id bundle.ID) (bundle.Deployed, bool, error) {
	engine, err := t.Engines(ctx, m)
	if err != nil {
		return bundle.Deployed{}, false, fmt.Errorf("reach member %s: %w", m.Key(), err)
	}
	found, ok, err := engine.FindDeployed(ctx, id)
	if err != nil {
		return bundle.Deployed{}, false, fmt.Errorf("read bundle %s on member %s: %w", id, m.Key(), err)
	}
	return found, ok, nil
}

// ListDeployed lists the bundles in the inventory on m, without those with invalid names: the administrators of the
// member can write there.
func (t *PushTransport) ListDeployed(ctx context.Context, m fleet.Member) ([]bundle.Deployed, error) {
	engine, err := t.Engines(ctx, m)
	if err != nil {
		return nil, fmt.Errorf("reach member %s: %w", m.Key(), err)
	}
	all, err := engine.ListDeployed(ctx)
	if err != nil {
		return nil, fmt.Errorf("list bundles on member %s: %w", m.Key(), err)
	}
	return slices.DeleteFunc(all, func(d bundle.Deployed) bool { return !d.HasValidNames() }), nil
}
