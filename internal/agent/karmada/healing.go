package karmada

import (
	"context"
	"fmt"
	"sync"

	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/kube"
)

// healing is the engine that runs, for the Cluster that the agent knows of.
type healing struct {
	agent *agent

	// mu guards what follows.
	mu sync.Mutex
	// lead is the context of the agent's work.
	lead       context.Context //nolint:containedctx // the engine outlives the session that starts it
	engine     *engine.Engine
	scope, hub string
	end        func()
}

// while lets engines run until ctx ends.
func (h *healing) while(ctx context.Context) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lead = ctx
}

// start runs the engine for the Cluster of this uid, of the hub of that uid, unless it runs. Another one is stopped first.
//
//nolint:contextcheck // the engine outlives the session that starts it
func (h *healing) start(ctx context.Context, scope, hub string) (*engine.Engine, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.engine != nil && h.scope == scope && h.hub == hub {
		return h.engine, nil
	}
	h.halt()
	a := h.agent
	// It would make the namespace too, but without the label by which it is known to be a registration's.
	err := kube.Insist(ctx, func(error) bool { return ctx.Err() == nil }, func() error {
		return makeNamespace(ctx, a.member, a.opts.ClusterNamespace)
	})
	if err != nil {
		return nil, err
	}
	made, err := engine.New(a.opts.Member, engine.Options{
		Namespace: a.opts.ClusterNamespace, Scope: scope, Hub: hub, OnHeal: a.healed, OnChange: a.changed, Clock: a.opts.Clock,
	})
	if err != nil {
		return nil, fmt.Errorf("make engine for the member: %w", err)
	}
	running, cancel := context.WithCancel(h.lead)
	var ended sync.WaitGroup
	ended.Go(func() {
		a.gate.RunWhileOpen(running, func(ctx context.Context) { _ = a.persistence().Run(ctx, "heal", made.Run) })
	})
	h.engine, h.scope, h.hub = made, scope, hub
	h.end = func() { cancel(); ended.Wait() }
	return made, nil
}

// stop ends the engine, if one runs.
func (h *healing) stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.halt()
}

func (h *healing) halt() {
	if h.end != nil {
		h.end()
	}
	h.engine, h.scope, h.hub, h.end = nil, "", "", nil
}
