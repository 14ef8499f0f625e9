package drift

import (
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/towline/towline/internal/bundle"
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
