package engine

import (
	"context"

	"github.com/towline/towline/internal/bundle"
)

// Resume converges a bundle from the content in its record, as Run does.
func (e *Engine) Resume(ctx context.Context, id bundle.ID) (report bundle.Report, ok bool, err error) {
	unlock, err := e.ids.acquire(ctx, id)
	if err != nil {
		return bundle.Report{ID: id}, false, err
	}
	defer unlock()
	return e.resume(ctx, id, nil)
}
