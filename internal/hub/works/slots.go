package works

import (
	"sync"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// slots assigns workers to clusters, so that a cluster that does not answer cannot occupy all of them. A request
// without a free slot waits outside the queue.
type slots struct {
	// queue gets the waiting requests when slots become free.
	queue workqueue.TypedRateLimitingInterface[reconcile.Request]

	// mu guards the fields below.
	mu    sync.Mutex
	used  map[string]int
	total int // number of slots in use
	// silent has the clusters that did not answer the last request. They have one slot each.
	silent    map[string]bool
	waiting   map[string][]reconcile.Request
	isWaiting map[reconcile.Request]bool
}

func newSlots() *slots {
	return &slots{used: map[string]int{}, silent: map[string]bool{}, waiting: map[string][]reconcile.Request{}, isWaiting: map[reconcile.Request]bool{}}
}

// free returns the number of free slots of a cluster. The caller must hold mu.
func (s *slots) free(cluster string) int {
	most := 1
	if !s.silent[cluster] {
		most = max(1, min(clusterWorkers, s.used[cluster]+sharedWorkers-s.total))
	}
	return most - s.used[cluster]
}

// acquire takes a slot of a cluster and returns true, or queues req again when a slot is free.
func (s *slots) acquire(cluster string, req reconcile.Request) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.free(cluster) > 0 {
		s.used[cluster]++
		s.total++
		return true
	}
	if !s.isWaiting[req] {
		s.isWaiting[req] = true
		s.waiting[cluster] = append(s.waiting[cluster], req)
	}
	return false
}

// release returns a slot and records whether the cluster was silent. It queues as many waiting requests as slots are
// free. Each of them acquires a slot, even if it finds nothing to do, so that no request waits while slots are free.
func (s *slots) release(cluster string, silent bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.total--
	if s.used[cluster]--; s.used[cluster] == 0 {
		delete(s.used, cluster)
	}
	if silent {
		s.silent[cluster] = true
	} else {
		delete(s.silent, cluster)
	}
	for n := s.free(cluster); n > 0 && len(s.waiting[cluster]) > 0; n-- {
		next := s.waiting[cluster][0]
		s.waiting[cluster] = s.waiting[cluster][1:]
		delete(s.isWaiting, next)
		s.queue.Add(next)
	}
	if len(s.waiting[cluster]) == 0 {
		delete(s.waiting, cluster)
	}
}
