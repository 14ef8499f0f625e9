package clusters

import (
	"context"
	"fmt"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/clusterstatus"
)

// configCheckInterval is the time between two calls of MemberConfig for a ready member. A change of its Secret or its
// spec triggers a call at once.
const configCheckInterval = time.Minute

// observers has one running observer per push member. The zero value is ready for use.
type observers struct {
	// mu guards all fields, and the fields of each runningObserver.
	mu     sync.Mutex
	byName map[string]*runningObserver
	// started passes new observers to run.
	started chan *runningObserver
}

// runningObserver is the observer of one member.
type runningObserver struct {
	*clusterstatus.Observer
	// uid is the UID of the Cluster, and config the result of MemberConfig. generation is the generation of the Cluster
	// at the last call of MemberConfig, and checkedAt the time of that call.
	uid        types.UID
	config     *rest.Config
	generation int64
	checkedAt  time.Time
	// isStale is true if MemberConfig must be called again, because the Secret has changed.
	isStale bool
	stop    chan struct{} // closed to stop the observer
}

// startedChan returns o.started, which it creates if necessary.
func (o *observers) startedChan() chan *runningObserver {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.started == nil {
		o.started = make(chan *runningObserver)
	}
	return o.started
}

// run runs the observers that it receives until ctx ends, and waits for them.
func (o *observers) run(ctx context.Context) error {
	var all sync.WaitGroup
	defer all.Wait()
	started := o.startedChan()
	for {
		select {
		case <-ctx.Done():
			return nil
		case r := <-started:
			all.Go(func() { r.run(ctx) })
		}
	}
}

// run runs the observer until ctx ends or r.stop is closed.
func (r *runningObserver) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-r.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	// Run returns no error when ctx ends.
	_ = r.Run(ctx)
}

// get returns the observer of a member, nil if there is none.
func (o *observers) get(name string) *runningObserver {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.byName[name]
}

// put replaces the observer of a member and stops the former one.
func (o *observers) put(name string, r *runningObserver) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.byName == nil {
		o.byName = map[string]*runningObserver{}
	}
	if existing := o.byName[name]; existing != nil {
		close(existing.stop)
	}
	o.byName[name] = r
}

// drop stops the observer of a member if there is one.
func (o *observers) drop(name string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if existing := o.byName[name]; existing != nil {
		close(existing.stop)
		delete(o.byName, name)
	}
}

// markStale makes the next reconcile of a member call MemberConfig.
func (o *observers) markStale(name string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if existing := o.byName[name]; existing != nil {
		existing.isStale = true
	}
}

// recordCheck records that MemberConfig returned the same configuration as before.
func (o *observers) recordCheck(r *runningObserver, generation int64, at time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	r.generation, r.checkedAt, r.isStale = generation, at, false
}

// isCurrent returns whether r, which may be nil, can be used without a call of MemberConfig.
func (o *observers) isCurrent(r *runningObserver, s *state, now time.Time) bool {
	ready := readyCondition(s.cluster.Status)
	o.mu.Lock()
	defer o.mu.Unlock()
	return r != nil && r.uid == s.cluster.UID && r.generation == s.cluster.Generation && !r.isStale && now.Sub(r.checkedAt) < configCheckInterval &&
		ready != nil && ready.Status == metav1.ConditionTrue
}

// ensureObserver returns the running observer of a push member. It starts a new one if MemberConfig returns another
// configuration, or if the UID of the Cluster has changed. Its errors are the errors of MemberConfig, and of
// NewObserver for an invalid configuration. If the hub fails, it returns the existing observer instead.
func (c *Controller) ensureObserver(ctx context.Context, s *state) (*clusterstatus.Observer, error) {
	name, now := s.cluster.Name, c.Clock.Now()
	existing := c.observers.get(name)
	if c.observers.isCurrent(existing, s, now) {
		return existing.Observer, nil
	}
	configCtx, cancel := context.WithTimeout(ctx, configTimeout)
	defer cancel()
	config, err := c.MemberConfig(configCtx, s.member)
	if err != nil {
		if existing != nil && existing.uid == s.cluster.UID && isHubError(err) {
			return existing.Observer, nil
		}
		c.observers.drop(name)
		return nil, err
	}
	if existing != nil && existing.uid == s.cluster.UID && existing.config == config {
		c.observers.recordCheck(existing, s.cluster.Generation, now)
		return existing.Observer, nil
	}
	options := clusterstatus.Options{Clock: c.Clock}
	if c.ReserveMemory != nil {
		options.Memory = c.ReserveMemory(s.member)
	}
	newObserver, err := clusterstatus.NewObserver(config, options)
	if err != nil {
		c.observers.drop(name)
		return nil, err
	}
	next := &runningObserver{Observer: newObserver, uid: s.cluster.UID, config: config, generation: s.cluster.Generation, checkedAt: now, stop: make(chan struct{})}
	select {
	case c.observers.startedChan() <- next:
	case <-ctx.Done():
		return nil, fmt.Errorf("start to observe %s: %w", name, ctx.Err())
	}
	c.observers.put(name, next)
	return newObserver, nil
}
