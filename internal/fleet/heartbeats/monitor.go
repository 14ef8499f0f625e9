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
	// SveltosLimit is the maximum time between two heartbeats of the agent of a SveltosCluster whose Lease has no
	// duration: three intervals of 30 s, the interval of agents of former releases.
	SveltosLimit = 90 * time.Second
	// LeaseDuration is the duration that the agent of a SveltosCluster writes to its Lease: two intervals of 20 s and the
	// time to write the Lease. The Monitor uses it instead of shorter durations. A dead agent is Silent within 45 s.
	LeaseDuration = 44 * time.Second
	// KarmadaLimit is the maximum time between two heartbeats of the agent of a Cluster, whose interval is 10 s. Karmada
	// writes the status Unknown after 40 s. With a shorter limit, the hub writes it no later than Karmada would.
	KarmadaLimit = 38 * time.Second
	// readTimeout limits the live read of a Lease.
	readTimeout = 5 * time.Second
)

// State is the state of an agent.
type State string

// The states of an agent.
const (
	// Alive means that a heartbeat was seen within the limit.
	Alive State = "Alive"
	// Silent means that no heartbeat was seen within the limit, although the API server was available all that time.
	Silent State = "Silent"
	// Unknown means that no heartbeat was seen within the limit, but the API server was not available, or not observed,
	// for the whole limit. An agent whose first heartbeat has not been seen is Unknown until the limit has passed.
	Unknown State = "Unknown"
)

// Liveness is the result of an evaluation of one agent.
type Liveness struct {
	State State
	// HasReported is true if the agent has ever renewed its Lease, or written a report to the status of its cluster
	// object.
	HasReported bool
	// Remaining is the time until the agent becomes Silent if no heartbeat is seen. It is zero if it is Silent.
	Remaining time.Duration
	// LastSeen is the time when the last heartbeat was seen, or the time of the first evaluation if none was seen.
	LastSeen time.Time
}

// Monitor evaluates agents. A heartbeat is a change of the renew time or of the report. The Monitor dates it by the
// hub's clock, when it sees the change: the values themselves come from the clocks of members, which can be wrong.
// After a restart of the hub and after an outage of the API server, each agent has the whole limit again.
type Monitor struct {
	// Hub reads Leases from a cache, and Live from the API server.
	Hub, Live client.Reader
	Clock     clock.PassiveClock
	// AvailableSince returns the end of the last outage of the API server, or the current time during an outage. Nil means
	// that there are no outages.
	AvailableSince func() time.Time
	// Limits has, by type of cluster, the maximum time between two heartbeats. Default of each type: SveltosLimit and
	// KarmadaLimit.
	Limits map[fleet.Type]time.Duration

	// mu guards agents.
	mu     sync.Mutex
	agents map[fleet.ID]agent
}

// agent is the last known state of one agent.
type agent struct {
	// uid is the UID of the cluster object.
	uid string
	// renewed is the last renew time of the Lease. previousRenewed is the renew time before it: the cache can still return
	// it after the API server has returned renewed, so it is no new heartbeat.
	renewed, previousRenewed string
	// report is the last report that Evaluate got.
	report string
	// seen is the time of the last change of renewed or report. hasChanged is false until the first change: seen is the
	// time of the first evaluation then.
	seen       time.Time
	hasChanged bool
}

// Evaluate returns the liveness of the agent of member by its Lease in the cache. Before it returns Silent, it reads
// the Lease from the API server. report is a value in the status of the cluster object that changes with each report of
// the agent; "" for none.
func (m *Monitor) Evaluate(ctx context.Context, member fleet.Member, report string) (Liveness, error) {
	liveness, err := m.evaluateFrom(ctx, m.Hub, member, report)
	if err != nil || liveness.State != Silent {
		return liveness, err
	}
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	return m.evaluateFrom(ctx, m.Live, member, report)
}

// evaluateFrom is Evaluate for the Lease that hub returns. A missing Lease counts as a Lease without a renew time.
func (m *Monitor) evaluateFrom(ctx context.Context, hub client.Reader, member fleet.Member, report string) (Liveness, error) {
	lease := &coordinationv1.Lease{}
	if err := hub.Get(ctx, client.ObjectKey{Namespace: member.DeliveryNamespace, Name: member.Name}, lease); client.IgnoreNotFound(err) != nil {
		return Liveness{}, fmt.Errorf("read lease of %s: %w", member.Key(), err)
	}
	return m.EvaluateLease(member, lease, report), nil
}

// EvaluateLease is like Evaluate, for a Lease that the caller has just read from the API server.
func (m *Monitor) EvaluateLease(member fleet.Member, lease *coordinationv1.Lease, report string) Liveness {
	now := m.Clock.Now()
	a := m.recordAgent(member, lease, report, now)
	since := a.seen
	if m.AvailableSince != nil {
		if available := m.AvailableSince(); available.After(since) {
			since = available
		}
	}
	limit := m.limit(member.Type, lease)
	liveness := Liveness{State: Unknown, HasReported: a.renewed+a.report != "", Remaining: limit - now.Sub(since), LastSeen: a.seen}
	switch {
	case a.hasChanged && now.Sub(a.seen) < limit:
		liveness.State = Alive
	case liveness.Remaining <= 0:
		liveness.State, liveness.Remaining = Silent, 0
	}
	return liveness
}

// recordAgent records a changed renew time or report, and returns the new state. It ignores a missing renew time or
// report: agents never remove them.
func (m *Monitor) recordAgent(member fleet.Member, lease *coordinationv1.Lease, report string, now time.Time) agent {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.agents == nil {
		m.agents = map[fleet.ID]agent{}
	}
	last, known := m.agents[member.ID()]
	if last.uid != member.UID {
		last, known = agent{uid: member.UID}, false
	}
	next := last
	if lease.Spec.RenewTime != nil {
		if renewed := lease.Spec.RenewTime.UTC().Format(time.RFC3339Nano); renewed != last.renewed && renewed != last.previousRenewed {
			next.renewed, next.previousRenewed = renewed, last.renewed
		}
	}
	if report != "" {
		next.report = report
	}
	if !known || next != last {
		next.seen, next.hasChanged = now, known
	}
	m.agents[member.ID()] = next
	return next
}

// Forget deletes the state of the agent of a member that does not exist any more or is in another shard.
func (m *Monitor) Forget(member fleet.ID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.agents, member)
}

// limit returns the maximum time between two heartbeats. The duration in the Lease can only shorten it.
func (m *Monitor) limit(memberType fleet.Type, lease *coordinationv1.Lease) time.Duration {
	limit, ok := m.Limits[memberType]
	if !ok {
		limit = map[fleet.Type]time.Duration{fleet.TypeSveltos: SveltosLimit, fleet.TypeKarmada: KarmadaLimit}[memberType]
	}
	if requested := lease.Spec.LeaseDurationSeconds; requested != nil {
		return min(limit, max(time.Duration(*requested)*time.Second, LeaseDuration))
	}
	return limit
}
