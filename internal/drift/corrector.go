package drift

import (
	"context"
	"sync"
	"time"

	"k8s.io/client-go/metadata"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

const (
	// batchDelay is the time that a correction waits for further events, so that one run corrects related changes.
	batchDelay = 100 * time.Millisecond
	// resyncInterval is the interval at which all objects are compared, independent of the watches.
	resyncInterval = 10 * time.Minute
	// workers is the number of bundles that are corrected concurrently.
	workers = 4
)

// Engine applies and removes bundles for a Corrector.
type Engine interface {
	// Acquire waits until id is not locked, and locks it until release is called.
	Acquire(ctx context.Context, id bundle.ID) (release func(), err error)
	// Resume converges the objects in only, or all if only is nil, from the record of id, which its caller has
	// acquired. ok is false if the content has to be delivered again.
	Resume(ctx context.Context, id bundle.ID, only map[kube.Ref]bool) (report bundle.Report, ok bool, err error)
	// ResumeWithdrawal acquires id and continues its withdrawal. done is true if none is in progress any more.
	ResumeWithdrawal(ctx context.Context, id bundle.ID) (done bool, err error)
	// PollPause returns the time until Resume must check the wait of id again. ok is false if id does not wait.
	PollPause(id bundle.ID) (pause time.Duration, ok bool)
}

// Options are the dependencies of a Corrector. All fields are required.
type Options struct {
	Engine Engine
	// Store has the records of the member, Objects its objects, and Mapper its kinds.
	Store   *inventory.Store
	Objects metadata.Interface
	Mapper  *kube.Mapper
	Clock   clock.WithTicker
	// ScopeConfirmed is closed when the hub has confirmed the scope of Store: then records of earlier registrations are
	// deleted.
	ScopeConfirmed <-chan struct{}
	// OnCorrect is called after a correction with what it changed; without changes if the record is lost, or a
	// withdrawal is done. It must not block for long.
	OnCorrect func(bundle.ID, bundle.ChangeSet)
	// OnChange is called for each bundle of which objects have changed, at most every few seconds unless one was
	// deleted.
	OnChange func(bundle.ID)
}

// Corrector corrects drift of all bundles of one member. It is used once.
type Corrector struct {
	Options

	queue    workqueue.TypedDelayingInterface[bundle.ID]
	notifier *changeNotifier

	// mu guards the fields below.
	mu             sync.Mutex
	tasks          map[bundle.ID]*task
	failures       map[bundle.ID]int // runs that failed in a row
	recordFailures map[bundle.ID]int // attempts to read the record that failed in a row
	retrying       map[bundle.ID]bool
	backoffs       map[objectKey]objectBackoff
}

// task is the reason why a bundle is in the queue.
type task struct {
	all         bool // compare every object
	retry       bool // converge every object if the last run did not end well
	checkRecord bool // check whether the record still exists
	observed    map[kube.Ref]observation
}

// New returns a Corrector. It makes no request before Run.
func New(opts Options) *Corrector {
	return &Corrector{
		Options: opts, notifier: newChangeNotifier(),
		queue: workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[bundle.ID]{
			Name: "engine-heal", Clock: opts.Clock,
		}),
		tasks: map[bundle.ID]*task{}, failures: map[bundle.ID]int{}, recordFailures: map[bundle.ID]int{}, retrying: map[bundle.ID]bool{},
		backoffs: map[objectKey]objectBackoff{},
	}
}

// Run corrects drift until ctx ends. It returns when everything that it has started has ended.
func (c *Corrector) Run(ctx context.Context) {
	var running sync.WaitGroup
	running.Go(func() { c.notifier.run(ctx, c.Clock, c.OnChange) })
	for range workers {
		running.Go(func() {
			for c.processNext(ctx) {
			}
		})
	}
	c.followRecords(ctx)
	c.queue.ShutDown()
	running.Wait()
}

// followRecords keeps the watches in step with the records until ctx ends.
func (c *Corrector) followRecords(ctx context.Context) {
	ctx, stop := context.WithCancel(ctx)
	watches := &watchSet{corrector: c, running: map[watchedKind]context.CancelFunc{}}
	defer watches.stop()
	defer stop()
	resync := c.Clock.NewTicker(resyncInterval)
	defer resync.Stop()
	c.listRecords(ctx)
	confirmed := c.ScopeConfirmed
	watches.watchRecords(ctx)
	for {
		watches.update(ctx, c.Store.ListCached())
		c.requeueUnfinished()
		select {
		case <-ctx.Done():
			return
		case <-confirmed:
			c.Store.DeleteOlderRegistrations(ctx)
			confirmed = nil
		case <-c.Store.Changes():
		case <-resync.C():
			c.resync()
		}
	}
}

// listRecords reads all records. It retries until the API server answers.
func (c *Corrector) listRecords(ctx context.Context) {
	for pause := minBackoff; ctx.Err() == nil; pause = min(2*pause, maxBackoff) {
		if _, err := c.Store.List(ctx); err == nil {
			return
		}
		select {
		case <-ctx.Done():
		case <-c.Clock.After(pause):
		}
	}
}

// requeueUnfinished queues each bundle whose last run did not end well, unless it is queued for that already.
func (c *Corrector) requeueUnfinished() {
	for _, rec := range c.Store.ListCached() {
		if rec.Suspended || (rec.State != bundle.StateFailed && rec.State != bundle.StateApplying && rec.State != bundle.StateRemoving) {
			continue
		}
		c.mu.Lock()
		waits := c.retrying[rec.ID]
		c.mu.Unlock()
		if !waits {
			c.requeueAfterBackoff(rec.ID)
		}
	}
}

// requeueAfterBackoff queues a retry, later after each failure.
func (c *Corrector) requeueAfterBackoff(id bundle.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.taskOf(id).retry = true
	c.retrying[id] = true
	pause, waiting := c.Engine.PollPause(id)
	if !waiting || c.failures[id] > 0 {
		pause = Backoff(c.failures[id])
	}
	c.queue.AddAfter(id, pause)
}

// resync queues all bundles whose drift is corrected.
func (c *Corrector) resync() {
	for _, rec := range c.Store.ListCached() {
		if correctsDrift(rec) {
			c.mu.Lock()
			c.taskOf(rec.ID).all = true
			c.mu.Unlock()
			c.queue.Add(rec.ID)
		}
	}
}

// taskOf returns the task of id to add to. Its caller holds mu.
func (c *Corrector) taskOf(id bundle.ID) *task {
	if c.tasks[id] == nil {
		c.tasks[id] = &task{observed: map[kube.Ref]observation{}}
	}
	return c.tasks[id]
}

// onEvent reports the bundles that have an object as changed, and queues those from whose record it differs.
func (c *Corrector) onEvent(key kube.Ref, o observation) {
	for _, rec := range c.Store.ListCached() {
		entry, ok := rec.FindTracked(key)
		if !ok {
			continue
		}
		c.notifier.add(rec.ID, o)
		if !correctsDrift(rec) || !isDrifted(entry, o, c.Store.Scope().Signature(rec.ID)) {
			continue
		}
		c.mu.Lock()
		c.taskOf(rec.ID).observed[key] = o
		c.mu.Unlock()
		c.queue.AddAfter(rec.ID, batchDelay)
	}
}

// checkRecordAfter queues a check, after a pause, whether the record of id still exists.
func (c *Corrector) checkRecordAfter(id bundle.ID, pause time.Duration) {
	c.mu.Lock()
	c.taskOf(id).checkRecord = true
	c.mu.Unlock()
	c.queue.AddAfter(id, pause)
}

// retryRecordCheck queues another check of a record that could not be read, later after each failure.
func (c *Corrector) retryRecordCheck(id bundle.ID) {
	c.mu.Lock()
	pause := Backoff(c.recordFailures[id])
	c.recordFailures[id]++
	c.mu.Unlock()
	c.checkRecordAfter(id, pause)
}

// requeueTask adds the objects of a failed run to the next one, except objects with newer events.
func (c *Corrector) requeueTask(id bundle.ID, failed *task) {
	c.mu.Lock()
	defer c.mu.Unlock()
	next := c.taskOf(id)
	next.all = next.all || failed.all
	for key, o := range failed.observed {
		if _, newer := next.observed[key]; !newer {
			next.observed[key] = o
		}
	}
}

// correctsDrift returns whether drift of a bundle is corrected.
func correctsDrift(rec *inventory.Record) bool {
	return rec.Options.CorrectDrift && rec.State != bundle.StateRemoving && !rec.Suspended
}
