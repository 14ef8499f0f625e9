package karmada

import (
	"context"
	"fmt"
	"sync"

	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/kube"
)

// engineRunner runs one engine, for the Cluster and the hub in the agentState.
type engineRunner struct {
	agent *agent

	// mu guards the fields below.
	mu sync.Mutex
	// sessionsCtx is the context of runSessions.
	sessionsCtx       context.Context //nolint:containedctx // the engine outlives the session that starts it
	engine            *engine.Engine
	clusterUID, hubID string
	stopEngine        func()
}

// setSessionsContext sets the context that ends the engine.
func (r *engineRunner) setSessionsContext(ctx context.Context) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sessionsCtx = ctx
}

// ensureEngine returns the running engine for this UID of the Cluster and this hub ID. If none runs, it stops an engine
// for another UID or hub, and starts a new one.
//
//nolint:contextcheck // the engine outlives the session that starts it
func (r *engineRunner) ensureEngine(ctx context.Context, clusterUID, hubID string) (*engine.Engine, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.engine != nil && r.clusterUID == clusterUID && r.hubID == hubID {
		return r.engine, nil
	}
	r.stopLocked()
	a := r.agent
	// ensureNamespace sets the system label. The uninstaller keeps a namespace without it.
	err := kube.RetryOn(ctx, func(error) bool { return ctx.Err() == nil }, func() error {
		return ensureNamespace(ctx, a.member, a.opts.ClusterNamespace)
	})
	if err != nil {
		return nil, err
	}
	newEngine, err := engine.New(a.opts.Member, engine.Options{
		Namespace: a.opts.ClusterNamespace, Scope: clusterUID, Hub: hubID, OnCorrect: a.metrics.RecordCorrection, OnReport: a.onReport, OnChange: a.onObjectChange, Clock: a.opts.Clock,
	})
	if err != nil {
		return nil, fmt.Errorf("create the engine for the member: %w", err)
	}
	engineCtx, cancel := context.WithCancel(r.sessionsCtx)
	var goroutine sync.WaitGroup
	goroutine.Go(func() {
		a.gate.RunWhileOpen(engineCtx, func(ctx context.Context) { _ = a.backoffLoop().Run(ctx, "correct drift", newEngine.Run) })
	})
	r.engine, r.clusterUID, r.hubID = newEngine, clusterUID, hubID
	r.stopEngine = func() { cancel(); goroutine.Wait() }
	return newEngine, nil
}

// stop stops the engine if one runs.
func (r *engineRunner) stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stopLocked()
}

func (r *engineRunner) stopLocked() {
	if r.stopEngine != nil {
		r.stopEngine()
	}
	r.engine, r.clusterUID, r.hubID, r.stopEngine = nil, "", "", nil
}
