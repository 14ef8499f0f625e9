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
	// batchDelay is the delay between an event and its correction, so that one run corrects related changes.
	batchDelay = 100 * time.Millisecond
	// resyncInterval is the interval between two comparisons of all objects.
	resyncInterval = 10 * time.Minute
	// workers is the number of bundles that are corrected concurrently.
	workers = 4
)

// Engine applies and removes bundles for a Corrector.
type Engine interface {
	// Acquire waits until id is not locked, and locks it until release is called.
	Acquire(ctx context.Context, id bundle.ID) (release func(), err error)
	// Resume converges the objects in only, or all objects if only is nil, from the record of id. The caller has
	// acquired id. ok is false if the content must be delivered again.
	Resume(ctx context.Context, id bundle.ID, only map[kube.Ref]bool) (report bundle.Report, ok bool, err error)
	// ResumeWithdrawal acquires id and continues its withdrawal. done is true if no withdrawal is in progress
	// afterwards.
	ResumeWithdrawal(ctx context.Context, id bundle.ID) (done bool, err error)
	// PollPause returns the time until Resume must check again whether id can continue. ok is false if id does not
	// wait.
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
	// ScopeConfirmed is closed when the hub has confirmed the scope of Store. Then records of earlier registrations are
	// deleted.
	ScopeConfirmed <-chan struct{}
	// OnCorrect is called after a correction, with its changes. The changes are nil if the record is lost or a
	// withdrawal is complete. It must return soon.
	OnCorrect func(bundle.ID, bundle.ChangeSet)
	// OnChange is called for each bundle with changed objects. It is called at most once per notifyInterval and bundle,
	// and more often only if an object was deleted.
	OnChange func(bundle.ID)
}

// Corrector corrects the drift of all bundles of one member. Run must be called only once.
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

// task has the reasons why a bundle is in the queue.
type task struct {
	all         bool // compare every object
	retry       bool // converge every object if the last run did not end well
	checkRecord bool // check whether the record still exists
	observed    map[kube.Ref]observation
}

// New returns a Corrector. It sends no request before Run.
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

// Run corrects drift until ctx ends. It waits for all goroutines that it has started.
func (c *Corrector) Run(ctx context.Context) {
	var running sync.WaitGroup
	running.Go(func() { c.notifier.run(ctx, c.Clock, c.OnChange) })
	for range workers {
		running.Go(func() {
			for c.processNext(ctx) {
			}
		})
	}
	c.watchAll(ctx)
	c.queue.ShutDown()
	running.Wait()
}

// watchAll starts and stops watches when the records change, and queues retries and resyncs, until ctx ends.
func (c *Corrector) watchAll(ctx context.Context) {
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
		c.queueUnfinished()
		select {
		case <-ctx.Done():
			return
		case <-confirmed:
			c.Store.DeleteOlderRegistrations(ctx)
			confirmed = nil
		case <-c.Store.Changes():
		case <-resync.C():
			c.queueAll()
		}
	}
}

// listRecords reads all records. It retries until the API server answers or ctx ends.
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

// queueUnfinished queues a retry of each bundle whose last run failed or is not complete, unless one is queued.
func (c *Corrector) queueUnfinished() {
	for _, rec := range c.Store.ListCached() {
		if rec.Suspended || (rec.State != bundle.StateFailed && rec.State != bundle.StateApplying && rec.State != bundle.StateRemoving) {
			continue
		}
		c.mu.Lock()
		isQueued := c.retrying[rec.ID]
		c.mu.Unlock()
		if !isQueued {
			c.queueRetry(rec.ID)
		}
	}
}

// queueRetry queues a retry. The delay grows with each failure.
func (c *Corrector) queueRetry(id bundle.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.taskFor(id).retry = true
	c.retrying[id] = true
	pause, isWaiting := c.Engine.PollPause(id)
	if !isWaiting || c.failures[id] > 0 {
		pause = Backoff(c.failures[id])
	}
	c.queue.AddAfter(id, pause)
}

// queueAll queues a comparison of all objects of each bundle whose drift is corrected.
func (c *Corrector) queueAll() {
	for _, rec := range c.Store.ListCached() {
		if needsDriftCorrection(rec) {
			c.mu.Lock()
			c.taskFor(rec.ID).all = true
			c.mu.Unlock()
			c.queue.Add(rec.ID)
		}
	}
}

// taskFor returns the task of id, which it creates if necessary. The caller must hold mu.
func (c *Corrector) taskFor(id bundle.ID) *task {
	if c.tasks[id] == nil {
		c.tasks[id] = &task{observed: map[kube.Ref]observation{}}
	}
	return c.tasks[id]
}

// onEvent passes an event of an object to the notifier for each bundle with the object, and queues the bundles with a
// record from which the object differs.
func (c *Corrector) onEvent(key kube.Ref, o observation) {
	for _, rec := range c.Store.ListCached() {
		entry, ok := rec.FindTracked(key)
		if !ok {
			continue
		}
		c.notifier.add(rec.ID, o)
		if !needsDriftCorrection(rec) || !isDrifted(entry, o, c.Store.Scope().Signature(rec.ID)) {
			continue
		}
		c.mu.Lock()
		c.taskFor(rec.ID).observed[key] = o
		c.mu.Unlock()
		c.queue.AddAfter(rec.ID, batchDelay)
	}
}

// queueRecordCheck queues a check whether the record of id still exists, after pause.
func (c *Corrector) queueRecordCheck(id bundle.ID, pause time.Duration) {
	c.mu.Lock()
	c.taskFor(id).checkRecord = true
	c.mu.Unlock()
	c.queue.AddAfter(id, pause)
}

// retryRecordCheck queues another check of a record that could not be read. The delay grows with each failure.
func (c *Corrector) retryRecordCheck(id bundle.ID) {
	c.mu.Lock()
	pause := Backoff(c.recordFailures[id])
	c.recordFailures[id]++
	c.mu.Unlock()
	c.queueRecordCheck(id, pause)
}

// mergeFailedTask adds the objects of a failed run to the next task, except objects with newer events.
func (c *Corrector) mergeFailedTask(id bundle.ID, failed *task) {
	c.mu.Lock()
	defer c.mu.Unlock()
	next := c.taskFor(id)
	next.all = next.all || failed.all
	for key, o := range failed.observed {
		if _, hasNewer := next.observed[key]; !hasNewer {
			next.observed[key] = o
		}
	}
}

// needsDriftCorrection returns whether the drift of a bundle is corrected.
func needsDriftCorrection(rec *inventory.Record) bool {
	return rec.Options.CorrectDrift && rec.State != bundle.StateRemoving && !rec.Suspended
}
