// Package slots shares the workers of a controller among clusters and profiles.
//
// internal/hub/summaries and internal/hub/works acquire a slot for each request. A cluster that does not answer, or a
// profile whose rendering does not end, occupies its own share of the workers only. A request without a free slot waits
// outside the queue and occupies no worker.
package slots

import (
	"slices"
	"sync"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// Pool is a number of workers that no other pool uses. The controller must have as many workers as all its pools.
type Pool struct {
	Name string
	// Workers is the maximum of requests at the same time, and Slow the maximum of requests with a slow key.
	Workers, Slow int
}

// Key is a cluster or a profile that occupies workers of a pool.
type Key struct {
	Name string
	// Most is the maximum of requests with this key at the same time. When Shared workers of the pool are in use, the
	// other workers serve only keys that have none, so that a few keys cannot occupy all workers. A slow key has one.
	Most, Shared int
}

// Slots assigns workers to requests. Create it with New.
type Slots struct {
	// Queue gets the waiting requests when slots become free. It is set before the first request.
	Queue workqueue.TypedRateLimitingInterface[reconcile.Request]

	// mu guards the fields below.
	mu   sync.Mutex
	used map[place]int
	// slow has the keys whose last request was slow.
	slow map[place]bool
	// waiting has the requests without a slot, by the place that has none free.
	waiting   map[place][]reconcile.Request
	isWaiting map[reconcile.Request]bool
	// woken has the requests that were moved from waiting to the queue, and the place with the free slot.
	woken map[reconcile.Request]claim
}

// place is what has slots: a key in a pool, a pool (key ""), or the part of a pool for slow keys (key slowKeys).
type place struct{ pool, key string }

// slowKeys is the name of the part of a pool for slow keys. It is not the name of a cluster or a profile.
const slowKeys = " slow"

// claim is a place with its limits.
type claim struct {
	place
	workers, most, shared int
}

// Slot is the right to use a worker for one request.
type Slot struct {
	slots  *Slots
	claims []claim
}

// New returns Slots without requests.
func New() *Slots {
	return &Slots{
		used: map[place]int{}, slow: map[place]bool{},
		waiting: map[place][]reconcile.Request{}, isWaiting: map[reconcile.Request]bool{}, woken: map[reconcile.Request]claim{},
	}
}

// Acquire takes a slot of the pool and of each key. If one of them has no free slot, ok is false, and req returns to
// the queue when there is one. The caller must release the slot.
func (s *Slots) Acquire(req reconcile.Request, pool Pool, keys ...Key) (slot *Slot, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	claims := s.claims(pool, keys)
	full := slices.IndexFunc(claims, func(c claim) bool { return s.free(c) <= 0 })
	woken, isWoken := s.woken[req]
	delete(s.woken, req)
	if full >= 0 {
		s.wait(req, claims[full].place)
	} else {
		for _, c := range claims {
			s.used[c.place]++
		}
	}
	if isWoken && (full >= 0 || !slices.Contains(claims, woken)) {
		s.wake(woken) // another request can use that slot
	}
	return &Slot{slots: s, claims: claims}, full < 0
}

// Skip must be called for a request that ends without Acquire.
func (s *Slots) Skip(req reconcile.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if woken, ok := s.woken[req]; ok {
		delete(s.woken, req)
		s.wake(woken)
	}
}

// Release returns the slot, and records which of its keys were slow. It queues as many waiting requests as slots are
// free.
func (t *Slot) Release(slow ...string) {
	s := t.slots
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range t.claims {
		if s.used[c.place]--; s.used[c.place] == 0 {
			delete(s.used, c.place)
		}
		if slices.Contains(slow, c.key) {
			s.slow[c.place] = true
		} else {
			delete(s.slow, c.place)
		}
	}
	for _, c := range t.claims {
		s.wake(c)
	}
}

// RateLimiter returns a limiter that keeps the back-off of requests that wait for a slot. The controller calls Forget
// for them, although they have neither succeeded nor failed. Without it, requests that fail and wait in turn would be
// repeated without a pause.
func (s *Slots) RateLimiter(limiter workqueue.TypedRateLimiter[reconcile.Request]) workqueue.TypedRateLimiter[reconcile.Request] {
	return rateLimiter{limiter, s}
}

type rateLimiter struct {
	workqueue.TypedRateLimiter[reconcile.Request]

	slots *Slots
}

// Forget ends the back-off of req unless it waits.
func (l rateLimiter) Forget(req reconcile.Request) {
	l.slots.mu.Lock()
	_, isWoken := l.slots.woken[req]
	waits := isWoken || l.slots.isWaiting[req]
	l.slots.mu.Unlock()
	if !waits {
		l.TypedRateLimiter.Forget(req)
	}
}

// claims returns the slots that a request needs. The caller must hold mu.
func (s *Slots) claims(pool Pool, keys []Key) []claim {
	claims := []claim{{place: place{pool: pool.Name}, workers: pool.Workers, most: pool.Workers, shared: pool.Workers}}
	isSlow := false
	for _, key := range keys {
		at := place{pool.Name, key.Name}
		claims = append(claims, claim{place: at, workers: pool.Workers, most: key.Most, shared: key.Shared})
		isSlow = isSlow || s.slow[at]
	}
	if isSlow {
		claims = append(claims, claim{place: place{pool.Name, slowKeys}, workers: pool.Workers, most: pool.Slow, shared: pool.Workers})
	}
	return claims
}

// free returns the number of free slots. The caller must hold mu.
func (s *Slots) free(c claim) int {
	total := s.used[place{pool: c.pool}]
	switch {
	case s.slow[c.place]:
		return 1 - s.used[c.place]
	case c.key == "":
		return c.workers - total
	default:
		return max(1, min(c.most, s.used[c.place]+c.shared-total)) - s.used[c.place]
	}
}

// wait adds req to the requests that wait for a slot. The caller must hold mu.
func (s *Slots) wait(req reconcile.Request, at place) {
	if !s.isWaiting[req] {
		s.isWaiting[req] = true
		s.waiting[at] = append(s.waiting[at], req)
	}
}

// wake queues as many waiting requests as c has free slots. Each of them calls Acquire or Skip. The caller must hold
// mu.
func (s *Slots) wake(c claim) {
	waiting := s.waiting[c.place]
	for n := s.free(c); n > 0 && len(waiting) > 0; n-- {
		next := waiting[0]
		waiting = waiting[1:]
		delete(s.isWaiting, next)
		s.woken[next] = c
		s.Queue.Add(next)
	}
	s.waiting[c.place] = waiting
	if len(waiting) == 0 {
		delete(s.waiting, c.place)
	}
}
