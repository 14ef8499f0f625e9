package engine

import (
	"context"
	"sync"
)

// gate gives keys to one holder at a time. A caller gets all its keys at once or waits holding none, so callers of one gate cannot
// lock each other out.
type gate[K comparable] struct {
	// mu guards taken and freed.
	mu    sync.Mutex
	taken map[K]bool
	freed chan struct{} // closed and replaced when keys are given back
}

func newGate[K comparable]() *gate[K] {
	return &gate[K]{taken: map[K]bool{}, freed: make(chan struct{})}
}

// acquire waits until all keys are free, takes them and returns the function that gives them back.
func (g *gate[K]) acquire(ctx context.Context, keys ...K) (release func(), err error) {
	for {
		freed, ok := g.try(keys)
		if ok {
			return func() { g.release(keys) }, nil
		}
		if err := awaitFreed(ctx, freed); err != nil {
			return nil, err
		}
	}
}

// awaitFreed waits, which is no time that the caller gives the cluster.
func awaitFreed(ctx context.Context, freed <-chan struct{}) error {
	defer pause(ctx)()
	select {
	case <-freed:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (g *gate[K]) try(keys []K) (<-chan struct{}, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, key := range keys {
		if g.taken[key] {
			return g.freed, false
		}
	}
	for _, key := range keys {
		g.taken[key] = true
	}
	return nil, true
}

func (g *gate[K]) release(keys []K) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, key := range keys {
		delete(g.taken, key)
	}
	close(g.freed)
	g.freed = make(chan struct{})
}
