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

// leases is a reader that returns the same Lease for every name, or an error.
type leases struct {
	client.Reader
	lease coordinationv1.Lease
	err   error
}

func (l *leases) Get(_ context.Context, _ client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	l.lease.DeepCopyInto(obj.(*coordinationv1.Lease))
	return l.err
}

// renew sets the renewTime, a time of the member's clock.
func (l *leases) renew(at time.Time) { l.lease.Spec.RenewTime = &metav1.MicroTime{Time: at} }

// testMonitor is a Monitor with its cached and live readers of the Lease. It can simulate an outage of the API server.
type testMonitor struct {
	testing.TB
	clock        *clocktesting.FakeClock
	monitor      *heartbeats.Monitor
	cached, live *leases
	member       fleet.Member
	report       string
	// isDown is true during an outage of the API server, and availableSince is the end of the last outage.
	isDown         bool
	availableSince time.Time
}

func newTestMonitor(t *testing.T, of fleet.Type) *testMonitor {
	t.Helper()
	c := &testMonitor{TB: t, clock: clocktesting.NewFakeClock(noon), cached: &leases{}, live: &leases{}, member: fleet.Member{Type: of, Name: "one", UID: "1"}}
	c.start()
	return c
}

// start replaces the monitor, like a restart of the hub.
func (c *testMonitor) start() {
	c.availableSince = c.clock.Now()
	c.monitor = &heartbeats.Monitor{Hub: c.cached, Live: c.live, Clock: c.clock, AvailableSince: func() time.Time {
		if c.isDown {
			return c.clock.Now()
		}
		return c.availableSince
	}}
}

// renew sends a heartbeat to the cached and the live Lease.
func (c *testMonitor) renew(at time.Time) {
	c.cached.renew(at)
	c.live.renew(at)
}

// outage simulates an outage of the API server, with an evaluation every ten seconds.
func (c *testMonitor) outage(d time.Duration) {
	c.Helper()
	c.isDown, c.live.err = true, errors.New("connection refused")
	for end := c.clock.Now().Add(d); c.clock.Now().Before(end); c.clock.Step(10 * time.Second) {
		if liveness, err := c.monitor.Evaluate(c.Context(), c.member, c.report); err == nil && liveness.State == silent {
			c.Fatalf("the agent is silent at %s, during the outage", c.clock.Now())
		}
	}
	c.isDown, c.live.err, c.availableSince = false, nil, c.clock.Now()
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

// forEachType runs a test for both types of members.
func forEachType(t *testing.T, test func(*testMonitor, time.Duration)) {
	t.Helper()
	t.Parallel()
	for of, limit := range map[fleet.Type]time.Duration{fleet.TypeSveltos: 90 * time.Second, fleet.TypeKarmada: 38 * time.Second} {
		t.Run(string(of), func(t *testing.T) { test(newTestMonitor(t, of), limit) })
	}
}

func TestAgentIsAliveUntilTheLimitAfterItsLastHeartbeat(t *testing.T) {
	forEachType(t, func(c *testMonitor, limit time.Duration) {
		c.want(unsure, limit)
		c.clock.Step(5 * time.Second)
		// The member's clock may be fast or slow, and may be set back.
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
	forEachType(t, func(c *testMonitor, limit time.Duration) {
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
	forEachType(t, func(c *testMonitor, limit time.Duration) {
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
	forEachType(t, func(c *testMonitor, limit time.Duration) {
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
	forEachType(t, func(c *testMonitor, limit time.Duration) {
		c.renew(noon)
		c.want(unsure, limit)
		c.clock.Step(limit)
		c.live.err = errors.New("connection refused")
		if liveness, err := c.monitor.Evaluate(t.Context(), c.member, ""); err == nil {
			t.Errorf("got %v, want an error", liveness)
		}
		c.live.err = nil
		// The cached Lease is stale.
		c.live.renew(noon.Add(time.Minute))
		c.want(alive, limit)
		// The reader returns the former Lease for some time, which is no heartbeat.
		c.clock.Step(limit - time.Second)
		c.want(alive, time.Second)
		c.clock.Step(time.Second)
		c.want(silent, 0)
	})
}

func TestReportIsAHeartbeat(t *testing.T) {
	forEachType(t, func(c *testMonitor, limit time.Duration) {
		c.report = "first"
		c.want(unsure, limit)
		c.clock.Step(10 * time.Second)
		c.report = "second"
		c.want(alive, limit)
		c.clock.Step(10 * time.Second)
		// A caller that has not read the report, or that has lost the status.
		c.report = ""
		c.want(alive, limit-10*time.Second)
		c.report = "second"
		c.want(alive, limit-10*time.Second)
	})
}

func TestMissingLeaseIsNoHeartbeat(t *testing.T) {
	forEachType(t, func(c *testMonitor, limit time.Duration) {
		c.renew(noon)
		c.want(unsure, limit)
		c.clock.Step(10 * time.Second)
		c.cached.lease.Spec.RenewTime, c.live.lease.Spec.RenewTime = nil, nil
		c.want(unsure, limit-10*time.Second)
		c.renew(noon)
		c.want(unsure, limit-10*time.Second)
	})
}

func TestClusterThatIsRegisteredAgainIsAnotherMember(t *testing.T) {
	forEachType(t, func(c *testMonitor, limit time.Duration) {
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
