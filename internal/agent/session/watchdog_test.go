package session

import (
	"testing"
	"time"

	testclock "k8s.io/utils/clock/testing"
)

func TestWatchdogDetectsStuckLoop(t *testing.T) {
	t.Parallel()
	clock := testclock.NewFakeClock(time.Unix(1e9, 0))
	w := NewWatchdog(clock, time.Second)
	clock.Step(minWatchdogTimeout)
	if err := w.Check(); err != nil {
		t.Errorf("at the limit: %v", err)
	}
	clock.Step(time.Second)
	if w.Check() == nil {
		t.Error("beyond the limit: got no error")
	}
	w.Reset()
	if err := w.Check(); err != nil {
		t.Errorf("after a reset: %v", err)
	}
	if w := NewWatchdog(clock, time.Hour); w.timeout != missedHeartbeats*time.Hour {
		t.Errorf("limit of slow heartbeats: got %s", w.timeout)
	}
}
