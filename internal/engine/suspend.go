package engine

import (
	"context"
	"errors"
	"fmt"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
)

// Suspend leaves what id put on the cluster as it is from now on, drift and what failed included, until the bundle is
// converged or withdrawn; a run that is under way ends first. It returns what the record says of the bundle, without a
// State if there is no complete record.
func (e *Engine) Suspend(ctx context.Context, id bundle.ID) (bundle.Report, error) {
	release, err := e.ids.acquire(ctx, id)
	if err != nil {
		return bundle.Report{ID: id}, fmt.Errorf("suspend %s: %w", id, err)
	}
	defer release()
	rec, err := e.store.Load(ctx, id)
	if errors.Is(err, inventory.ErrIncomplete) || (err == nil && !rec.Exists()) {
		return bundle.Report{ID: id}, nil // there is nothing to heal from
	}
	if err != nil {
		return bundle.Report{ID: id}, fmt.Errorf("suspend %s: %w", id, err)
	}
	if rec.Suspended || rec.State == bundle.StateRemoving {
		return rec.Report(), nil
	}
	next := rec.Edit()
	next.Suspended = true
	if rec, err = e.store.Save(ctx, rec, next, nil); err != nil {
		return bundle.Report{ID: id}, fmt.Errorf("suspend %s: %w", id, err)
	}
	return rec.Report(), nil
}
