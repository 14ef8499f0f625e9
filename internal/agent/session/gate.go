package session

import (
	"context"
	"sync"
)

// Gate holds work back while it is closed: while the cluster is paused, or this agent is not the leader.
type Gate struct {
	// mu guards the fields below.
	mu       sync.Mutex
	isClosed bool
	// changed is closed and replaced whenever isClosed changes.
	changed chan struct{}
}

// NewGate returns a Gate that is closed or open.
func NewGate(isClosed bool) *Gate { return &Gate{isClosed: isClosed, changed: make(chan struct{})} }

// SetClosed closes or opens the gate, and returns true if that is a change.
func (g *Gate) SetClosed(isClosed bool) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.isClosed == isClosed {
		return false
	}
	g.isClosed = isClosed
	close(g.changed)
	g.changed = make(chan struct{})
	return true
}

// IsOpen returns true if the gate is open.
func (g *Gate) IsOpen() bool {
	isClosed, _ := g.state()
	return !isClosed
}

func (g *Gate) state() (isClosed bool, changed <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.isClosed, g.changed
}

// WaitOpen waits until the gate is open. ok is false if ctx ended first. hasWaited is true if the gate was closed.
func (g *Gate) WaitOpen(ctx context.Context) (hasWaited, ok bool) {
	for {
		isClosed, changed := g.state()
		if !isClosed {
			return hasWaited, ctx.Err() == nil
		}
		hasWaited = true
		select {
		case <-changed:
		case <-ctx.Done():
			return hasWaited, false
		}
	}
}

// RunWhileOpen runs work each time the gate opens, until ctx ends. The context of work ends when the gate closes. work
// must run until its context ends: if it returns earlier, it is called again at once.
func (g *Gate) RunWhileOpen(ctx context.Context, work func(context.Context)) {
	for {
		if _, ok := g.WaitOpen(ctx); !ok {
			return
		}
		openCtx, cancel := context.WithCancel(ctx)
		isClosed, changed := g.state()
		if isClosed {
			cancel()
			continue
		}
		var watcher sync.WaitGroup
		watcher.Go(func() {
			defer cancel()
			select {
			case <-changed:
			case <-openCtx.Done():
			}
		})
		work(openCtx)
		cancel()
		watcher.Wait()
	}
}
