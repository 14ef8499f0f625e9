package hub

import (
	"context"
	"fmt"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/log"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/fleet"
	hubworks "github.com/towline/towline/internal/hub/works"
	"github.com/towline/towline/internal/kube/logkeys"
)

// newsBacklog is how many pieces of news of one kind may wait to be looked at. More are dropped: the retries of summaries and Works find out, too.
const newsBacklog = 1024

// engines runs one engine per push member, from the first delivery until the member goes.
type engines struct {
	members *fleet.Clients
	// serves says whether a member is still this hub's to look after.
	serves func(context.Context, fleet.Member) (bool, error)
	// drifted is told what engines put back.
	drifted func(fleet.Member, bundle.ID, bundle.ChangeSet)
	// healed names the summaries whose objects an engine has put back, or tried to.
	healed chan event.GenericEvent
	// worked names the Works whose objects have news on their member, or were put back by an engine.
	worked chan event.GenericEvent
	// ended is closed when the hub ends.
	ended chan struct{}
	// launch hands engines to Start, which runs them.
	launch chan *running

	// mu guards byMember.
	mu       sync.Mutex
	byMember map[string]*running
}

// running is the engine of one member.
type running struct {
	member string
	domain domain
	config *rest.Config
	engine *engine.Engine
	// previous is closed when the engine that this one replaces has ended; nil if there was none.
	previous <-chan struct{}
	stop     chan struct{}
	done     chan struct{}
	// ceded is closed when the member is nothing of ours any more: nothing may be done to it from then on.
	ceded chan struct{}
}

// domain is what an engine does its work in the name of, and where on the member it keeps its records.
type domain struct{ uid, home, scope, hub string }

func domainOf(m fleet.Member) domain {
	return domain{uid: m.UID, home: m.MemberNamespace, scope: m.Scope, hub: m.Hub}
}

func newEngines(members *fleet.Clients, serves func(context.Context, fleet.Member) (bool, error),
	drifted func(fleet.Member, bundle.ID, bundle.ChangeSet),
) *engines {
	return &engines{
		members: members, serves: serves, drifted: drifted, healed: make(chan event.GenericEvent, newsBacklog), worked: make(chan event.GenericEvent, newsBacklog), ended: make(chan struct{}),
		launch: make(chan *running), byMember: map[string]*running{},
	}
}

// Start runs engines until ctx ends, and waits for them.
func (e *engines) Start(ctx context.Context) error {
	var all sync.WaitGroup
	defer all.Wait()
	defer close(e.ended)
	for {
		select {
		case <-ctx.Done():
			return nil
		case r := <-e.launch:
			all.Go(func() { r.run(ctx) })
		}
	}
}

// run heals until the engine is stopped or ctx ends.
func (r *running) run(ctx context.Context) {
	defer close(r.done)
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
		log.FromContext(ctx).Error(err, "heal", logkeys.Member, r.member)
	}
}

// of returns the engine of a push member, as the transport wants it.
func (e *engines) of(ctx context.Context, m fleet.Member) (deliver.Inventory, error) {
	started, err := e.started(ctx, m)
	if err != nil {
		return nil, err
	}
	return started, nil
}

// started returns the engine of a push member. A member whose credentials changed, or that was registered anew, gets another one.
func (e *engines) started(ctx context.Context, m fleet.Member) (*running, error) {
	config, err := e.members.Config(ctx, m)
	if err != nil {
		return nil, err
	}
	started, fresh, err := e.get(m, config)
	if err != nil {
		return nil, err
	}
	if fresh {
		select {
		case e.launch <- started:
		case <-ctx.Done():
			e.drop(m.Key(), started)
			close(started.done)
			return nil, fmt.Errorf("start engine of %s: %w", m.Key(), ctx.Err())
		}
	}
	// Asked only now: of a change that is not known yet forget will be told, and finds the engine.
	ours, err := e.serves(ctx, m)
	if err != nil {
		return nil, err
	}
	if !ours {
		e.forget(m.Key())
		return nil, fmt.Errorf("start engine of %s: another shard looks after it", m.Key())
	}
	return started, nil
}

// Converge is that of the engine, until the member is ceded.
func (r *running) Converge(ctx context.Context, b bundle.Bundle) (bundle.Report, error) {
	ctx, cancel := r.whileOurs(ctx)
	defer cancel()
	return r.engine.Converge(ctx, b)
}

// Withdraw is that of the engine, until the member is ceded.
func (r *running) Withdraw(ctx context.Context, w bundle.Withdrawal) (bool, error) {
	ctx, cancel := r.whileOurs(ctx)
	defer cancel()
	return r.engine.Withdraw(ctx, w)
}

// FindDeployed is that of the engine, until the member is ceded.
func (r *running) FindDeployed(ctx context.Context, id bundle.ID) (bundle.Deployed, bool, error) {
	ctx, cancel := r.whileOurs(ctx)
	defer cancel()
	return r.engine.FindDeployed(ctx, id)
}

// ListDeployed is that of the engine, until the member is ceded.
func (r *running) ListDeployed(ctx context.Context) ([]bundle.Deployed, error) {
	ctx, cancel := r.whileOurs(ctx)
	defer cancel()
	return r.engine.ListDeployed(ctx)
}

// Suspend is that of the engine, until the member is ceded.
func (r *running) Suspend(ctx context.Context, id bundle.ID) (bundle.Report, error) {
	ctx, cancel := r.whileOurs(ctx)
	defer cancel()
	return r.engine.Suspend(ctx, id)
}

// Observe is that of the engine, until the member is ceded.
func (r *running) Observe(ctx context.Context, id bundle.ID) ([]engine.Observation, error) {
	ctx, cancel := r.whileOurs(ctx)
	defer cancel()
	return r.engine.Observe(ctx, id)
}

func (r *running) whileOurs(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-r.ceded:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// get returns the engine of m, and whether it was made just now.
func (e *engines) get(m fleet.Member, config *rest.Config) (*running, bool, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	have := e.byMember[m.Key()]
	if have != nil && have.domain == domainOf(m) && have.config == config {
		return have, false, nil
	}
	stop := make(chan struct{})
	made, err := engine.New(config, engine.Options{Namespace: m.MemberNamespace, Scope: m.Scope, Hub: m.Hub, OnHeal: e.onHeal(m), OnChange: e.onChange(m, stop)})
	if err != nil {
		return nil, false, fmt.Errorf("make engine of %s: %w", m.Key(), err)
	}
	made.ConfirmScope()
	started := &running{
		member: m.Key(), domain: domainOf(m), config: config, engine: made,
		stop: stop, done: make(chan struct{}), ceded: make(chan struct{}),
	}
	if have != nil {
		close(have.stop)
		started.previous = have.done
	}
	e.byMember[m.Key()] = started
	return started, true, nil
}

// forget stops the engine of the member "namespace/name", which is gone, given up or another shard's, and cuts off what it does.
func (e *engines) forget(member string) {
	e.members.Forget(member)
	e.mu.Lock()
	have := e.byMember[member]
	e.mu.Unlock()
	if have != nil && e.drop(member, have) {
		close(have.ceded)
	}
}

// drop stops r, unless it was replaced or stopped, and says whether it did.
func (e *engines) drop(member string, r *running) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.byMember[member] != r {
		return false
	}
	delete(e.byMember, member)
	close(r.stop)
	return true
}

// onHeal wakes whom an engine healed for.
func (e *engines) onHeal(m fleet.Member) func(bundle.ID, bundle.ChangeSet) {
	return func(id bundle.ID, changes bundle.ChangeSet) {
		switch id.RequestorKind {
		case configv1beta1.ClusterSummaryKind:
			e.drifted(m, id, changes)
			tell(e.healed, &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{Namespace: m.Namespace, Name: id.RequestorName}})
		case workv1alpha1.WorkKind:
			e.onChange(m, nil)(id)
		}
	}
}

// onChange wakes the Work whose objects have news: it shows their status, and nobody else would find out. It waits where too much waits already,
// until the engine is stopped. Summaries show no status.
func (e *engines) onChange(m fleet.Member, stopped <-chan struct{}) func(bundle.ID) {
	return func(id bundle.ID) {
		news, ok := hubworks.ChangeEvent(m, id)
		if !ok {
			return
		}
		select {
		case e.worked <- news:
		case <-stopped:
		case <-e.ended:
		}
	}
}

// tell sends obj, or drops it where too much waits already.
func tell(to chan<- event.GenericEvent, obj client.Object) {
	select {
	case to <- event.GenericEvent{Object: obj}:
	default:
	}
}
