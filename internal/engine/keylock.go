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
func (l *keyLock[K]) acquire(ctx context.Context, keys ...K) (unlock func(), err error) {
	for {
		freed, ok := l.try(keys)
		if ok {
			return func() { l.release(keys) }, nil
		}
		if err := awaitFreed(ctx, freed); err != nil {
			return nil, err
		}
	}
}

// awaitFreed waits until keys are released. It pauses the work timer meanwhile.
func awaitFreed(ctx context.Context, freed <-chan struct{}) error {
	defer pauseWorkTimer(ctx)()
	select {
	case <-freed:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// try locks the keys if all are free. Otherwise it returns the channel that is closed at the next release.
func (l *keyLock[K]) try(keys []K) (<-chan struct{}, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, key := range keys {
		if l.taken[key] {
			return l.freed, false
		}
	}
	for _, key := range keys {
		l.taken[key] = true
	}
	return nil, true
}

func (l *keyLock[K]) release(keys []K) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, key := range keys {
		delete(l.taken, key)
	}
	close(l.freed)
	l.freed = make(chan struct{})
}
