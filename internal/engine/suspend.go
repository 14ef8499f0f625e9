package engine

import (
	"context"
	"errors"
	"fmt"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
)

// Suspend stops the correction of drift and the retries of id until the bundle is converged or withdrawn. It waits for
// the end of the current run. It returns the report in the record, without a State if there is no complete record.
func (e *Engine) Suspend(ctx context.Context, id bundle.ID) (bundle.Report, error) {
	unlock, err := e.bundleLocks.acquire(ctx, id)
	if err != nil {
		return bundle.Report{ID: id}, fmt.Errorf("suspend %s: %w", id, err)
	}
	defer unlock()
	e.failedRuns.forget(id)
	rec, err := e.store.Load(ctx, id)
	if errors.Is(err, inventory.ErrIncomplete) || (err == nil && !rec.Exists()) {
		return bundle.Report{ID: id}, nil // without a record drift is not corrected
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
