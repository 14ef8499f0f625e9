package drift

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

func TestUnreadableRecordIsCheckedEverMoreSlowly(t *testing.T) {
	t.Parallel()
	c := New(Options{Clock: clocktesting.NewFakeClock(time.Now())})
	defer c.queue.ShutDown()
	id := bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "one", Feature: "Resources"}
	for _, want := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second} {
		if got := Backoff(c.recordFailures[id]); got != want {
			t.Errorf("pause: got %s, want %s", got, want)
		}
		c.retryRecordCheck(id)
	}
	if !c.tasks[id].checkRecord {
		t.Error("the next task does not check the record")
	}
}

// blockedEngine is an Engine whose runs send their objects to started, and end when release is closed.
type blockedEngine struct {
	Engine // its other methods are not called for a bundle that is applied

	started chan map[kube.Ref]bool
	release chan struct{}
}

// Acquire locks nothing.
func (blockedEngine) Acquire(context.Context, bundle.ID) (unlock func(), err error) {
	return func() {}, nil
}

// Resume corrects the objects in only.
func (e blockedEngine) Resume(ctx context.Context, _ bundle.ID, only map[kube.Ref]bool) (Result, error) {
	e.started <- only
	select {
	case <-e.release:
	case <-ctx.Done():
	}
	var result Result
	for ref := range only {
		result.Changes = append(result.Changes, bundle.Change{Ref: ref, Action: bundle.Configured})
	}
	return result, ctx.Err()
}

// wantRun waits for the next run, and compares its objects.
func (e blockedEngine) wantRun(t *testing.T, want ...kube.Ref) {
	t.Helper()
	select {
	case got := <-e.started:
		objects := map[kube.Ref]bool{}
		for _, ref := range want {
			objects[ref] = true
		}
		if diff := cmp.Diff(got, objects); diff != "" {
			t.Errorf("objects of the run (-got +want):\n%s", diff)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("no run begins")
	}
}

// TestEventsDuringARunAreCorrectedByOneMoreRun sends many events of two objects during the first run. The clock stands
// still: a run that waits for it never begins.
func TestEventsDuringARunAreCorrectedByOneMoreRun(t *testing.T) {
	t.Parallel()
	engine := blockedEngine{started: make(chan map[kube.Ref]bool, 10), release: make(chan struct{})}
	c := New(Options{
		Engine: engine, Store: newFakeStore(), Clock: clocktesting.NewFakeClock(time.Now()), OnCorrect: func(bundle.ID, bundle.ChangeSet) {},
	})
	t.Cleanup(c.queue.ShutDown)
	last := saveRecord(t, c.Store, 0)
	first := last
	first.Name = "object-0-0"
	var running sync.WaitGroup
	for range workers {
		running.Go(func() {
			for c.processNext(t.Context()) {
			}
		})
	}
	c.onEvent(first, observation{uid: "uid", fingerprint: "edited"})
	engine.wantRun(t, first)
	for _, fingerprint := range []string{"edited again", "edited for the third time"} {
		c.onEvent(first, observation{uid: "uid", fingerprint: fingerprint})
		c.onEvent(last, observation{uid: "uid", fingerprint: fingerprint})
	}
	close(engine.release)
	engine.wantRun(t, first, last)
	c.queue.ShutDown() // the workers process the bundles in the queue, and end
	running.Wait()
	if more := len(engine.started); more > 0 || len(c.tasks) > 0 {
		t.Errorf("%d more runs and %d more bundles to process, want none", more, len(c.tasks))
	}
}
