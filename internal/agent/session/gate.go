package session

import (
	"context"
	"sync"
)

// Gate stops work while the cluster is paused.
type Gate struct {
	// mu guards the fields below.
	mu     sync.Mutex
	closed bool
	// changed is closed, and replaced, when closed changes.
	changed chan struct{}
}

// NewGate returns a Gate that is closed or open.
func NewGate(closed bool) *Gate { return &Gate{closed: closed, changed: make(chan struct{})} }

// Set closes or opens the gate; it says whether that was a change.
func (g *Gate) Set(closed bool) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed == closed {
		return false
	}
	g.closed = closed
	close(g.changed)
	g.changed = make(chan struct{})
	return true
}

// Open says whether the gate is open.
func (g *Gate) Open() bool {
	closed, _ := g.state()
	return !closed
}

func (g *Gate) state() (closed bool, changed <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.closed, g.changed
}

// Wait returns when the gate is open, or with false when ctx ends. held says whether it had to wait.
func (g *Gate) Wait(ctx context.Context) (held, ok bool) {
	for {
		closed, changed := g.state()
		if !closed {
			return held, ctx.Err() == nil
		}
		held = true
		select {
		case <-changed:
		case <-ctx.Done():
			return held, false
		}
	}
}

// WhileOpen runs work whenever the gate is open, with a context that ends when it closes, until ctx ends.
func (g *Gate) WhileOpen(ctx context.Context, work func(context.Context)) {
	for {
		if _, ok := g.Wait(ctx); !ok {
			return
		}
		opened, cancel := context.WithCancel(ctx)
		_, changed := g.state()
		if !g.Open() {
			cancel()
			continue
		}
		var watching sync.WaitGroup
		watching.Go(func() {
			defer cancel()
			select {
			case <-changed:
			case <-opened.Done():
			}
		})
		work(opened)
		cancel()
		watching.Wait()
	}
}
