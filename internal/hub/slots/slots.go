// Package slots shares the workers of a controller among clusters, their namespaces and profiles.
//
// The controllers of summaries, Works, clusters, deregistrations and unclaimed bundles acquire a slot for each request.
// A cluster that does not answer, all clusters of a namespace together, or a profile whose rendering does not end,
// occupy at most their own share of the workers. A request without a free slot waits outside the queue and occupies no
// worker.
//
// Terms:
//
//   - Pool: workers for the requests of one kind, for example for push members.
//   - Slot: the right to use a worker for one request.
//   - Scope: a pool, a key in a pool, the slow keys of a pool, or the requests of a key with Key.Slow that have a slow
//     key. A request needs a slot in several scopes.
//   - Quota: a scope with the maximum of its slots.
package slots

import (
	"slices"
	"sync"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// Pool is a group of workers. The controller must have as many workers as all its pools together.
type Pool struct {
	Name string
	// Workers is the maximum of concurrent requests, and Slow the maximum of concurrent requests with a slow key.
	Workers, Slow int
}

// Key is a cluster, a namespace or a profile that occupies workers of a pool.
type Key struct {
	Name string
	// Max is the maximum of concurrent requests with this key; it is 1 while the key is slow. Shared is the number of
	// workers that all keys share. When they are in use, the other workers of the pool serve only keys without a running
	// request, so that a few keys cannot occupy all workers.
	Max, Shared int
	// Slow is the maximum of concurrent requests that have this key and a slow key, so that a namespace cannot occupy all
	// workers for slow keys. Zero is Pool.Slow.
	Slow int
}

// Slots is TypedSlots for controllers with the usual requests. Create it with New.
type Slots = TypedSlots[reconcile.Request]

// Slot is TypedSlot for controllers with the usual requests.
type Slot = TypedSlot[reconcile.Request]

// TypedSlots assigns workers to requests. Create it with NewTyped.
type TypedSlots[R comparable] struct {
	// Queue gets the waiting requests when slots become free. It is set before the first request.
	Queue workqueue.TypedRateLimitingInterface[R]

	// mu guards the fields below.
	mu   sync.Mutex
	used map[scope]int
	// slow has the scopes of the keys whose last request was slow.
	slow map[scope]bool
	// waiting has the requests without a slot, by the scope without a free slot.
	waiting   map[scope][]R
	isWaiting map[R]bool
	// short has the keys whose requests wait although the key has fewer than Key.Max: they wait for shared workers.
	short map[scope]quota
	// queued has the requests that were moved from waiting to the queue, with the quota that had a free slot.
	queued map[R]quota
}

// scope identifies a key in a pool, a whole pool (key ""), the slow keys of a pool (key slowKeys), or the requests of a
// key with a slow key (key slowKeys and the name).
type scope struct{ pool, key string }

// slowKeys is the key of the scope for all slow keys of a pool. The name of a Key does not begin with it.
const slowKeys = " slow"

// quota is a scope with the maximum of its slots. See Pool and Key for its fields.
type quota struct {
	scope
	workers, limit, shared int
}

// TypedSlot is the right to use a worker for one request.
type TypedSlot[R comparable] struct {
	slots  *TypedSlots[R]
	quotas []quota
}

// New returns Slots without requests.
func New() *Slots { return NewTyped[reconcile.Request]() }

// NewTyped returns TypedSlots without requests.
func NewTyped[R comparable]() *TypedSlots[R] {
	return &TypedSlots[R]{
		used: map[scope]int{}, slow: map[scope]bool{},
		waiting: map[scope][]R{}, isWaiting: map[R]bool{}, short: map[scope]quota{}, queued: map[R]quota{},
	}
}

// Acquire acquires a slot in the scopes of the pool and of each key. If one of them has no free slot, ok is false, and
// req is queued again when the scope has one. If ok is true, the caller must release the slot.
func (s *TypedSlots[R]) Acquire(req R, pool Pool, keys ...Key) (slot *TypedSlot[R], ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	quotas := s.quotas(pool, keys)
	full := slices.IndexFunc(quotas, func(q quota) bool { return s.freeSlots(q) <= 0 })
	queued, isQueued := s.queued[req]
	delete(s.queued, req)
	if full >= 0 {
		s.addWaiting(req, quotas[full])
	} else {
		for _, q := range quotas {
			s.used[q.scope]++
		}
	}
	if isQueued && (full >= 0 || !slices.Contains(quotas, queued)) {
		s.queueWaiting(queued) // another request can use that slot
	}
	return &TypedSlot[R]{slots: s, quotas: quotas}, full < 0
}

// Skip must be called for a request that ends without Acquire.
func (s *TypedSlots[R]) Skip(req R) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if queued, ok := s.queued[req]; ok {
		delete(s.queued, req)
		s.queueWaiting(queued)
	}
}

// Release releases the slot, and records which of its keys were slow. It queues as many waiting requests as there are
// free slots.
func (t *TypedSlot[R]) Release(slow ...string) {
	s := t.slots
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, q := range t.quotas {
		if s.used[q.scope]--; s.used[q.scope] == 0 {
			delete(s.used, q.scope)
		}
		if slices.Contains(slow, q.key) {
			s.slow[q.scope] = true
		} else {
			delete(s.slow, q.scope)
		}
	}
	for _, q := range t.quotas {
		s.queueWaiting(q)
	}
	for _, q := range s.short {
		s.queueWaiting(q)
	}
}

// RateLimiter returns a rate limiter that keeps the back-off of requests that wait for a slot. The controller calls
// Forget for these requests, although they have neither succeeded nor failed. Without RateLimiter, requests that fail
// and wait in turn would be retried without a pause.
func (s *TypedSlots[R]) RateLimiter(limiter workqueue.TypedRateLimiter[R]) workqueue.TypedRateLimiter[R] {
	return rateLimiter[R]{limiter, s}
}

type rateLimiter[R comparable] struct {
	workqueue.TypedRateLimiter[R]

	slots *TypedSlots[R]
}

// Forget ends the back-off of req unless it waits.
func (l rateLimiter[R]) Forget(req R) {
	l.slots.mu.Lock()
	_, isQueued := l.slots.queued[req]
	isWaiting := isQueued || l.slots.isWaiting[req]
	l.slots.mu.Unlock()
	if !isWaiting {
		l.TypedRateLimiter.Forget(req)
	}
}

// quotas returns the quotas in which a request needs a slot. The caller must hold mu.
func (s *TypedSlots[R]) quotas(pool Pool, keys []Key) []quota {
	quotas := []quota{{scope: scope{pool: pool.Name}, workers: pool.Workers, limit: pool.Workers, shared: pool.Workers}}
	isSlow := false
	for _, key := range keys {
		at := scope{pool.Name, key.Name}
		quotas = append(quotas, quota{scope: at, workers: pool.Workers, limit: key.Max, shared: key.Shared})
		isSlow = isSlow || s.slow[at]
	}
	if !isSlow {
		return quotas
	}
	for _, key := range keys {
		if key.Slow > 0 {
			quotas = append(quotas, quota{scope: scope{pool.Name, slowKeys + " " + key.Name}, workers: pool.Workers, limit: key.Slow, shared: pool.Workers})
		}
	}
	return append(quotas, quota{scope: scope{pool.Name, slowKeys}, workers: pool.Workers, limit: pool.Slow, shared: pool.Workers})
}

// freeSlots returns the number of free slots of a quota. The caller must hold mu.
func (s *TypedSlots[R]) freeSlots(q quota) int {
	total := s.used[scope{pool: q.pool}]
	switch {
	case s.slow[q.scope]:
		return 1 - s.used[q.scope]
	case q.key == "":
		return q.workers - total
	default:
		return max(1, min(q.limit, s.used[q.scope]+q.shared-total)) - s.used[q.scope]
	}
}

// addWaiting adds req to the requests that wait for a slot of a full quota. The caller must hold mu.
func (s *TypedSlots[R]) addWaiting(req R, full quota) {
	if s.isWaiting[req] {
		return
	}
	s.isWaiting[req] = true
	s.waiting[full.scope] = append(s.waiting[full.scope], req)
	if full.key != "" && s.used[full.scope] < full.limit {
		s.short[full.scope] = full
	}
}

// queueWaiting queues as many waiting requests as q has free slots. Each of them calls Acquire or Skip. The caller must
// hold mu.
func (s *TypedSlots[R]) queueWaiting(q quota) {
	waiting := s.waiting[q.scope]
	for n := s.freeSlots(q); n > 0 && len(waiting) > 0; n-- {
		next := waiting[0]
		waiting = waiting[1:]
		delete(s.isWaiting, next)
		s.queued[next] = q
		s.Queue.Add(next)
	}
	s.waiting[q.scope] = waiting
	if len(waiting) == 0 {
		delete(s.waiting, q.scope)
		delete(s.short, q.scope)
	}
}
