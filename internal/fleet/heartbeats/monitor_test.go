package heartbeats_test

import (
	"context"
	"errors"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
)

const (
	alive  = heartbeats.Alive
	silent = heartbeats.Silent
	unsure = heartbeats.Unknown
)

var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

// leases returns the same Lease for every name, or an error.
type leases struct {
	client.Reader
	lease coordinationv1.Lease
	err   error
}

func (l *leases) Get(_ context.Context, _ client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	l.lease.DeepCopyInto(obj.(*coordinationv1.Lease))
	return l.err
}

// renew writes a time of the member's clock.
func (l *leases) renew(at time.Time) { l.lease.Spec.RenewTime = &metav1.MicroTime{Time: at} }

// testMonitor is a monitor, the two views of the Lease that it judges by, and an outage of the API server.
type testMonitor struct {
	testing.TB
	clock        *clocktesting.FakeClock
	monitor      *heartbeats.Monitor
	cached, live *leases
	member       fleet.Member
	report       string
	// away is true during an outage of the API server, and back is the end of the last outage.
	away bool
	back time.Time
}

func newTestMonitor(t *testing.T, of fleet.Type) *testMonitor {
	t.Helper()
	c := &testMonitor{TB: t, clock: clocktesting.NewFakeClock(noon), cached: &leases{}, live: &leases{}, member: fleet.Member{Type: of, Name: "one", UID: "1"}}
	c.start()
	return c
}

// start makes a new monitor, as a restart of the hub does.
func (c *testMonitor) start() {
	c.back = c.clock.Now()
	c.monitor = &heartbeats.Monitor{Hub: c.cached, Live: c.live, Clock: c.clock, AvailableSince: func() time.Time {
		if c.away {
			return c.clock.Now()
		}
		return c.back
	}}
}

// renew gives a heartbeat that all see.
func (c *testMonitor) renew(at time.Time) {
	c.cached.renew(at)
	c.live.renew(at)
}

// outage has the API server not answer for a time, with a judgement each ten seconds.
func (c *testMonitor) outage(d time.Duration) {
	c.Helper()
	c.away, c.live.err = true, errors.New("connection refused")
	for end := c.clock.Now().Add(d); c.clock.Now().Before(end); c.clock.Step(10 * time.Second) {
		if liveness, err := c.monitor.Evaluate(c.Context(), c.member, c.report); err == nil && liveness.State == silent {
			c.Fatalf("the agent is silent at %s, while nobody could hear it", c.clock.Now())
		}
	}
	c.away, c.live.err, c.back = false, nil, c.clock.Now()
}

func (c *testMonitor) want(state heartbeats.State, left time.Duration) {
	c.Helper()
	liveness, err := c.monitor.Evaluate(c.Context(), c.member, c.report)
	if err != nil {
		c.Fatal(err)
	}
	if liveness.State != state || liveness.Remaining != left {
		c.Errorf("at %s: %s with %s left, want %s, %s", c.clock.Now().Format(time.TimeOnly), liveness.State, liveness.Remaining, state, left)
	}
}

// each runs a test for both dialects.
func each(t *testing.T, test func(*testMonitor, time.Duration)) {
	t.Helper()
	t.Parallel()
	for of, limit := range map[fleet.Type]time.Duration{fleet.TypeSveltos: 90 * time.Second, fleet.TypeKarmada: 38 * time.Second} {
		t.Run(string(of), func(t *testing.T) { test(newTestMonitor(t, of), limit) })
	}
}

func TestAgentIsAliveUntilTheLimitAfterItsLastHeartbeat(t *testing.T) {
	each(t, func(c *testMonitor, limit time.Duration) {
		c.want(unsure, limit)
		c.clock.Step(5 * time.Second)
		// The member's clock can be wrong in both directions, and can be set back.
		for _, wrong := range []time.Duration{-2 * time.Minute, 1000 * time.Hour, -3 * time.Minute} {
			c.renew(c.clock.Now().Add(wrong))
			c.want(alive, limit)
			c.clock.Step(limit - time.Second)
			c.want(alive, time.Second)
		}
		c.clock.Step(time.Second)
		c.want(silent, 0)
		c.clock.Step(time.Hour)
		c.want(silent, 0)
		c.renew(c.clock.Now())
		c.want(alive, limit)
	})
}

func TestOutageOfTheAPIServerStartsTheLimitAgain(t *testing.T) {
	each(t, func(c *testMonitor, limit time.Duration) {
		c.want(unsure, limit)
		c.renew(noon)
		c.want(alive, limit)
		c.outage(3 * time.Minute)
		c.want(unsure, limit)
		c.clock.Step(limit - time.Second)
		c.want(unsure, time.Second)
		c.renew(noon.Add(time.Hour))
		c.want(alive, limit)
	})
}

func TestAgentThatDiedDuringAnOutageIsSilentAfterTheLimit(t *testing.T) {
	each(t, func(c *testMonitor, limit time.Duration) {
		c.want(unsure, limit)
		c.renew(noon)
		c.want(alive, limit)
		c.outage(3 * time.Minute)
		c.clock.Step(limit - time.Second)
		c.want(unsure, time.Second)
		c.clock.Step(time.Second)
		c.want(silent, 0)
	})
}

func TestRestartOfTheHubStartsTheLimitAgain(t *testing.T) {
	each(t, func(c *testMonitor, limit time.Duration) {
		// The member's clock is two minutes behind.
		c.renew(noon.Add(-2 * time.Minute))
		c.start()
		c.want(unsure, limit)
		c.clock.Step(20 * time.Second)
		c.renew(c.clock.Now().Add(-2 * time.Minute))
		c.want(alive, limit)
		c.start()
		c.clock.Step(limit / 2)
		c.want(unsure, limit)
		c.clock.Step(limit)
		c.want(silent, 0)
	})
}

func TestSilenceIsConfirmedByTheAPIServer(t *testing.T) {
	each(t, func(c *testMonitor, limit time.Duration) {
		c.renew(noon)
		c.want(unsure, limit)
		c.clock.Step(limit)
		c.live.err = errors.New("connection refused")
		if liveness, err := c.monitor.Evaluate(t.Context(), c.member, ""); err == nil {
			t.Errorf("got %v, want an error", liveness)
		}
		c.live.err = nil
		// The watch is late.
		c.live.renew(noon.Add(time.Minute))
		c.want(alive, limit)
		// It returns the former Lease for some time, which is no heartbeat.
		c.clock.Step(limit - time.Second)
		c.want(alive, time.Second)
		c.clock.Step(time.Second)
		c.want(silent, 0)
	})
}

func TestReportIsAHeartbeat(t *testing.T) {
	each(t, func(c *testMonitor, limit time.Duration) {
		c.report = "first"
		c.want(unsure, limit)
		c.clock.Step(10 * time.Second)
		c.report = "second"
		c.want(alive, limit)
		c.clock.Step(10 * time.Second)
		// A caller that has not read the report, or a lost status.
		c.report = ""
		c.want(alive, limit-10*time.Second)
		c.report = "second"
		c.want(alive, limit-10*time.Second)
	})
}

func TestMissingLeaseIsNoHeartbeat(t *testing.T) {
	each(t, func(c *testMonitor, limit time.Duration) {
		c.renew(noon)
		c.want(unsure, limit)
		c.clock.Step(10 * time.Second)
		c.cached.lease.Spec.RenewTime, c.live.lease.Spec.RenewTime = nil, nil
		c.want(unsure, limit-10*time.Second)
		c.renew(noon)
		c.want(unsure, limit-10*time.Second)
	})
}

func TestClusterThatIsRegisteredAgainIsAnotherOne(t *testing.T) {
	each(t, func(c *testMonitor, limit time.Duration) {
		c.want(unsure, limit)
		c.renew(noon)
		c.want(alive, limit)
		c.member.UID = "2"
		c.want(unsure, limit)
		c.renew(noon.Add(time.Second))
		c.want(alive, limit)
		c.monitor.Forget(c.member.ID())
		c.want(unsure, limit)
	})
}

func TestLeaseCanOnlyShortenTheLimit(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		of        fleet.Type
		requested int32
		want      time.Duration
	}{
		"own duration":         {fleet.TypeSveltos, 44, heartbeats.LeaseDuration},
		"former release":       {fleet.TypeSveltos, 90, heartbeats.SveltosLimit},
		"too short":            {fleet.TypeSveltos, 1, heartbeats.LeaseDuration},
		"negative":             {fleet.TypeSveltos, -1, heartbeats.LeaseDuration},
		"too long":             {fleet.TypeSveltos, 1 << 30, heartbeats.SveltosLimit},
		"agent of a Cluster":   {fleet.TypeKarmada, 40, heartbeats.KarmadaLimit},
		"faster, of a Cluster": {fleet.TypeKarmada, 20, heartbeats.KarmadaLimit},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newTestMonitor(t, test.of)
			c.cached.lease.Spec.LeaseDurationSeconds, c.live.lease.Spec.LeaseDurationSeconds = &test.requested, &test.requested
			c.want(unsure, test.want)
			c.renew(noon)
			c.want(alive, test.want)
			c.clock.Step(test.want - time.Second)
			c.want(alive, time.Second)
			c.clock.Step(time.Second)
			c.want(silent, 0)
		})
	}
}

func TestLimitOfOneTypeKeepsTheOther(t *testing.T) {
	t.Parallel()
	c := newTestMonitor(t, fleet.TypeKarmada)
	c.monitor.Limits = map[fleet.Type]time.Duration{fleet.TypeSveltos: time.Hour}
	c.want(unsure, heartbeats.KarmadaLimit)
	c.renew(noon)
	c.want(alive, heartbeats.KarmadaLimit)
}
