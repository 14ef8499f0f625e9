package agent

import (
	"testing"
	"time"

	testclock "k8s.io/utils/clock/testing"
)

func TestLoopThatStandsStillIsNoticed(t *testing.T) {
	t.Parallel()
	clock := testclock.NewFakeClock(time.Unix(1e9, 0))
	p := newPulse(clock, time.Second)
	clock.Step(stillLimit)
	if err := p.check(); err != nil {
		t.Errorf("a long turn: %v", err)
	}
	clock.Step(time.Second)
	if p.check() == nil {
		t.Error("standing still: got no error")
	}
	p.turned()
	if err := p.check(); err != nil {
		t.Errorf("turning again: %v", err)
	}
	if p := newPulse(clock, time.Hour); p.limit != missedTurns*time.Hour {
		t.Errorf("limit of slow heartbeats: got %s", p.limit)
	}
}
