package karmada

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/fleet"
)

func TestOneOfSeveralAgentsWorks(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "elect", time.Hour)
	elect := func(identity string) func(*Options) {
		return func(o *Options) { o.LeaderElect, o.Identity = true, identity }
	}
	_, stop, _ := w.start(elect("first"))
	w.holder("first")
	_, _, _ = w.start(elect("second"))
	w.work("one", "first")
	w.wantValue("one", "first")
	w.settle(3 * time.Second)
	w.holder("first")
	stop()
	// It gave the election back: nobody waits for it.
	began := time.Now()
	w.holder("second")
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("taking over took %s", took)
	}
	w.work("two", "second")
	w.wantValue("two", "second")
}

// An agent that loses its member keeps the hub, and tells it so; one that takes over has the say.
func TestOneOfSeveralAgentsReports(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "rivals", time.Hour)
	w.options.StatusInterval, w.options.LeaseDuration = time.Second, 4*time.Second
	w.options.SuccessThreshold, w.options.FailureThreshold = time.Second, 2*time.Second
	w.options.ElectDuration, w.options.ElectDeadline, w.options.ElectRetry = 5*time.Second, 3*time.Second, time.Second
	wire, health := &requests{}, freeAddress(t)
	elect := func(identity string) func(*Options) {
		return func(o *Options) { o.LeaderElect, o.Identity = true, identity }
	}
	_, _, j := w.start(elect("first"), func(o *Options) {
		o.HealthAddress = health
		o.Member = rest.CopyConfig(o.Member)
		o.Member.Wrap(wire.wrap)
	})
	w.holder("first")
	w.ready()

	// Alone it goes on saying how the member is, although it has lost its election.
	wire.setAway(true)
	w.eventually("the Cluster is not Ready", w.is(metav1.ConditionFalse))
	w.settle(w.options.ElectDuration)
	heard := w.heartbeat()
	w.settle(3 * time.Second)
	if got := w.heartbeat(); !got.After(heard) {
		t.Errorf("last heartbeat of an agent without its member: got %s, three seconds after it was %s", got, heard)
	}
	w.holder("first")
	// What a dead agent has left does not keep it from that.
	died := metav1.NewMicroTime(time.Now().Add(-w.options.LeaseDuration))
	lease := &coordinationv1.Lease{}
	lease.Namespace, lease.Name = fleet.ExecutionSpace(w.name), w.name
	beat := fmt.Appendf(nil, `{"spec":{"holderIdentity":"dead","renewTime":%q}}`, died.UTC().Format(metav1.RFC3339Micro))
	if err := w.hubClient.Patch(t.Context(), lease, client.RawPatch(types.MergePatchType, beat)); err != nil {
		t.Fatal(err)
	}
	w.holder("first")

	_, stop, _ := w.start(elect("second"))
	w.holder("second")
	w.ready()
	w.eventually("the first one leaves", func(context.Context) error {
		if len(j.with("this agent stops reporting")) != 1 {
			return errors.New("it does not")
		}
		return nil
	})
	before := w.cluster()
	w.settle(6 * time.Second)
	if after := w.cluster(); readiness(&after.Status) != "True" || after.Generation != before.Generation ||
		!equality.Semantic.DeepEqual(before.Status.Conditions, after.Status.Conditions) {
		t.Errorf("Cluster: got %+v, want %+v", after, before)
	}
	w.holder("second")
	w.probed(health, "/healthz", http.StatusOK)
	if told := j.with("this agent stops reporting"); len(told) != 1 {
		t.Errorf("leaving: got %v, want it once", told)
	}

	// It takes part in the election as before.
	wire.setAway(false)
	stop()
	w.holder("first")
	w.ready()
	w.work("one", "first")
	w.wantValue("one", "first")
}

// skipping is a clock that can be put forward.
type skipping struct {
	clock.RealClock
	ahead atomic.Int64
}

func (c *skipping) Now() time.Time { return c.RealClock.Now().Add(time.Duration(c.ahead.Load())) }

func (c *skipping) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

func (c *skipping) skip(d time.Duration) { c.ahead.Add(int64(d)) }

// The kubelet of a Deployment with several replicas finds those that wait ready and alive, however long they wait, and one that hangs not.
func TestAgentThatWaitsIsReadyAndAlive(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "standby", time.Hour)
	w.options.ElectDuration, w.options.ElectDeadline, w.options.ElectRetry = 10*time.Second, 7*time.Second, time.Second
	wire := &requests{}
	_, stop, _ := w.start(func(o *Options) {
		o.LeaderElect, o.Identity, o.wrapHub = true, "first", wire.wrap
		o.Member = rest.CopyConfig(o.Member)
		o.Member.WrapTransport = wire.wrap
	})
	w.holder("first")

	// The second one's requests for Leases do not come back while hang is closed, whatever their contexts say.
	hang, forward, health := session.NewGate(false), &skipping{}, freeAddress(t)
	_, _, _ = w.start(func(o *Options) {
		o.LeaderElect, o.Identity, o.Clock, o.HealthAddress = true, "second", forward, health
		o.Member = rest.CopyConfig(o.Member)
		o.Member.WrapTransport = func(next http.RoundTripper) http.RoundTripper {
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				if strings.Contains(r.URL.Path, "/leases/") {
					_, _ = hang.WaitOpen(t.Context())
				}
				return next.RoundTrip(r)
			})
		}
	})
	began := time.Now()
	w.probed(health, "/readyz", http.StatusOK)
	w.probed(health, "/healthz", http.StatusOK)
	t.Logf("a second replica is ready after %s", time.Since(began))
	forward.skip(10 * time.Minute)
	w.probed(health, "/healthz", http.StatusOK)
	w.probed(health, "/readyz", http.StatusOK)
	w.holder("first")

	hang.SetClosed(true)
	w.settle(3 * w.options.ElectRetry)
	forward.skip(10 * time.Minute)
	w.probed(health, "/healthz", http.StatusServiceUnavailable)
	w.settle(3 * w.options.ElectRetry)
	w.probed(health, "/healthz", http.StatusServiceUnavailable)
	hang.SetClosed(false)
	w.probed(health, "/healthz", http.StatusOK)

	// The first one dies, so that it cannot give the election back.
	wire.setAway(true)
	stop()
	began = time.Now()
	w.holder("second")
	took := time.Since(began)
	t.Logf("taking over from a dead replica took %s", took)
	// A look comes up to 2.2 periods after the one before; the rest is for a busy machine.
	if most := w.options.ElectDuration + 3*w.options.ElectRetry + 10*time.Second; took > most {
		t.Errorf("taking over took %s, want %s at most", took, most)
	}
	w.work("one", "second")
	w.wantValue("one", "second")
	w.probed(health, "/healthz", http.StatusOK)
	w.probed(health, "/readyz", http.StatusOK)
}

func TestLoopsThatShouldTurn(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		elects, works bool
		turned        func(*pulses)
		want          string
	}{
		"waits":                    {elects: true, turned: func(p *pulses) { p.election.Reset() }},
		"waits and hangs":          {elects: true, turned: func(p *pulses) { p.hub.Reset() }, want: "election"},
		"works":                    {elects: true, works: true, turned: func(p *pulses) { p.election.Reset(); p.hub.Reset() }},
		"works and does not renew": {elects: true, works: true, turned: func(p *pulses) { p.hub.Reset() }, want: "election"},
		"works without the hub":    {elects: true, works: true, turned: func(p *pulses) { p.election.Reset() }, want: "hub"},
		"works alone":              {works: true, turned: func(p *pulses) { p.hub.Reset() }},
		"works alone, without it":  {works: true, turned: func(*pulses) {}, want: "hub"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			forward := &skipping{}
			p := &pulses{hub: session.NewWatchdog(forward, time.Second)}
			if tc.elects {
				p.election = session.NewWatchdog(forward, time.Second)
			}
			p.working.Store(tc.works)
			forward.skip(10 * time.Minute)
			tc.turned(p)
			if err := p.Check(); (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}
