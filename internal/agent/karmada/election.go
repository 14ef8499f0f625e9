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

// errSuperseded ends a session because another agent of the Cluster sends heartbeats while this one is not the leader.
var errSuperseded = errors.New("another agent of the Cluster reports")

// leaderElection starts and stops the sessions of this agent, which is one of several agents of a Cluster.
type leaderElection struct {
	agent *agent
	// ended receives the final error of runSessions.
	ended chan error
	// superseded receives a signal when runSessions has ended with errSuperseded.
	superseded chan struct{}

	// mu guards the fields below.
	mu sync.Mutex
	// stop ends the sessions and waits until they have ended; nil while none runs.
	stop func()
}

// runElection runs sessions while no other agent of the Cluster is leader. It returns when ctx ends or with a final
// error. The agents elect a leader by a Lease on the member. If the member does not answer, the leader cannot renew the
// Lease and stops changing the member. It keeps reporting to the hub until another agent, which may reach the member,
// sends heartbeats.
func (a *agent) runElection(ctx context.Context) error {
	if !a.opts.LeaderElect {
		a.gate.SetClosed(false)
		return a.runSessions(ctx)
	}
	election := &leaderElection{agent: a, ended: make(chan error, 1), superseded: make(chan struct{}, 1)}
	// The Lease is released after the sessions have ended, so that the sessions of two leaders do not overlap.
	electionCtx, endElection := context.WithCancel(context.WithoutCancel(ctx))
	var elector sync.WaitGroup
	elector.Go(func() {
		loop := a.backoffLoop()
		loop.BeforeAttempt = a.watchdogs.election.Reset
		_ = loop.Run(electionCtx, "elect one of the cluster's agents", func(electionCtx context.Context) error { return election.runElector(ctx, electionCtx) })
	})
	err := election.wait(ctx)
	election.stopSessions()
	endElection()
	elector.Wait()
	return err
}

// wait returns when ctx ends or the sessions have ended with a final error.
func (e *leaderElection) wait(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-e.ended:
			return err
		case <-e.superseded:
			e.onSuperseded(ctx)
		}
	}
}

// runElector takes part in one election, and runs sessions after winning it. electionCtx ends after ctx.
func (e *leaderElection) runElector(ctx, electionCtx context.Context) error {
	a := e.agent
	if err := a.ensureElectNamespace(electionCtx); err != nil {
		return err
	}
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: watchedLock{watchdog: a.watchdogs.election, Interface: &resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Namespace: a.opts.ElectNamespace, Name: electionName(a.opts.Cluster)},
			Client:     a.member.CoordinationV1(),
			LockConfig: resourcelock.ResourceLockConfig{Identity: a.opts.Identity},
			Labels:     map[string]string{clusterv1alpha1.SystemLabel: "true", register.RegistrationLabel: a.opts.Cluster},
		}},
		LeaseDuration: a.opts.ElectDuration, RenewDeadline: a.opts.ElectDeadline, RetryPeriod: a.opts.ElectRetry,
		ReleaseOnCancel: true, Name: register.DefaultAgentDeployment,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(leadingCtx context.Context) { e.onStartedLeading(ctx, leadingCtx) },
			OnStoppedLeading: func() { e.onStoppedLeading() },
			OnNewLeader: func(identity string) {
				if identity != a.opts.Identity {
					log.FromContext(ctx).Info("another agent of this cluster is the leader", "agent", identity)
					// A waiting agent is ready: it has read the Lease of the leader on the member.
					a.probes.Ready.Store(true)
					e.stopSessions()
				}
			},
		},
	})
	if err != nil {
		return fmt.Errorf("create the leader elector: %w", err)
	}
	elector.Run(electionCtx)
	return nil
}

// ensureElectNamespace creates the namespace of the Lease unless it exists.
func (a *agent) ensureElectNamespace(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	return ensureNamespace(ctx, a.member, a.opts.ElectNamespace)
}

// onStartedLeading opens the gate and starts the sessions unless they run. leadingCtx ends when the agent is not the
// leader any more.
func (e *leaderElection) onStartedLeading(ctx, leadingCtx context.Context) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if leadingCtx.Err() != nil || ctx.Err() != nil {
		return
	}
	e.agent.gate.SetClosed(false)
	e.startLocked(ctx)
}

// startLocked starts the sessions unless they run. The caller holds mu.
func (e *leaderElection) startLocked(ctx context.Context) {
	if e.stop != nil {
		return
	}
	sessionsCtx, cancel := context.WithCancel(ctx)
	var sessions sync.WaitGroup
	sessions.Go(func() {
		switch err := e.agent.runSessions(sessionsCtx); {
		case errors.Is(err, errSuperseded):
			log.FromContext(ctx).Info("this agent stops reporting until it is elected again", "reason", err.Error())
			session.Signal(e.superseded)
		case err != nil:
			e.ended <- err
		}
	})
	e.stop = func() { cancel(); sessions.Wait() }
}

// onStoppedLeading closes the gate, so that the agent does not change the member. The sessions continue to report.
func (e *leaderElection) onStoppedLeading() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.agent.gate.SetClosed(true)
}

// stopSessions closes the gate and stops the sessions.
func (e *leaderElection) stopSessions() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.agent.gate.SetClosed(true)
	e.stopLocked()
}

// onSuperseded is called after the sessions have ended with errSuperseded. It starts new sessions if this agent has
// become leader again meanwhile.
func (e *leaderElection) onSuperseded(ctx context.Context) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.stopLocked()
	if e.agent.gate.IsOpen() {
		e.startLocked(ctx)
	}
}

// stopLocked stops the sessions and waits until they have ended. The caller holds mu.
func (e *leaderElection) stopLocked() {
	if e.stop != nil {
		e.stop()
		e.stop = nil
	}
}

// electionName is the name of the Lease on the member, and of the ConfigMap of a fileStore.
func electionName(cluster string) string { return register.DefaultAgentDeployment + "-" + cluster }

// watchedLock is a lock that resets the watchdog of the election on each request, and limits each request by
// requestTimeout.
type watchedLock struct {
	resourcelock.Interface
	watchdog *session.Watchdog
}

// Get reads the record of the Lease.
func (l watchedLock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	l.watchdog.Reset()
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	return l.Interface.Get(ctx)
}

// Create creates the Lease.
func (l watchedLock) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	l.watchdog.Reset()
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	return l.Interface.Create(ctx, record)
}

// Update updates the Lease.
func (l watchedLock) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	l.watchdog.Reset()
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	return l.Interface.Update(ctx, record)
}

// watchdogs check that the election loop runs, and during sessions the heartbeat loop too.
type watchdogs struct {
	// election is nil without leader election.
	election  *session.Watchdog
	heartbeat *session.Watchdog
	inSession atomic.Bool
}

// Check returns an error if a loop is stuck.
func (w *watchdogs) Check() error {
	if w.election != nil && w.election.Check() != nil {
		return errors.New("the election loop is stuck")
	}
	if w.inSession.Load() {
		return w.heartbeat.Check()
	}
	return nil
}
