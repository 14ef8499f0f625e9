package heartbeats

import (
	"context"
	"fmt"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/fleet"
)

const (
	// SveltosLimit is how long the agent of a SveltosCluster may be silent before it counts as dead: three heartbeats of
	// 30 s.
	SveltosLimit = 90 * time.Second
	// KarmadaLimit is the same for the agent of a Cluster, whose heartbeats are 10 s apart. Users see the silence within
	// Karmada's 40 s.
	KarmadaLimit = 38 * time.Second
	// readLimit is how long the API server may take to return a Lease.
	readLimit = 5 * time.Second
)

// State is the result of a judgement.
type State string

// The states of an agent.
const (
	// Alive means that a heartbeat was seen within the limit.
	Alive State = "Alive"
	// Silent means that the hub could see for as long as the limit, and saw no heartbeat.
	Silent State = "Silent"
	// Unsure means that the hub has not seen a heartbeat, but could not see for as long as the limit either.
	Unsure State = "Unsure"
)

// Liveness is the judgement about one agent.
type Liveness struct {
	State State
	// Heard means that the agent has given a heartbeat or report at any time.
	Heard bool
	// Left is the time after which the agent counts as silent if no heartbeat is seen until then. It is zero for Silent.
	Left time.Duration
	// Since is when the last heartbeat was seen, or when the judge first read the Lease if none was seen.
	Since time.Time
}

// Judge decides whether agents are alive, by changes that it sees in their Leases and reports, and by its own clock.
// The times in Leases and reports are those of the members' clocks, which can be wrong: they are compared with each
// other, and never with the time of the hub. A new Judge, as after a restart of the hub, and an outage of the API
// server start the limit again.
type Judge struct {
	// Hub reads Leases from a cache, and Live from the API server.
	Hub, Live client.Reader
	Clock     clock.PassiveClock
	// SeesSince returns since when the API server has answered without a gap; the present time while it does not answer.
	// nil: always.
	SeesSince func() time.Time
	// Limits has how long the agent of a cluster may be silent before it counts as dead, for each type of cluster. nil:
	// SveltosLimit and KarmadaLimit.
	Limits map[fleet.Type]time.Duration

	// mu guards agents.
	mu     sync.Mutex
	agents map[fleet.ID]agent
}

// agent is the state of one agent as it was seen last.
type agent struct {
	// uid is that of the cluster object.
	uid string
	// renewed is the time in the Lease, and report the last report, both by the member's clock. former is the time that
	// renewed replaced: the cache can still return it after the API server has returned a later one.
	renewed, former, report string
	// seen is when one of them changed, or when they were first read; changed distinguishes these cases.
	seen    time.Time
	changed bool
}

// Ask judges the agent of m by its Lease in the cache. Before it returns Silent, it reads the Lease from the API
// server. report is an agent's own mark in the status of its cluster object that changes with each report, "" for none.
func (j *Judge) Ask(ctx context.Context, m fleet.Member, report string) (Liveness, error) {
	liveness, err := j.read(ctx, j.Hub, m, report)
	if err != nil || liveness.State != Silent {
		return liveness, err
	}
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	return j.read(ctx, j.Live, m, report)
}

func (j *Judge) read(ctx context.Context, hub client.Reader, m fleet.Member, report string) (Liveness, error) {
	lease := &coordinationv1.Lease{}
	if err := hub.Get(ctx, client.ObjectKey{Namespace: m.DeliveryNamespace, Name: m.Name}, lease); client.IgnoreNotFound(err) != nil {
		return Liveness{}, fmt.Errorf("read lease of %s: %w", m.Key(), err)
	}
	return j.Look(m, lease, report), nil
}

// Look is like Ask, for a Lease that the caller has just read from the API server.
func (j *Judge) Look(m fleet.Member, lease *coordinationv1.Lease, report string) Liveness {
	now := j.Clock.Now()
	a := j.note(m, lease, report, now)
	since := a.seen
	if j.SeesSince != nil {
		if sees := j.SeesSince(); sees.After(since) {
			since = sees
		}
	}
	limit := j.limit(m.Type)
	liveness := Liveness{State: Unsure, Heard: a.renewed+a.report != "", Left: limit - now.Sub(since), Since: a.seen}
	switch {
	case a.changed && now.Sub(a.seen) < limit:
		liveness.State = Alive
	case liveness.Left <= 0:
		liveness.State, liveness.Left = Silent, 0
	}
	return liveness
}

// note records what changed since the last look. A missing time or report is no change: only an agent writes them.
func (j *Judge) note(m fleet.Member, lease *coordinationv1.Lease, report string, now time.Time) agent {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.agents == nil {
		j.agents = map[fleet.ID]agent{}
	}
	last, known := j.agents[m.ID()]
	if last.uid != m.UID {
		last, known = agent{uid: m.UID}, false
	}
	next := last
	if lease.Spec.RenewTime != nil {
		if renewed := lease.Spec.RenewTime.UTC().Format(time.RFC3339Nano); renewed != last.renewed && renewed != last.former {
			next.renewed, next.former = renewed, last.renewed
		}
	}
	if report != "" {
		next.report = report
	}
	if !known || next != last {
		next.seen, next.changed = now, known
	}
	j.agents[m.ID()] = next
	return next
}

// Forget deletes the record of a member that is gone.
func (j *Judge) Forget(member fleet.ID) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.agents, member)
}

func (j *Judge) limit(of fleet.Type) time.Duration {
	if j.Limits != nil {
		return j.Limits[of]
	}
	return map[fleet.Type]time.Duration{fleet.TypeSveltos: SveltosLimit, fleet.TypeKarmada: KarmadaLimit}[of]
}
