package members

import (
	"context"
	"fmt"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/survey"
)

// redialInterval is the time between two looks at how a healthy member is dialled; news of its Secret and its spec are
// looked at anyway.
const redialInterval = time.Minute

// observers runs one observer per push member, from the first look until the member goes. The zero value is ready.
type observers struct {
	// mu guards what follows.
	mu     sync.Mutex
	byName map[string]*running
	// launch hands observers to run, which runs them.
	launch chan *running
}

// running is the observer of one member.
type running struct {
	*survey.Observer
	// uid and config are those of the member that it was made for, generation that of the Cluster when it was dialled
	// last, at dialled.
	uid        types.UID
	config     *rest.Config
	generation int64
	dialled    time.Time
	// doubtful says that the member may be dialled in another way by now.
	doubtful bool
	stop     chan struct{}
}

// launches returns the channel that observers are handed to run by.
func (o *observers) launches() chan *running {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.launch == nil {
		o.launch = make(chan *running)
	}
	return o.launch
}

// run runs what is launched until ctx ends, and waits for it.
func (o *observers) run(ctx context.Context) error {
	var all sync.WaitGroup
	defer all.Wait()
	launches := o.launches()
	for {
		select {
		case <-ctx.Done():
			return nil
		case r := <-launches:
			all.Go(func() { r.run(ctx) })
		}
	}
}

// run keeps the sums of the member until it is stopped.
func (r *running) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-r.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	// It ends without an error when ctx does.
	_ = r.Run(ctx)
}

// get returns the observer of a member; nil if there is none.
func (o *observers) get(name string) *running {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.byName[name]
}

// put makes r the observer of a member and stops the one before it.
func (o *observers) put(name string, r *running) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.byName == nil {
		o.byName = map[string]*running{}
	}
	if had := o.byName[name]; had != nil {
		close(had.stop)
	}
	o.byName[name] = r
}

// drop stops the observer of a member, if there is one.
func (o *observers) drop(name string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if had := o.byName[name]; had != nil {
		close(had.stop)
		delete(o.byName, name)
	}
}

// doubt has a member dialled anew at the next look.
func (o *observers) doubt(name string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if had := o.byName[name]; had != nil {
		had.doubtful = true
	}
}

// dialled notes that a member was dialled in the way that r knows.
func (o *observers) dialled(r *running, generation int64, at time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	r.generation, r.dialled, r.doubtful = generation, at, false
}

// current says whether r still is what a member is to be observed by, without dialling it.
func (o *observers) current(r *running, s *state, now time.Time) bool {
	ready := readyOf(s.cluster.Status)
	o.mu.Lock()
	defer o.mu.Unlock()
	return r != nil && r.uid == s.cluster.UID && r.generation == s.cluster.Generation && !r.doubtful && now.Sub(r.dialled) < redialInterval &&
		ready != nil && ready.Status == metav1.ConditionTrue
}

// observer returns the observer of a push member. One that is dialled in another way, or was registered anew, gets
// another one.
func (c *Controller) observer(ctx context.Context, s *state) (*survey.Observer, error) {
	name, now := s.cluster.Name, c.Clock.Now()
	have := c.observers.get(name)
	if c.observers.current(have, s, now) {
		return have.Observer, nil
	}
	limited, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	config, err := c.Dial(limited, s.member)
	if err != nil {
		if have != nil && have.uid == s.cluster.UID && passes(err) {
			return have.Observer, nil
		}
		c.observers.drop(name)
		return nil, err
	}
	if have != nil && have.uid == s.cluster.UID && have.config == config {
		c.observers.dialled(have, s.cluster.Generation, now)
		return have.Observer, nil
	}
	made, err := survey.NewObserver(config, survey.Options{Clock: c.Clock})
	if err != nil {
		c.observers.drop(name)
		return nil, err
	}
	started := &running{Observer: made, uid: s.cluster.UID, config: config, generation: s.cluster.Generation, dialled: now, stop: make(chan struct{})}
	select {
	case c.observers.launches() <- started:
	case <-ctx.Done():
		return nil, fmt.Errorf("start to observe %s: %w", name, ctx.Err())
	}
	c.observers.put(name, started)
	return made, nil
}
