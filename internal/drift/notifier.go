package drift

import (
	"context"
	"maps"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/bundle"
)

const (
	// notifyInterval is the minimum time between two notifications about a bundle, unless an object was deleted.
	notifyInterval = 3 * time.Second
	// notifyDelay is the delay between an event and its notification, so that related events are notified together.
	notifyDelay = 100 * time.Millisecond
)

// changeNotifier collects the bundles with changed objects, and calls OnChange for each bundle at most once per
// notifyInterval, except after deletions.
type changeNotifier struct {
	// mu guards the fields below.
	mu       sync.Mutex
	pending  map[bundle.ID]bool
	urgent   map[bundle.ID]bool
	notified map[bundle.ID]time.Time // the last calls of OnChange, in the last notifyInterval
	// added has room for one signal. It wakes the goroutine of run, because pending has new bundles.
	added chan struct{}
}

func newChangeNotifier() *changeNotifier {
	return &changeNotifier{
		pending: map[bundle.ID]bool{}, urgent: map[bundle.ID]bool{}, notified: map[bundle.ID]time.Time{}, added: make(chan struct{}, 1),
	}
}

// add adds a bundle with a changed object. It never blocks. A deletion is urgent, because withdrawals wait for it.
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

// takeDue removes and returns the bundles for which OnChange may be called now. pause is the time until the next of the
// remaining bundles is due, zero if none remains.
func (n *changeNotifier) takeDue(now time.Time) (ids []bundle.ID, pause time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	maps.DeleteFunc(n.notified, func(_ bundle.ID, last time.Time) bool { return now.Sub(last) >= notifyInterval })
	for id := range n.pending {
		if last, isRecent := n.notified[id]; isRecent && !n.urgent[id] {
			if remaining := notifyInterval - now.Sub(last); pause == 0 || remaining < pause {
				pause = remaining
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

// run calls notify for the added bundles until ctx ends. Before each round it waits for notifyDelay, so that related
// events are notified together.
func (n *changeNotifier) run(ctx context.Context, clock clock.WithTicker, notify func(bundle.ID)) {
	var nextAllowed <-chan time.Time // when the next notification is allowed
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.added:
		case <-nextAllowed:
		}
		select {
		case <-ctx.Done():
			return
		case <-clock.After(notifyDelay):
		}
		ids, pause := n.takeDue(clock.Now())
		nextAllowed = nil
		if pause > 0 {
			nextAllowed = clock.After(pause)
		}
		for _, id := range ids {
			notify(id)
		}
	}
}
