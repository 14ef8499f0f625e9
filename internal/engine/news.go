package engine

import (
	"context"
	"sync"

	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/bundle"
)

// news gathers of which bundles there is some, until it is told.
type news struct {
	// mu guards waiting.
	mu      sync.Mutex
	waiting map[bundle.ID]bool
	// some has a value when something waits.
	some chan struct{}
}

func newNews() *news { return &news{waiting: map[bundle.ID]bool{}, some: make(chan struct{}, 1)} }

// add never waits.
func (n *news) add(id bundle.ID) {
	n.mu.Lock()
	n.waiting[id] = true
	n.mu.Unlock()
	select {
	case n.some <- struct{}{}:
	default:
	}
}

func (n *news) take() map[bundle.ID]bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	taken := n.waiting
	n.waiting = map[bundle.ID]bool{}
	return taken
}

// run tells until ctx ends. It waits a moment for more of the same first.
func (n *news) run(ctx context.Context, clock clock.WithTicker, tell func(bundle.ID)) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.some:
		}
		select {
		case <-ctx.Done():
			return
		case <-clock.After(settleTime):
		}
		for id := range n.take() {
			tell(id)
		}
	}
}
