package engine

import (
	"context"
	"maps"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/bundle"
)

// newsPause is how long there is no more news of a bundle after some was told, unless an object went.
const newsPause = 3 * time.Second

// news gathers of which bundles there is some, until it is told.
type news struct {
	// mu guards what follows.
	mu      sync.Mutex
	waiting map[bundle.ID]bool
	urgent  map[bundle.ID]bool
	told    map[bundle.ID]time.Time // of late
	// some has a value when something waits.
	some chan struct{}
}

func newNews() *news {
	return &news{
		waiting: map[bundle.ID]bool{}, urgent: map[bundle.ID]bool{}, told: map[bundle.ID]time.Time{}, some: make(chan struct{}, 1),
	}
}

// add never waits. gone says that an object went: who waits for that is told at once.
func (n *news) add(id bundle.ID, s sighting) {
	n.mu.Lock()
	n.waiting[id] = true
	if s.gone {
		n.urgent[id] = true
	}
	n.mu.Unlock()
	n.wake()
}

func (n *news) wake() {
	select {
	case n.some <- struct{}{}:
	default:
	}
}

// take returns what is to be told now, and how long the rest has to wait; zero if nothing has.
func (n *news) take(now time.Time) (ids []bundle.ID, pause time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	maps.DeleteFunc(n.told, func(_ bundle.ID, last time.Time) bool { return now.Sub(last) >= newsPause })
	for id := range n.waiting {
		if last, late := n.told[id]; late && !n.urgent[id] {
			if rest := newsPause - now.Sub(last); pause == 0 || rest < pause {
				pause = rest
			}
			continue
		}
		ids = append(ids, id)
		n.told[id] = now
		delete(n.waiting, id)
		delete(n.urgent, id)
	}
	return ids, pause
}

// run tells until ctx ends. It waits a moment for more of the same first.
func (n *news) run(ctx context.Context, clock clock.WithTicker, tell func(bundle.ID)) {
	var rest <-chan time.Time // when something that waits may be told
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.some:
		case <-rest:
		}
		select {
		case <-ctx.Done():
			return
		case <-clock.After(settleTime):
		}
		ids, pause := n.take(clock.Now())
		rest = nil
		if pause > 0 {
			rest = clock.After(pause)
		}
		for _, id := range ids {
			tell(id)
		}
	}
}
