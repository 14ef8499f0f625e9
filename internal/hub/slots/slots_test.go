package slots_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/towline/towline/internal/hub/slots"
)

var (
	pull = slots.Pool{Name: "pull", Workers: 4, Slow: 2}
	push = slots.Pool{Name: "push", Workers: 6, Slow: 2}
)

// key returns a key with at most 3 of the workers, and a free worker for others.
func key(name string) slots.Key { return slots.Key{Name: name, Max: 3, Shared: 4} }

func request(i int) reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Name: fmt.Sprint(i)}}
}

func newSlots(t *testing.T) *slots.Slots {
	s := slots.New()
	s.Queue = workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	t.Cleanup(s.Queue.ShutDown)
	return s
}

// acquireAll acquires slots for n requests and returns those that it got.
func acquireAll(s *slots.Slots, n int, pool slots.Pool, keys ...slots.Key) []*slots.Slot {
	var all []*slots.Slot
	for i := range n {
		req := request(i)
		req.Namespace = pool.Name + fmt.Sprint(keys)
		if slot, ok := s.Acquire(req, pool, keys...); ok {
			all = append(all, slot)
		}
	}
	return all
}

func TestNoKeyOccupiesAllWorkers(t *testing.T) {
	t.Parallel()
	s := newSlots(t)
	for _, step := range []struct {
		name string
		pool slots.Pool
		keys []slots.Key
		want int
	}{
		{"one cluster", push, []slots.Key{key("a")}, 3},
		{"the rest of the shared workers", push, []slots.Key{key("b")}, 1},
		{"others get one each", push, []slots.Key{key("c")}, 1},
		{"the last worker", push, []slots.Key{key("d")}, 1},
		{"no more workers", push, []slots.Key{key("e")}, 0},
		{"the other pool has its own workers", pull, []slots.Key{key("a")}, 3},
	} {
		if got := len(acquireAll(s, 9, step.pool, step.keys...)); got != step.want {
			t.Errorf("%s: got %d slots, want %d", step.name, got, step.want)
		}
	}
}

func TestSlowKeysHaveOneSlotEachAndFewTogether(t *testing.T) {
	t.Parallel()
	s := newSlots(t)
	for _, name := range []string{"a", "b", "c"} {
		for _, slot := range acquireAll(s, 1, push, key(name), key("profile")) {
			slot.Release(name)
		}
	}
	slow := acquireAll(s, 3, push, key("a"), key("profile"))
	slow = append(slow, acquireAll(s, 3, push, key("b"), key("profile"))...)
	if got := len(slow) + len(acquireAll(s, 3, push, key("c"), key("profile"))); got != 2 {
		t.Errorf("slow clusters have %d slots, want 2", got)
	}
	if got := len(acquireAll(s, 1, push, key("d"), key("profile"))); got != 1 {
		t.Error("another cluster has no slot")
	}
	for _, slot := range slow {
		slot.Release()
	}
	if got := len(acquireAll(s, 9, push, key("a"))); got != 3 {
		t.Errorf("a cluster that answers again has %d slots, want 3", got)
	}
}

// TestNoNamespaceOccupiesAllWorkers has more clusters in one namespace than there are workers.
func TestNoNamespaceOccupiesAllWorkers(t *testing.T) {
	t.Parallel()
	s := newSlots(t)
	namespace := func(name string) slots.Key { return slots.Key{Name: name, Max: 4, Shared: 4} }
	var hostile []*slots.Slot
	for i := range 9 {
		hostile = append(hostile, acquireAll(s, 1, push, key(fmt.Sprint("hostile-", i)), namespace("hostile"))...)
	}
	if got := len(hostile); got != 4 {
		t.Errorf("the clusters of a namespace have %d slots, want 4", got)
	}
	for _, name := range []string{"b", "c"} {
		if got := len(acquireAll(s, 2, push, key(name), namespace(name))); got != 1 {
			t.Errorf("namespace %s has %d slots, want 1", name, got)
		}
	}
	for _, slot := range hostile {
		slot.Release()
	}
	if got := s.Queue.Len(); got != 5 {
		t.Errorf("%d requests are queued after the namespaces have free slots, want the 5 that wait", got)
	}
}

// TestSlowKeysOfANamespace has more slow clusters in one namespace than slots for slow clusters. A slow cluster of
// another namespace has one of them.
func TestSlowKeysOfANamespace(t *testing.T) {
	t.Parallel()
	s := newSlots(t)
	namespace := func(name string) slots.Key { return slots.Key{Name: name, Max: 6, Shared: 6, Slow: 1} }
	names := []string{"a", "b", "c"}
	for _, name := range append(names, "other") {
		for _, slot := range acquireAll(s, 1, push, key(name), namespace("all")) {
			slot.Release(name)
		}
	}
	var slow []*slots.Slot
	for _, name := range names {
		slow = append(slow, acquireAll(s, 1, push, key(name), namespace("hostile"))...)
	}
	if got := len(slow); got != 1 {
		t.Errorf("the slow clusters of a namespace have %d slots, want 1", got)
	}
	if got := len(acquireAll(s, 1, push, key("other"), namespace("other"))); got != 1 {
		t.Error("a slow cluster of another namespace has no slot")
	}
	for _, slot := range slow {
		slot.Release()
	}
	if got := s.Queue.Len(); got != 1 {
		t.Errorf("%d requests are queued after one slot is free, want 1", got)
	}
}

// TestSharedWorkersAreUsedAgain has a request of a key that other keys keep from a second worker, until they end.
func TestSharedWorkersAreUsedAgain(t *testing.T) {
	t.Parallel()
	s := newSlots(t)
	others := acquireAll(s, 3, push, key("b"))
	if got := len(acquireAll(s, 2, push, key("a"))); got != 1 {
		t.Fatalf("got %d slots beside another key, want 1", got)
	}
	for _, slot := range others {
		slot.Release()
	}
	if s.Queue.Len() != 1 {
		t.Fatalf("%d requests are queued after the other key has released its slots, want 1", s.Queue.Len())
	}
	req, _ := s.Queue.Get()
	if _, ok := s.Acquire(req, push, key("a")); !ok {
		t.Error("the request got no slot")
	}
}

// TestWaitingKeepsTheBackoff calls Forget as the controller does for a reconcile without a result.
func TestWaitingKeepsTheBackoff(t *testing.T) {
	t.Parallel()
	s := slots.New()
	s.Queue = workqueue.NewTypedRateLimitingQueue(s.RateLimiter(workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](time.Hour, time.Hour)))
	defer s.Queue.ShutDown()
	pool, failing := slots.Pool{Name: "one", Workers: 1, Slow: 1}, request(1)
	slot, _ := s.Acquire(request(0), pool, key("a"))
	for range 3 {
		s.Queue.AddRateLimited(failing)
	}
	if _, ok := s.Acquire(failing, pool, key("a")); ok {
		t.Fatal("the pool has two workers")
	}
	s.Queue.Forget(failing)
	slot.Release()
	s.Queue.Forget(failing)
	if got := s.Queue.NumRequeues(failing); got != 3 {
		t.Errorf("%d failures while it waits, want 3", got)
	}
	if slot, ok := s.Acquire(failing, pool, key("a")); ok {
		slot.Release()
	}
	s.Queue.Forget(failing)
	if got := s.Queue.NumRequeues(failing); got != 0 {
		t.Errorf("%d failures after a success, want none", got)
	}
}

// TestNoRequestIsForgotten works off random requests. Some of them end without Acquire, and some get other keys.
func TestNoRequestIsForgotten(t *testing.T) {
	t.Parallel()
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 1)) //nolint:gosec // no secret
		s := newSlots(t)
		open := map[reconcile.Request]bool{}
		for i := range 100 {
			open[request(i)] = true
			s.Queue.Add(request(i))
		}
		type run struct {
			req  reconcile.Request
			slot *slots.Slot
			name string
		}
		var running []run
		for len(open) > 0 {
			if s.Queue.Len() == 0 && len(running) == 0 {
				t.Fatalf("seed %d: %d requests wait for ever", seed, len(open))
			}
			if s.Queue.Len() > 0 && (len(running) == 0 || random.IntN(2) == 0) {
				req, _ := s.Queue.Get()
				s.Queue.Done(req)
				if random.IntN(10) == 0 {
					s.Skip(req)
					delete(open, req)
					continue
				}
				name := string(rune('a' + random.IntN(4)))
				pool := []slots.Pool{pull, push}[random.IntN(2)]
				namespace := slots.Key{Name: string(rune('m' + random.IntN(2))), Max: 3, Shared: 3, Slow: 1}
				if slot, ok := s.Acquire(req, pool, key(name), key(string(rune('x'+random.IntN(2)))), namespace); ok {
					running = append(running, run{req, slot, name})
				}
				continue
			}
			i := random.IntN(len(running))
			var slow []string
			if random.IntN(2) == 0 {
				slow = []string{running[i].name}
			}
			running[i].slot.Release(slow...)
			delete(open, running[i].req)
			running = append(running[:i], running[i+1:]...)
		}
	}
}
