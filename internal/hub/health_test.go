package hub

import (
	"context"
	"errors"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	testclock "k8s.io/utils/clock/testing"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
)

func TestHealth(t *testing.T) {
	t.Parallel()
	const answers, full = true, true
	tests := map[string]struct {
		answers, full bool
		// after is the time from the start to the last check, and ago the time since then.
		after, ago   time.Duration
		led          bool
		alive, ready bool
	}{
		"just started":                      {answers: answers, alive: true},
		"full":                              {answers: answers, full: full, alive: true, ready: true},
		"the API server is down":            {full: full, after: time.Hour, alive: true},
		"the caches take long":              {answers: answers, after: cacheSyncTimeout / 2, alive: true},
		"the caches do not sync":            {answers: answers, after: 2 * cacheSyncTimeout},
		"the API server was down meanwhile": {after: 2 * cacheSyncTimeout, alive: true},
		"a check is late":                   {answers: answers, full: full, ago: 2 * checkInterval, alive: true, ready: true},
		"no check":                          {answers: answers, full: full, ago: 2 * maxCheckAge},
		"the lead was renewed":              {answers: answers, full: full, led: true, ago: leaseDuration / 2, alive: true, ready: true},
		"the lead is not renewed":           {answers: answers, full: full, led: true, ago: 2 * leaseDuration, alive: true, ready: true},
		"the lead was lost":                 {answers: answers, full: full, led: true, ago: electorDuration + time.Second},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			clock := testclock.NewFakeClock(time.Unix(1e9, 0))
			h := &health{clock: clock, leaseTracker: newLeaseTracker(clock), checkedAt: clock.Now(), probe: func(context.Context) error {
				if !tc.answers {
					return errors.New("down")
				}
				return nil
			}}
			h.setCacheCheck(func(context.Context) (bool, error) { return tc.full, nil })
			for end := clock.Now().Add(tc.after); ; clock.Step(checkInterval) {
				h.check(t.Context())
				if !clock.Now().Before(end) {
					break
				}
			}
			if tc.led {
				h.leaseTracker.recordLeaseWrite(clock.Now(), resourcelock.LeaderElectionRecord{HolderIdentity: "me"}, "me")
			}
			clock.Step(tc.ago)
			if err := h.Alive(); (err == nil) != tc.alive {
				t.Errorf("alive: got %v, want %t", err, tc.alive)
			}
			if err := h.Ready(); (err == nil) != tc.ready {
				t.Errorf("ready: got %v, want %t", err, tc.ready)
			}
		})
	}
}

func TestReleasedLeaseIsNotOverdue(t *testing.T) {
	t.Parallel()
	clock := testclock.NewFakeClock(time.Unix(1e9, 0))
	lead := newLeaseTracker(clock)
	lead.recordLeaseWrite(clock.Now(), resourcelock.LeaderElectionRecord{HolderIdentity: "me"}, "me")
	lead.recordLeaseWrite(clock.Now(), resourcelock.LeaderElectionRecord{}, "me")
	clock.Step(time.Hour)
	if lead.isOverdue() {
		t.Error("a released Lease counts as overdue")
	}
}

func TestHealthDetectsAPIServerOutages(t *testing.T) {
	t.Parallel()
	clock := testclock.NewFakeClock(time.Unix(1e9, 0))
	isDown := false
	h := &health{clock: clock, leaseTracker: newLeaseTracker(clock), checkedAt: clock.Now(), probe: func(context.Context) error {
		if isDown {
			return errors.New("down")
		}
		return nil
	}}
	// runChecks runs checks for a time, with a pause after each check.
	runChecks := func(during, pause time.Duration) {
		for end := clock.Now().Add(during); clock.Now().Before(end); clock.Step(pause) {
			h.check(t.Context())
		}
	}
	want := func(what string, want time.Time) {
		t.Helper()
		if got := h.availableSince(); !got.Equal(want) {
			t.Errorf("%s: available since %s, want %s", what, got.Format(time.TimeOnly), want.Format(time.TimeOnly))
		}
	}
	want("before the first check", clock.Now())
	start := clock.Now()
	runChecks(time.Minute, checkInterval)
	want("without an outage", start)
	runChecks(time.Minute, checkInterval+checkTimeout)
	want("slow answers", start)
	isDown = true
	runChecks(3*time.Minute, checkInterval)
	want("during an outage", clock.Now())
	isDown = false
	end := clock.Now()
	runChecks(time.Minute, checkInterval)
	want("after the outage", end)
	clock.Step(time.Minute)
	want("while the process is stopped", clock.Now())
	end = clock.Now()
	runChecks(time.Minute, checkInterval)
	want("after the process was stopped", end)
}

func TestSingleFailedChecksDoNotHideASilentAgent(t *testing.T) {
	t.Parallel()
	for name, fails := range map[string]struct {
		isFailed func(n int) bool
		// takes is the duration of a failed check.
		takes time.Duration
	}{
		"one check is refused":   {func(n int) bool { return n == 10 }, 0},
		"one check times out":    {func(n int) bool { return n == 10 }, checkTimeout},
		"each fifth is refused":  {func(n int) bool { return n%5 == 0 }, 0},
		"each fifth times out":   {func(n int) bool { return n%5 == 0 }, checkTimeout},
		"each second is refused": {func(n int) bool { return n%2 == 0 }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			clock := testclock.NewFakeClock(time.Unix(1e9, 0))
			n := 0
			h := &health{clock: clock, leaseTracker: newLeaseTracker(clock), checkedAt: clock.Now(), probe: func(context.Context) error {
				if n++; fails.isFailed(n) {
					clock.Step(fails.takes)
					return errors.New("down")
				}
				clock.Step(time.Duration(n%4) * 100 * time.Millisecond)
				return nil
			}}
			monitor := &heartbeats.Monitor{Clock: clock, AvailableSince: h.availableSince}
			lease := &coordinationv1.Lease{Spec: coordinationv1.LeaseSpec{RenewTime: &metav1.MicroTime{Time: clock.Now()}}}
			member := fleet.Member{Type: fleet.TypeSveltos, Name: "dead", UID: "1"}
			start := clock.Now()
			for tick := start; ; tick = tick.Add(checkInterval) {
				if tick.After(clock.Now()) {
					clock.SetTime(tick)
				}
				h.check(t.Context())
				liveness := monitor.EvaluateLease(member, lease, "")
				passed := clock.Since(start)
				if liveness.State == heartbeats.Silent {
					if passed < heartbeats.SveltosLimit {
						t.Errorf("the agent is silent after %s", passed)
					}
					return
				}
				if passed > heartbeats.SveltosLimit+checkInterval+checkTimeout {
					t.Fatalf("the agent is %s after %s, with %s left", liveness.State, passed, liveness.Remaining)
				}
			}
		})
	}
}
