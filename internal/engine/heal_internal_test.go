package engine

import (
	"testing"
	"time"

	"k8s.io/client-go/util/workqueue"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/towline/towline/internal/bundle"
)

func TestUnreadableRecordIsLookedForEverMoreSlowly(t *testing.T) {
	t.Parallel()
	clock := clocktesting.NewFakeClock(time.Now())
	h := &healer{
		queue: workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[bundle.ID]{Clock: clock}),
		tasks: map[bundle.ID]*task{}, unread: map[bundle.ID]int{},
	}
	defer h.queue.ShutDown()
	id := bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "one", Feature: "Resources"}
	for _, want := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second} {
		if got := backoff(h.unread[id]); got != want {
			t.Errorf("pause: got %s, want %s", got, want)
		}
		h.missAgain(id)
	}
	if !h.tasks[id].lost {
		t.Error("the next look is not for the record")
	}
}
