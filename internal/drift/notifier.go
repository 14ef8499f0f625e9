package drift

import (
	"context"
	"maps"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/bundle"
)

// notifyInterval is the shortest time between two notifications of a bundle, unless an object was deleted.
const notifyInterval = 3 * time.Second

// changeNotifier collects the bundles with changed objects, and notifies of each bundle at most once per
// notifyInterval.
type changeNotifier struct {
	// mu guards the fields below.
	mu       sync.Mutex
	pending  map[bundle.ID]bool
	urgent   map[bundle.ID]bool
	notified map[bundle.ID]time.Time // in the last notifyInterval
	// added has a value when something is pending.
	added chan struct{}
}

func newChangeNotifier() *changeNotifier {
	return &changeNotifier{
		pending: map[bundle.ID]bool{}, urgent: map[bundle.ID]bool{}, notified: map[bundle.ID]time.Time{}, added: make(chan struct{}, 1),
	}
}

// add never blocks. The deletion of an object is urgent: withdrawals wait for it.
func (n *changeNotifier) add(id bundle.ID, o observation) {
	n.mu.Lock()
	n.pending[id] = true
	if o.deleted {
		n.urgent[id] = true
	}
	n.mu.Unlock()
	n.signal()
}

func (n *changeNotifier) signal() {
	select {
	case n.added <- struct{}{}:
	default:
	}
}

// take returns the bundles to notify of now, and how long the others have to wait; zero if there are none.
func (n *changeNotifier) take(now time.Time) (ids []bundle.ID, pause time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	maps.DeleteFunc(n.notified, func(_ bundle.ID, last time.Time) bool { return now.Sub(last) >= notifyInterval })
	for id := range n.pending {
		if last, recent := n.notified[id]; recent && !n.urgent[id] {
			if rest := notifyInterval - now.Sub(last); pause == 0 || rest < pause {
				pause = rest
			}
			continue
		}
		ids = append(ids, id)
		n.notified[id] = now
		delete(n.pending, id)
		delete(n.urgent, id)
	}
	return ids, pause
}

// run calls notify until ctx ends. It waits for further events of the same change first.
func (n *changeNotifier) run(ctx context.Context, clock clock.WithTicker, notify func(bundle.ID)) {
	var rest <-chan time.Time // when the next notification is allowed
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.added:
		case <-rest:
		}
		select {
		case <-ctx.Done():
			return
		case <-clock.After(batchDelay):
		}
		ids, pause := n.take(clock.Now())
		rest = nil
		if pause > 0 {
			rest = clock.After(pause)
		}
		for _, id := range ids {
			notify(id)
		}
	}
}
