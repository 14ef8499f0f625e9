package works

import (
	"sync"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// slots shares the workers out among the clusters, so that one that takes requests and never answers does not keep them all. What finds no slot
// free waits outside the queue for its turn.
type slots struct {
	// queue takes those whose turn it is.
	queue workqueue.TypedRateLimitingInterface[reconcile.Request]

	// mu guards what follows.
	mu    sync.Mutex
	taken map[string]int
	total int // taken by all
	// silent are the clusters that did not answer the last time. They have one slot each.
	silent  map[string]bool
	waiting map[string][]reconcile.Request
	waits   map[reconcile.Request]bool
}

func newSlots() *slots {
	return &slots{taken: map[string]int{}, silent: map[string]bool{}, waiting: map[string][]reconcile.Request{}, waits: map[reconcile.Request]bool{}}
}

// free says how many slots a cluster has left. Its caller holds mu.
func (s *slots) free(cluster string) int {
	most := 1
	if !s.silent[cluster] {
		most = max(1, min(clusterWorkers, s.taken[cluster]+sharedWorkers-s.total))
	}
	return most - s.taken[cluster]
}

// take takes a slot of a cluster, or has req queued again when one is free.
func (s *slots) take(cluster string, req reconcile.Request) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.free(cluster) > 0 {
		s.taken[cluster]++
		s.total++
		return true
	}
	if !s.waits[req] {
		s.waits[req] = true
		s.waiting[cluster] = append(s.waiting[cluster], req)
	}
	return false
}

// give gives a slot back and says whether the cluster was silent. Whoever is queued here takes a slot in its turn, whatever it finds to do, so
// that nobody waits while slots are free.
func (s *slots) give(cluster string, silent bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.total--
	if s.taken[cluster]--; s.taken[cluster] == 0 {
		delete(s.taken, cluster)
	}
	if silent {
		s.silent[cluster] = true
	} else {
		delete(s.silent, cluster)
	}
	for n := s.free(cluster); n > 0 && len(s.waiting[cluster]) > 0; n-- {
		next := s.waiting[cluster][0]
		s.waiting[cluster] = s.waiting[cluster][1:]
		delete(s.waits, next)
		s.queue.Add(next)
	}
	if len(s.waiting[cluster]) == 0 {
		delete(s.waiting, cluster)
	}
}
