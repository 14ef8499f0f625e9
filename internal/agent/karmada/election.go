package karmada

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"sigs.k8s.io/controller-runtime/pkg/log"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/join/register"
)

// errYielded says that another agent of the Cluster has the say on the hub, and that this one holds no election.
var errYielded = errors.New("another agent of the Cluster reports")

// term is the time for which one of several agents of a Cluster works.
type term struct {
	agent *agent
	// ended has what lead returned when that is the end of the agent.
	ended chan error
	// yielded has a request when lead has left the hub to another agent.
	yielded chan struct{}

	// mu guards what follows.
	mu sync.Mutex
	// stop ends the work and waits; nil while this agent does not work.
	stop func()
}

// elect works whenever no other agent of the Cluster does, until ctx ends or the work is over for good. The agents elect one by a Lease on
// the member. One that cannot renew it, because the member does not answer, changes nothing on the member any more. It goes on telling the hub so,
// until it sees there that another one, whom the member may well answer, has taken over.
func (a *agent) elect(ctx context.Context) error {
	if !a.opts.LeaderElect {
		a.gate.SetClosed(false)
		return a.lead(ctx)
	}
	t := &term{agent: a, ended: make(chan error, 1), yielded: make(chan struct{}, 1)}
	// The Lease is given back after the work has ended, for the next one not to meet it.
	electing, resign := context.WithCancel(context.WithoutCancel(ctx))
	var running sync.WaitGroup
	running.Go(func() {
		taking := a.persistence()
		taking.BeforeAttempt = a.pulses.election.Reset
		_ = taking.Run(electing, "elect one of the cluster's agents", func(electing context.Context) error { return t.campaign(ctx, electing) })
	})
	err := t.wait(ctx)
	t.leave()
	resign()
	running.Wait()
	return err
}

// wait returns when ctx ends, or the work is over for good.
func (t *term) wait(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-t.ended:
			return err
		case <-t.yielded:
			t.yield(ctx)
		}
	}
}

// campaign takes part in one election, and works if it wins. electing ends after ctx.
func (t *term) campaign(ctx, electing context.Context) error {
	a := t.agent
	if err := a.makeElectNamespace(electing); err != nil {
		return err
	}
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: turning{pulse: a.pulses.election, Interface: &resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Namespace: a.opts.ElectNamespace, Name: electionName(a.opts.Cluster)},
			Client:     a.member.CoordinationV1(),
			LockConfig: resourcelock.ResourceLockConfig{Identity: a.opts.Identity},
			Labels:     map[string]string{clusterv1alpha1.SystemLabel: "true", register.RegistrationLabel: a.opts.Cluster},
		}},
		LeaseDuration: a.opts.ElectDuration, RenewDeadline: a.opts.ElectDeadline, RetryPeriod: a.opts.ElectRetry,
		ReleaseOnCancel: true, Name: register.DefaultAgentName,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(leading context.Context) { t.enter(ctx, leading) },
			OnStoppedLeading: func() { t.pause() },
			OnNewLeader: func(identity string) {
				if identity != a.opts.Identity {
					log.FromContext(ctx).Info("another agent of this cluster works", "agent", identity)
					// One that waits is ready: it has seen on the member whom it waits for, and works when that one ends.
					a.probes.Ready.Store(true)
					t.leave()
				}
			},
		},
	})
	if err != nil {
		return fmt.Errorf("take part in the election of the cluster's agent: %w", err)
	}
	elector.Run(electing)
	return nil
}

// makeElectNamespace makes the namespace of the Lease unless it is there.
func (a *agent) makeElectNamespace(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	return makeNamespace(ctx, a.member, a.opts.ElectNamespace)
}

// enter begins to work, or goes on. leading ends when the agent is not the elected one any more.
func (t *term) enter(ctx, leading context.Context) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if leading.Err() != nil || ctx.Err() != nil {
		return
	}
	t.agent.gate.SetClosed(false)
	t.begin(ctx)
}

// begin begins to work, unless it has begun. The caller holds mu.
func (t *term) begin(ctx context.Context) {
	if t.stop != nil {
		return
	}
	working, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() {
		switch err := t.agent.lead(working); {
		case errors.Is(err, errYielded):
			log.FromContext(ctx).Info("this agent stops reporting until it is elected again", "reason", err.Error())
			session.Signal(t.yielded)
		case err != nil:
			t.ended <- err
		}
	})
	t.stop = func() { cancel(); running.Wait() }
}

// pause keeps the agent from changing the member.
func (t *term) pause() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.agent.gate.SetClosed(true)
}

// leave ends the work.
func (t *term) leave() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.agent.gate.SetClosed(true)
	t.end()
}

// yield takes note that the work has ended in favour of another agent, and begins again if this one was elected meanwhile.
func (t *term) yield(ctx context.Context) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.end()
	if t.agent.gate.IsOpen() {
		t.begin(ctx)
	}
}

// end ends the work and waits. The caller holds mu.
func (t *term) end() {
	if t.stop != nil {
		t.stop()
		t.stop = nil
	}
}

// electionName is the name of the Lease on the member.
func electionName(cluster string) string { return register.DefaultAgentName + "-" + cluster }

// turning is a lock that notes each look at it, which is a turn of the election, and waits for none longer than requestLimit.
type turning struct {
	resourcelock.Interface
	pulse *session.Watchdog
}

// Get reads the record.
func (l turning) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	l.pulse.Reset()
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	return l.Interface.Get(ctx)
}

// Create makes the record.
func (l turning) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	l.pulse.Reset()
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	return l.Interface.Create(ctx, record)
}

// Update writes the record.
func (l turning) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	l.pulse.Reset()
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	return l.Interface.Update(ctx, record)
}

// pulses tell whether an agent is alive. One that waits for its turn takes part in the election; one that works also keeps in touch with
// the hub.
type pulses struct {
	// election is nil for an agent that takes part in none.
	election *session.Watchdog
	hub      *session.Watchdog
	working  atomic.Bool
}

// Check fails if a loop that should turn stands still.
func (p *pulses) Check() error {
	if p.election != nil && p.election.Check() != nil {
		return errors.New("the loop that takes part in the election stands still")
	}
	if p.working.Load() {
		return p.hub.Check()
	}
	return nil
}
