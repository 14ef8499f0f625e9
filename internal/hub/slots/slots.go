// Package slots shares the workers of a controller among clusters, their namespaces and profiles.
//
// The controllers of summaries, Works, clusters, deregistrations and unclaimed bundles acquire a slot for each request.
// A cluster that does not answer, all clusters of a namespace together, or a profile whose rendering does not end,
// occupy at most their own share of the workers. A request without a free slot waits outside the queue and occupies no
// worker. Start reading at Pool, Key and TypedSlots.Acquire.
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
	// workers that all keys share. The other workers of the pool are reserved for keys without a running request, so that
	// a few keys cannot occupy all workers.
	Max, Shared int
	// Slow is the maximum of concurrent requests that have this key and also a slow key, so that a namespace cannot occupy
	// all workers for slow keys. Zero: only Pool.Slow limits them.
	Slow int
}

// Slots is TypedSlots for reconcile.Request. Create it with New.
type Slots = TypedSlots[reconcile.Request]

// Slot is TypedSlot for reconcile.Request.
type Slot = TypedSlot[reconcile.Request]

// TypedSlots assigns workers to requests. Create it with NewTyped.
type TypedSlots[R comparable] struct {
	// Queue is the queue of the controller, which gets waiting requests when slots become free. The caller must set it
	// before the first request.
	Queue workqueue.TypedRateLimitingInterface[R]

	// mu guards the fields below.
	mu   sync.Mutex
	used map[scope]int
	// slow has the scopes of the keys whose last request was slow.
	slow map[scope]bool
	// waiting has the requests without a slot, by the scope that had no free slot.
	waiting   map[scope][]R
	isWaiting map[R]bool
	// waitingForShared has the keys with fewer running requests than Key.Max whose requests wait, because the shared
	// workers are in use.
	waitingForShared map[scope]quota
	// queued has the requests that were moved from waiting to the queue, with the quota whose free slot they shall use.
	queued map[R]quota
}

// scope identifies a key in a pool, a whole pool (key ""), the slow keys of a pool (key slowKeys), or the requests of a
// key with a slow key (key slowKeys and the name).
type scope struct{ pool, key string }

// slowKeys is the key of the scope for all slow keys of a pool. The name of a Key does not begin with it.
const slowKeys = " slow"

// quota is a scope with its limits: workers is Pool.Workers, limit is the maximum of slots, and shared is Key.Shared.
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
		waiting: map[scope][]R{}, isWaiting: map[R]bool{}, waitingForShared: map[scope]quota{}, queued: map[R]quota{},
	}
}

// Acquire acquires a slot in the scopes of the pool and of each key. If ok is true, the caller must release the slot.
// Otherwise a scope has no free slot, and req is queued again when it has one.
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
		s.queueWaiting(queued) // another request can use the slot for which req was queued
	}
	return &TypedSlot[R]{slots: s, quotas: quotas}, full < 0
}

// Skip must be called for a request that ends without Acquire. If req was queued for a free slot, another request is
// queued for it.
func (s *TypedSlots[R]) Skip(req R) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if queued, ok := s.queued[req]; ok {
		delete(s.queued, req)
		s.queueWaiting(queued)
	}
}

// Release releases the slot. slow has the names of the keys that were slow in this request; the others count as fast
// from now on. It queues as many waiting requests as there are free slots.
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
	for _, q := range s.waitingForShared {
		s.queueWaiting(q)
	}
}

// RateLimiter wraps the rate limiter of the controller. The controller calls Forget after each reconcile without an
// error, also if the request only waits for a slot. The wrapper then keeps the backoff. Without it, a request that
// fails and waits in turn would be retried without backoff.
func (s *TypedSlots[R]) RateLimiter(limiter workqueue.TypedRateLimiter[R]) workqueue.TypedRateLimiter[R] {
	return rateLimiter[R]{limiter, s}
}

type rateLimiter[R comparable] struct {
	workqueue.TypedRateLimiter[R]

	slots *TypedSlots[R]
}

// Forget ends the backoff of req, unless req waits for a slot.
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
		s.waitingForShared[full.scope] = full
	}
}

// queueWaiting queues as many waiting requests as q has free slots. Their reconciles call Acquire or Skip. The caller
// must hold mu.
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
		delete(s.waitingForShared, q.scope)
	}
}
