package deliver

import (
	"context"
	"fmt"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
)

// ByMode is the Transport that selects a Transport by the mode of the member.
type ByMode map[fleet.Mode]Transport

var _ Transport = ByMode(nil)

// Deliver calls Deliver of the transport for m's mode.
func (t ByMode) Deliver(ctx context.Context, m fleet.Member, b bundle.Bundle) (bundle.Report, error) {
	transport, err := t.transportFor(m)
	if err != nil {
		return bundle.Report{ID: b.ID, State: bundle.StatePending}, err
	}
	return transport.Deliver(ctx, m, b)
}

// Withdraw calls Withdraw of the transport for m's mode.
func (t ByMode) Withdraw(ctx context.Context, m fleet.Member, w bundle.Withdrawal) (bool, error) {
	transport, err := t.transportFor(m)
	if err != nil {
		return false, err
	}
	return transport.Withdraw(ctx, m, w)
}

// FindDeployed calls FindDeployed of the transport for m's mode.
func (t ByMode) FindDeployed(ctx context.Context, m fleet.Member, id bundle.ID) (bundle.Deployed, bool, error) {
	transport, err := t.transportFor(m)
	if err != nil {
		return bundle.Deployed{}, false, err
	}
	return transport.FindDeployed(ctx, m, id)
}

// ListDeployed calls ListDeployed of the transport for m's mode.
func (t ByMode) ListDeployed(ctx context.Context, m fleet.Member) ([]bundle.Deployed, error) {
	transport, err := t.transportFor(m)
	if err != nil {
		return nil, err
	}
	return transport.ListDeployed(ctx, m)
}

func (t ByMode) transportFor(m fleet.Member) (Transport, error) {
	transport, ok := t[m.Mode]
	if !ok {
		return nil, fmt.Errorf("deliver to member %s: no transport for mode %q", m.Key(), m.Mode)
	}
	return transport, nil
}
