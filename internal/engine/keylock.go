package engine

import (
	"context"
	"sync"
)

// keyLock is a mutex per key. A caller locks all its keys at once, so that callers cannot deadlock.
type keyLock[K comparable] struct {
	// mu guards taken and freed.
	mu    sync.Mutex
	taken map[K]bool
	freed chan struct{} // closed and replaced when keys are released
}

func newKeyLock[K comparable]() *keyLock[K] {
	return &keyLock[K]{taken: map[K]bool{}, freed: make(chan struct{})}
}

// acquire waits until all keys are free, locks them and returns the function that releases them.
func (g *keyLock[K]) acquire(ctx context.Context, keys ...K) (release func(), err error) {
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

// awaitFreed waits until keys are released. It pauses the stall timer meanwhile.
func awaitFreed(ctx context.Context, freed <-chan struct{}) error {
	defer pauseStallTimer(ctx)()
	select {
	case <-freed:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (g *keyLock[K]) try(keys []K) (<-chan struct{}, bool) {
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

func (g *keyLock[K]) release(keys []K) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, key := range keys {
		delete(g.taken, key)
	}
	close(g.freed)
	g.freed = make(chan struct{})
}
