package agent

import (
	"context"
	"sync"
)

// gate stops work while the cluster is paused.
type gate struct {
	// mu guards the fields below.
	mu     sync.Mutex
	closed bool
	// changed is closed, and replaced, when closed changes.
	changed chan struct{}
}

func newGate(closed bool) *gate { return &gate{closed: closed, changed: make(chan struct{})} }

// set closes or opens the gate; it says whether that was a change.
func (g *gate) set(closed bool) bool {
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

func (g *gate) state() (closed bool, changed <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.closed, g.changed
}

// wait returns when the gate is open, or with false when ctx ends. held says whether it had to wait.
func (g *gate) wait(ctx context.Context) (held, ok bool) {
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

// whileOpen runs work whenever the gate is open, with a context that ends when it closes, until ctx ends.
func (g *gate) whileOpen(ctx context.Context, work func(context.Context)) {
	for {
		if _, ok := g.wait(ctx); !ok {
			return
		}
		opened, cancel := context.WithCancel(ctx)
		_, changed := g.state()
		if closed, _ := g.state(); closed {
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
