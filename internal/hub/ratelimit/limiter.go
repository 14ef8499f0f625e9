// Package ratelimit limits the reconciles that the agent of a member can cause, and the requests for certificates of
// one requester.
//
// An agent writes the status of its cluster and of its groups, and renews its Lease. Without a limit, an agent that
// continuously changes them would make the hub continuously render its content and match profiles. A burst of changes
// is reconciled at once, so that a normal agent is not delayed. Since an agent can have many groups, a second limit
// applies to all objects of one member together (NewWithin).
//
// Start reading at Limiter.Handler.
package ratelimit

import (
	"context"
	"maps"
	"sync"
	"time"

	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// minPruneSize is the minimum number of keys at which expired keys are removed.
const minPruneSize = 1000

// Limiter limits events by key: it allows a burst at once, and then one event per interval. It is safe for concurrent
// use.
type Limiter struct {
	interval time.Duration
	burst    int
	clock    clock.PassiveClock
	// members limits the requests of one member together, by its delivery namespace. It may be nil.
	members *Limiter

	// mu guards the fields below. It is acquired before members.mu.
	mu        sync.Mutex
	byKey     map[string]usage
	pruneSize int
}

// usage is the state of one key.
type usage struct {
	// next is the time for which the last event was allowed. Delay merges all events until then into one.
	next time.Time
	// full is the time at which the whole burst is available again.
	full time.Time
}

// New returns a Limiter that allows burst events per key at once, and one per interval afterwards.
func New(interval time.Duration, burst int, clock clock.PassiveClock) *Limiter {
	return &Limiter{interval: interval, burst: burst, clock: clock, byKey: map[string]usage{}, pruneSize: minPruneSize}
}

// NewWithin returns a Limiter whose Handler applies two limits: burst and interval for each key and request, and
// members for all requests of a member. The keys of members are delivery namespaces.
func NewWithin(members *Limiter, interval time.Duration, burst int) *Limiter {
	l := New(interval, burst, members.clock)
	l.members = members
	return l
}

// Delay counts an event and returns the time until it may be handled, 0 for at once. Further events during the delay
// end at the same time, so one reconcile handles all of them.
func (l *Limiter) Delay(key string) time.Duration {
	return l.delay(key, func(time.Time) time.Time { return time.Time{} })
}

// delay is Delay with a second limit: reserve is called for each event that is not merged, and returns the earliest
// time at which the second limit allows it.
func (l *Limiter) delay(key string, reserve func(now time.Time) time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.clock.Now()
	known := l.byKey[key]
	if known.next.After(now) {
		return known.next.Sub(now)
	}
	next, full := l.nextAllowed(known, now)
	next = latest(next, reserve(now))
	l.byKey[key] = usage{next: next, full: full.Add(l.interval)}
	l.prune(now)
	return next.Sub(now)
}

// reserve counts an event and returns the time at which it is allowed. It merges no events.
func (l *Limiter) reserve(key string, now time.Time) time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	next, full := l.nextAllowed(l.byKey[key], now)
	l.byKey[key] = usage{next: next, full: full.Add(l.interval)}
	l.prune(now)
	return next
}

// Allow returns whether an event may be handled now, and counts it if so. Unlike Delay it merges no events.
func (l *Limiter) Allow(key string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.clock.Now()
	next, full := l.nextAllowed(l.byKey[key], now)
	if next.After(now) {
		return false
	}
	l.byKey[key] = usage{next: now, full: full.Add(l.interval)}
	l.prune(now)
	return true
}

// nextAllowed returns the earliest time for the next event, and the time at which the whole burst would be available
// again without this event.
func (l *Limiter) nextAllowed(known usage, now time.Time) (next, full time.Time) {
	full = latest(known.full, now)
	return latest(now, full.Add(-time.Duration(l.burst-1)*l.interval)), full
}

// prune removes expired keys. The caller must hold mu.
func (l *Limiter) prune(now time.Time) {
	if len(l.byKey) > l.pruneSize {
		maps.DeleteFunc(l.byKey, func(_ string, u usage) bool { return !u.full.After(now) && !u.next.After(now) })
		l.pruneSize = max(minPruneSize, 2*len(l.byKey))
	}
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// Handler returns a handler that enqueues the requests of an object. It limits updates by key. key must return "" for
// updates that no agent can have written: these are not delayed.
func (l *Limiter) Handler(requests handler.MapFunc, key func(before, after client.Object) string) handler.EventHandler {
	enqueue := func(ctx context.Context, obj client.Object, queue workqueue.TypedRateLimitingInterface[reconcile.Request], delay time.Duration) {
		for _, request := range requests(ctx, obj) {
			queue.AddAfter(request, delay)
		}
	}
	return handler.Funcs{
		CreateFunc: func(ctx context.Context, e event.CreateEvent, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
			enqueue(ctx, e.Object, queue, 0)
		},
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
			limited := key(e.ObjectOld, e.ObjectNew)
			switch {
			case limited == "":
				enqueue(ctx, e.ObjectNew, queue, 0)
			case l.members == nil:
				enqueue(ctx, e.ObjectNew, queue, l.Delay(limited))
			default:
				for _, request := range requests(ctx, e.ObjectNew) {
					queue.AddAfter(request, l.delay(limited+" "+request.String(), func(now time.Time) time.Time {
						return l.members.reserve(deliveryNamespaceOf(e.ObjectNew), now)
					}))
				}
			}
		},
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
			enqueue(ctx, e.Object, queue, 0)
		},
	}
}
