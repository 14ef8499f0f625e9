package engine

import (
	"context"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/drift"
)

// Resume converges a bundle from the content in its record, like Run.
func (e *Engine) Resume(ctx context.Context, id bundle.ID) (report bundle.Report, ok bool, err error) {
	unlock, err := e.bundleLocks.acquire(ctx, id)
	if err != nil {
		return bundle.Report{ID: id}, false, err
	}
	defer unlock()
	return e.resume(ctx, id, nil)
}

// Correct corrects all objects of a bundle, like drift.Corrector.
func (e *Engine) Correct(ctx context.Context, id bundle.ID) (drift.Result, error) {
	return driftEngine{e}.Resume(ctx, id, nil)
}
