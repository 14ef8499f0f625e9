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

func TestOneAgentIsLeader(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "elect", time.Hour)
	elect := func(identity string) func(*Options) {
		return func(o *Options) { o.LeaderElect, o.Identity = true, identity }
	}
	_, stop, _ := w.startAgent(elect("first"))
	w.wantLeader("first")
	_, _, _ = w.startAgent(elect("second"))
	w.createWork("one", "first")
	w.wantValue("one", "first")
	w.letPass(3 * time.Second)
	w.wantLeader("first")
	stop()
	// The agent has released the Lease, so the other agent does not wait for its end.
	began := time.Now()
	w.wantLeader("second")
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("taking over took %s", took)
	}
	w.createWork("two", "second")
	w.wantValue("two", "second")
}

// An agent that loses its member keeps reporting to the hub, until another agent takes over.
func TestOneAgentReports(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "rivals", time.Hour)
	w.options.StatusInterval, w.options.LeaseDuration = time.Second, 4*time.Second
	w.options.SuccessThreshold, w.options.FailureThreshold = time.Second, 2*time.Second
	w.options.ElectDuration, w.options.ElectDeadline, w.options.ElectRetry = 5*time.Second, 3*time.Second, time.Second
	recorder, health := &requestRecorder{}, freeAddress(t)
	elect := func(identity string) func(*Options) {
		return func(o *Options) { o.LeaderElect, o.Identity = true, identity }
	}
	_, _, logs := w.startAgent(elect("first"), func(o *Options) {
		o.HealthAddress = health
		o.Member = rest.CopyConfig(o.Member)
		o.Member.Wrap(recorder.wrap)
	})
	w.wantLeader("first")
	w.wantReady()

	// Without another agent it keeps reporting, although it has lost its election.
	recorder.setAway(true)
	w.eventually("the Cluster is not Ready", w.hasReadyStatus(metav1.ConditionFalse))
	w.letPass(w.options.ElectDuration)
	heard := w.lastHeartbeat()
	w.letPass(3 * time.Second)
	if got := w.lastHeartbeat(); !got.After(heard) {
		t.Errorf("last heartbeat of an agent without its member: got %s, three seconds after it was %s", got, heard)
	}
	w.wantLeader("first")
	// The Lease of a dead agent does not stop it.
	died := metav1.NewMicroTime(time.Now().Add(-w.options.LeaseDuration))
	lease := &coordinationv1.Lease{}
	lease.Namespace, lease.Name = fleet.ExecutionSpace(w.name), w.name
	beat := fmt.Appendf(nil, `{"spec":{"holderIdentity":"dead","renewTime":%q}}`, died.UTC().Format(metav1.RFC3339Micro))
	if err := w.hubClient.Patch(t.Context(), lease, client.RawPatch(types.MergePatchType, beat)); err != nil {
		t.Fatal(err)
	}
	w.wantLeader("first")

	_, stop, _ := w.startAgent(elect("second"))
	w.wantLeader("second")
	w.wantReady()
	w.eventually("the first agent stops reporting", func(context.Context) error {
		if len(logs.linesWith("this agent stops reporting")) != 1 {
			return errors.New("it reports")
		}
		return nil
	})
	before := w.cluster()
	w.letPass(6 * time.Second)
	if after := w.cluster(); readyStatus(&after.Status) != "True" || after.Generation != before.Generation ||
		!equality.Semantic.DeepEqual(before.Status.Conditions, after.Status.Conditions) {
		t.Errorf("Cluster: got %+v, want %+v", after, before)
	}
	w.wantLeader("second")
	w.wantProbe(health, "/healthz", http.StatusOK)
	if lines := logs.linesWith("this agent stops reporting"); len(lines) != 1 {
		t.Errorf("log lines: got %v, want one", lines)
	}

	// The first agent takes part in the election again.
	recorder.setAway(false)
	stop()
	w.wantLeader("first")
	w.wantReady()
	w.createWork("one", "first")
	w.wantValue("one", "first")
}

// shiftedClock is a clock that can be advanced.
type shiftedClock struct {
	clock.RealClock
	offset atomic.Int64
}

func (c *shiftedClock) Now() time.Time { return c.RealClock.Now().Add(time.Duration(c.offset.Load())) }

func (c *shiftedClock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

func (c *shiftedClock) advance(d time.Duration) { c.offset.Add(int64(d)) }

// Waiting replicas are ready and alive for any time, and a replica whose election loop is stuck is not.
func TestWaitingAgentIsReadyAndAlive(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "standby", time.Hour)
	w.options.ElectDuration, w.options.ElectDeadline, w.options.ElectRetry = 10*time.Second, 7*time.Second, time.Second
	recorder := &requestRecorder{}
	_, stop, _ := w.startAgent(func(o *Options) {
		o.LeaderElect, o.Identity, o.wrapHubTransport = true, "first", recorder.wrap
		o.Member = rest.CopyConfig(o.Member)
		o.Member.WrapTransport = recorder.wrap
	})
	w.wantLeader("first")

	// The second agent's requests for Leases block while the gate is closed, even after their contexts end.
	gate, clock, health := session.NewGate(false), &shiftedClock{}, freeAddress(t)
	_, _, _ = w.startAgent(func(o *Options) {
		o.LeaderElect, o.Identity, o.Clock, o.HealthAddress = true, "second", clock, health
		o.Member = rest.CopyConfig(o.Member)
		o.Member.WrapTransport = func(next http.RoundTripper) http.RoundTripper {
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				if strings.Contains(r.URL.Path, "/leases/") {
					_, _ = gate.WaitOpen(t.Context())
				}
				return next.RoundTrip(r)
			})
		}
	})
	began := time.Now()
	w.wantProbe(health, "/readyz", http.StatusOK)
	w.wantProbe(health, "/healthz", http.StatusOK)
	t.Logf("a second replica is ready after %s", time.Since(began))
	clock.advance(10 * time.Minute)
	w.wantProbe(health, "/healthz", http.StatusOK)
	w.wantProbe(health, "/readyz", http.StatusOK)
	w.wantLeader("first")

	gate.SetClosed(true)
	w.letPass(3 * w.options.ElectRetry)
	clock.advance(10 * time.Minute)
	w.wantProbe(health, "/healthz", http.StatusServiceUnavailable)
	w.letPass(3 * w.options.ElectRetry)
	w.wantProbe(health, "/healthz", http.StatusServiceUnavailable)
	gate.SetClosed(false)
	w.wantProbe(health, "/healthz", http.StatusOK)

	// The first agent dies without releasing the Lease.
	recorder.setAway(true)
	stop()
	began = time.Now()
	w.wantLeader("second")
	took := time.Since(began)
	t.Logf("taking over from a dead replica took %s", took)
	// The next attempt is at most 2.2 periods after the previous attempt. The limit is higher for busy machines.
	if most := w.options.ElectDuration + 3*w.options.ElectRetry + 10*time.Second; took > most {
		t.Errorf("taking over took %s, want %s at most", took, most)
	}
	w.createWork("one", "second")
	w.wantValue("one", "second")
	w.wantProbe(health, "/healthz", http.StatusOK)
	w.wantProbe(health, "/readyz", http.StatusOK)
}

func TestWatchdogsDetectStuckLoops(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		elects, works bool
		turned        func(*watchdogs)
		want          string
	}{
		"waits":                    {elects: true, turned: func(p *watchdogs) { p.election.Reset() }},
		"waits and hangs":          {elects: true, turned: func(p *watchdogs) { p.heartbeat.Reset() }, want: "election"},
		"works":                    {elects: true, works: true, turned: func(p *watchdogs) { p.election.Reset(); p.heartbeat.Reset() }},
		"works and does not renew": {elects: true, works: true, turned: func(p *watchdogs) { p.heartbeat.Reset() }, want: "election"},
		"works without the hub":    {elects: true, works: true, turned: func(p *watchdogs) { p.election.Reset() }, want: "heartbeat"},
		"works alone":              {works: true, turned: func(p *watchdogs) { p.heartbeat.Reset() }},
		"works alone, without it":  {works: true, turned: func(*watchdogs) {}, want: "heartbeat"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			forward := &shiftedClock{}
			p := &watchdogs{heartbeat: session.NewWatchdog(forward, time.Second)}
			if tc.elects {
				p.election = session.NewWatchdog(forward, time.Second)
			}
			p.inSession.Store(tc.works)
			forward.advance(10 * time.Minute)
			tc.turned(p)
			if err := p.Check(); (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}
