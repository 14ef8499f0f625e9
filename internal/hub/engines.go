package hub

import (
	"context"
	"fmt"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/log"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/fleet"
	hubworks "github.com/towline/towline/internal/hub/works"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
)

// changeBacklog is the capacity of the channels for changed summaries and Works.
const changeBacklog = 1024

// engines runs one engine per push member, from the first call of engineFor until forget is called.
type engines struct {
	members *fleet.Clients
	// hubConfig and partitions are for the engine of the hub's own cluster (local.go): its client configuration, and the
	// partitions of its inventory.
	hubConfig  *rest.Config
	partitions *inventory.Partitions
	// isServed returns whether this hub manages a member.
	isServed func(context.Context, fleet.Member) (bool, error)
	// recordDrift is called with the changes after an engine has corrected drift.
	recordDrift func(fleet.Member, bundle.ID, bundle.ChangeSet)
	// reportedSummaries receives a summary when an engine has a new report about it.
	reportedSummaries chan event.GenericEvent
	// changedWorks receives a Work when its objects change on the member, or when an engine has a new report about it.
	changedWorks chan event.GenericEvent
	// stopped is closed when the hub stops.
	stopped chan struct{}
	// toRun sends new engines to Start, which runs them.
	toRun chan *memberEngine

	// mu guards byMember.
	mu       sync.Mutex
	byMember map[string]*memberEngine
}

// memberEngine is the engine of one member.
type memberEngine struct {
	member string
	owner  engineOwner
	config *rest.Config
	engine *engine.Engine
	// recordMemory limits the memory of the member's inventory records; nil for the hub's own cluster.
	recordMemory *kube.Reservation
	// previous is the channel done of the engine that this one replaces; nil if there is none.
	previous <-chan struct{}
	// stop is closed to stop the engine. run closes done when it returns.
	stop, done chan struct{}
	// release closes released when this hub no longer manages the member. This cancels the running operations.
	released <-chan struct{}
	release  func()
}

// engineOwner identifies the registration that owns the objects of an engine, and the namespace of its inventory on the
// member. If it changes, the engine is replaced.
type engineOwner struct{ uid, namespace, scope, hub string }

func engineOwnerOf(m fleet.Member) engineOwner {
	return engineOwner{uid: m.UID, namespace: m.MemberNamespace, scope: m.Scope, hub: m.Hub}
}

func newEngines(members *fleet.Clients, hubConfig *rest.Config, isServed func(context.Context, fleet.Member) (bool, error),
	recordDrift func(fleet.Member, bundle.ID, bundle.ChangeSet),
) *engines {
	return &engines{
		members: members, hubConfig: hubConfig, isServed: isServed, recordDrift: recordDrift,
		reportedSummaries: make(chan event.GenericEvent, changeBacklog), changedWorks: make(chan event.GenericEvent, changeBacklog),
		stopped: make(chan struct{}), toRun: make(chan *memberEngine), byMember: map[string]*memberEngine{},
	}
}

// Start implements manager.Runnable. It runs the engines until ctx ends, and waits for them.
func (e *engines) Start(ctx context.Context) error {
	var all sync.WaitGroup
	defer all.Wait()
	defer close(e.stopped)
	for {
		select {
		case <-ctx.Done():
			return nil
		case r := <-e.toRun:
			all.Go(func() { r.run(ctx) })
		}
	}
}

// run waits until the previous engine has stopped, and then corrects drift until this engine is stopped or ctx ends.
func (r *memberEngine) run(ctx context.Context) {
	defer close(r.done)
	defer r.recordMemory.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-r.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	if r.previous != nil {
		select {
		case <-r.previous:
		case <-ctx.Done():
			return
		}
	}
	if err := r.engine.Run(ctx); err != nil {
		log.FromContext(ctx).Error(err, "correct drift", logkeys.Member, r.member)
	}
}

// forTransport returns the engine of a push member for deliver.PushTransport.
func (e *engines) forTransport(ctx context.Context, m fleet.Member) (deliver.Engine, error) {
	started, err := e.engineFor(ctx, m)
	if err != nil {
		return nil, err
	}
	return started, nil
}

// engineFor returns the engine of a push member or of selfMember. It creates an engine if there is none, or if the
// credentials or the registration of the member have changed.
func (e *engines) engineFor(ctx context.Context, m fleet.Member) (*memberEngine, error) {
	config := e.hubConfig
	if m.Mode != fleet.Local {
		var err error
		if config, err = e.members.Config(ctx, m); err != nil {
			return nil, err
		}
	}
	started, isNew, err := e.getOrCreate(m, config)
	if err != nil {
		return nil, err
	}
	if isNew {
		select {
		case e.toRun <- started:
		case <-ctx.Done():
			e.remove(m.Key(), started)
			close(started.done)
			started.recordMemory.Close()
			return nil, fmt.Errorf("start engine of %s: %w", m.Key(), ctx.Err())
		}
	}
	// The shard must be checked after the engine is added: if the cache still has the old shard now, the event about the
	// new shard comes later, and a controller calls forget.
	isServed, err := e.isServed(ctx, m)
	if err != nil {
		return nil, err
	}
	if !isServed {
		e.forget(m.Key())
		return nil, fmt.Errorf("start engine of %s: another shard manages it", m.Key())
	}
	return started, nil
}

// Converge calls Converge of the engine, and is canceled when the member is released.
func (r *memberEngine) Converge(ctx context.Context, b bundle.Bundle) (bundle.Report, error) {
	ctx, cancel := kube.ContextUntil(ctx, r.released)
	defer cancel()
	return r.engine.Converge(ctx, b)
}

// Withdraw calls Withdraw of the engine, and is canceled when the member is released.
func (r *memberEngine) Withdraw(ctx context.Context, w bundle.Withdrawal) (bool, error) {
	ctx, cancel := kube.ContextUntil(ctx, r.released)
	defer cancel()
	return r.engine.Withdraw(ctx, w)
}

// FindDeployed calls FindDeployed of the engine, and is canceled when the member is released.
func (r *memberEngine) FindDeployed(ctx context.Context, id bundle.ID) (bundle.Deployed, bool, error) {
	ctx, cancel := kube.ContextUntil(ctx, r.released)
	defer cancel()
	return r.engine.FindDeployed(ctx, id)
}

// ListDeployed calls ListDeployed of the engine, and is canceled when the member is released.
func (r *memberEngine) ListDeployed(ctx context.Context) ([]bundle.Deployed, error) {
	ctx, cancel := kube.ContextUntil(ctx, r.released)
	defer cancel()
	return r.engine.ListDeployed(ctx)
}

// Suspend calls Suspend of the engine, and is canceled when the member is released.
func (r *memberEngine) Suspend(ctx context.Context, id bundle.ID) (bundle.Report, error) {
	ctx, cancel := kube.ContextUntil(ctx, r.released)
	defer cancel()
	return r.engine.Suspend(ctx, id)
}

// Observe calls Observe of the engine, and is canceled when the member is released.
func (r *memberEngine) Observe(ctx context.Context, id bundle.ID) ([]engine.Observation, error) {
	ctx, cancel := kube.ContextUntil(ctx, r.released)
	defer cancel()
	return r.engine.Observe(ctx, id)
}

// getOrCreate returns the engine of m, and whether it is new. The caller must send a new engine to toRun.
func (e *engines) getOrCreate(m fleet.Member, config *rest.Config) (*memberEngine, bool, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	existing := e.byMember[m.Key()]
	if existing != nil && existing.owner == engineOwnerOf(m) && existing.config == config {
		return existing, false, nil
	}
	stop := make(chan struct{})
	options := engine.Options{Namespace: m.MemberNamespace, Scope: m.Scope, Hub: m.Hub, OnCorrect: e.onCorrect(m), OnReport: e.onReport(m), OnChange: e.onChange(m)}
	if m.Mode == fleet.Local {
		options.Partitions = e.partitions
	} else {
		options.RecordMemory = e.members.ReserveRecordMemory(m)
	}
	created, err := engine.New(config, options)
	if err != nil {
		return nil, false, fmt.Errorf("create engine of %s: %w", m.Key(), err)
	}
	created.ConfirmScope() // m was read from the hub, so its registration is the current one
	released := make(chan struct{})
	started := &memberEngine{
		member: m.Key(), owner: engineOwnerOf(m), config: config, engine: created, recordMemory: options.RecordMemory,
		stop: stop, done: make(chan struct{}), released: released, release: func() { close(released) },
	}
	if existing != nil {
		close(existing.stop)
		started.previous = existing.done
	}
	e.byMember[m.Key()] = started
	return started, true, nil
}

// forget stops the engine of the member "namespace/name" and cancels its operations. Controllers call it when the
// member is deleted, abandoned or in another shard.
func (e *engines) forget(member string) {
	e.members.Forget(member)
	e.mu.Lock()
	existing := e.byMember[member]
	e.mu.Unlock()
	if existing != nil && e.remove(member, existing) {
		existing.release()
	}
}

// remove stops r and returns true, unless r was already replaced or stopped.
func (e *engines) remove(member string, r *memberEngine) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.byMember[member] != r {
		return false
	}
	delete(e.byMember, member)
	close(r.stop)
	return true
}

// onCorrect returns the function that an engine calls after it has corrected drift.
func (e *engines) onCorrect(m fleet.Member) func(bundle.ID, bundle.ChangeSet) {
	return func(id bundle.ID, changes bundle.ChangeSet) {
		if id.RequestorKind == configv1beta1.ClusterSummaryKind {
			m, id = requestorOf(m, id)
			e.recordDrift(m, id, changes)
		}
	}
}

// requestorOf returns the member and the bundle ID as the ClusterSummary knows them. In the engine of the hub's own
// cluster, id also contains the member, and requestorOf parses it. For all other engines it returns m and id.
func requestorOf(m fleet.Member, id bundle.ID) (fleet.Member, bundle.ID) {
	if m.Mode != fleet.Local {
		return m, id
	}
	cluster, id, _ := deliver.ParseLocalID(id)
	return fleet.Member{Type: cluster.Type, Namespace: cluster.Namespace, Name: cluster.Name}, id
}

// onReport returns the function that an engine calls when its report about a bundle changes. The function triggers a
// reconcile of the ClusterSummary or the Work, since no watch on the hub does.
func (e *engines) onReport(m fleet.Member) func(bundle.ID) {
	return func(id bundle.ID) {
		if id.RequestorKind != configv1beta1.ClusterSummaryKind {
			e.onChange(m)(id)
			return
		}
		member, id := requestorOf(m, id)
		summary := &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{Namespace: member.Namespace, Name: id.RequestorName}}
		e.send(e.reportedSummaries, event.GenericEvent{Object: summary})
	}
}

// onChange returns the function that an engine calls when an object of a bundle changes. The function triggers a
// reconcile of a Work, whose status has the health of its objects. It ignores summaries, whose status has no health.
func (e *engines) onChange(m fleet.Member) func(bundle.ID) {
	return func(id bundle.ID) {
		change, ok := hubworks.ChangeEvent(m, id)
		if !ok {
			return
		}
		e.send(e.changedWorks, change)
	}
}

// send sends change. While the channel is full it waits, until the hub stops. It also sends a change of an engine that
// was replaced: the new engine does not report it again if the record of the bundle is already deleted.
func (e *engines) send(to chan<- event.GenericEvent, change event.GenericEvent) {
	select {
	case to <- change:
	case <-e.stopped:
	}
}
