package session

import (
	"testing"
	"time"

	testclock "k8s.io/utils/clock/testing"
)

func TestLoopThatStandsStillIsNoticed(t *testing.T) {
	t.Parallel()
	clock := testclock.NewFakeClock(time.Unix(1e9, 0))
	p := NewPulse(clock, time.Second)
	clock.Step(stillLimit)
	if err := p.Check(); err != nil {
		t.Errorf("a long turn: %v", err)
	}
	clock.Step(time.Second)
	if p.Check() == nil {
		t.Error("standing still: got no error")
	}
	p.Turned()
	if err := p.Check(); err != nil {
		t.Errorf("turning again: %v", err)
	}
	if p := NewPulse(clock, time.Hour); p.limit != missedTurns*time.Hour {
		t.Errorf("limit of slow heartbeats: got %s", p.limit)
	}
}
