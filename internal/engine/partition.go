package engine

import (
	"context"

	"github.com/towline/towline/internal/bundle"
)

// Serve begins to serve a partition: see inventory.Partitions. It sends no request. ended is closed when StopServing is
// called: then the caller must cancel its calls for the partition. The error wraps inventory.ErrNotServed if another
// process serves the partition.
func (e *Engine) Serve(ctx context.Context, partition string) (ended <-chan struct{}, err error) {
	return e.store.Serve(ctx, partition)
}

// StopServing must be called when another process serves a partition. The Engine then stops correcting drift in it, and
// deletes its records from memory.
func (e *Engine) StopServing(partition string) {
	e.store.StopServing(partition)
	e.failedRuns.forgetAll(e.isServedElsewhere)
}

// isServedElsewhere returns whether StopServing was called for the partition of a bundle.
func (e *Engine) isServedElsewhere(id bundle.ID) bool {
	select {
	case <-e.store.ServingEnded(id):
		return true
	default:
		return false
	}
}

// ListPartition lists the bundles of a served partition, sorted by ID. It sends a request only if neither Run nor a
// former call has read the records of the partition since Serve.
func (e *Engine) ListPartition(ctx context.Context, partition string) ([]bundle.Deployed, error) {
	records, err := e.store.ListPartition(ctx, partition)
	if err != nil {
		return nil, err
	}
	all := make([]bundle.Deployed, 0, len(records))
	for _, rec := range records {
		all = append(all, e.deployed(rec))
	}
	return all, nil
}
