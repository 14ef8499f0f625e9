package drift

import (
	"context"
	"maps"
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
	// recordCheckDelay is the delay between the deletion of a Secret of a record and the check of the record.
	recordCheckDelay = 100 * time.Millisecond
	// resyncInterval is the interval between two comparisons of all objects.
	resyncInterval = 10 * time.Minute
	// workers is the number of bundles that are corrected concurrently.
	workers = 4
)

// Engine applies and removes bundles for a Corrector.
type Engine interface {
	// Acquire waits until id is not locked, and locks it until unlock is called. It fails only if ctx ends.
	Acquire(ctx context.Context, id bundle.ID) (unlock func(), err error)
	// Resume converges the objects in only to the content of the record of id, or all objects if only is nil. If the last
	// run was interrupted, only is ignored: all objects are converged. Exception: if only is nil and a Helm release still
	// waits, none are converged. The caller has acquired id.
	Resume(ctx context.Context, id bundle.ID, only map[kube.Ref]bool) (Result, error)
	// ResumeWithdrawal acquires id and continues its withdrawal. done is true if it is complete or none is in progress.
	ResumeWithdrawal(ctx context.Context, id bundle.ID) (done bool, err error)
	// NextAttempt returns the earliest time of the next run of all objects of an unfinished bundle, zero if no failed run
	// is known. ok is false if each run fails until the content of the bundle changes.
	NextAttempt(id bundle.ID, digest bundle.Digest) (at time.Time, ok bool)
	// PollPause returns the pause before the next check of a bundle that waits for a Helm release. ok is false if it does
	// not wait.
	PollPause(id bundle.ID) (pause time.Duration, ok bool)
}

// Result is the result of Engine.Resume.
type Result struct {
	Changes bundle.ChangeSet
	// IsReportNew is true if the report of the bundle differs from the report before the run, or if StateApplying may have
	// been reported during the run: the final report must replace it.
	IsReportNew bool
	// IsLost is true if the bundle is lost.
	IsLost bool
}

// Options are the dependencies of a Corrector. All fields are required.
type Options struct {
	Engine Engine
	// Store reads the records on the member. Metadata watches the objects on the member, and Mapper resolves their kinds.
	Store    *inventory.Store
	Metadata metadata.Interface
	Mapper   *kube.Mapper
	Clock    clock.WithTicker
	// ScopeConfirmed is closed when the hub has confirmed the owner scope of Store. Then records of earlier registrations
	// are deleted.
	ScopeConfirmed <-chan struct{}

	// The functions below are called by several goroutines, without a lock of the bundle. A worker corrects nothing while
	// it waits for one of them. They must return when the context of Run ends.

	// OnCorrect is called after a run that has changed objects, with the changes. It must return soon.
	OnCorrect func(bundle.ID, bundle.ChangeSet)
	// OnReport is called after a run whose report is new, and when a withdrawal in progress begins to fail.
	OnReport func(bundle.ID)
	// OnRecordMissing is called if a bundle is lost, or if a check of its withdrawal finds the withdrawal complete or no
	// longer in progress.
	OnRecordMissing func(bundle.ID)
	// OnChange is called for each bundle with an event of its objects; each object of an initial list counts as an event.
	// It is called at most once per notifyInterval and bundle, and more often only if an object was deleted.
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
	withdrawals    map[bundle.ID]*withdrawal
	recordFailures map[bundle.ID]int  // attempts to read the record that failed in a row
	isRetryQueued  map[bundle.ID]bool // a retry or a check of a withdrawal is queued
	backoffs       map[objectKey]objectBackoff
}

// task has the reasons why a bundle is in the queue.
type task struct {
	resync      bool                     // converge every object, unless the drift of the bundle is not corrected
	retry       bool                     // converge every object of an unfinished bundle, or check the withdrawal
	checkRecord bool                     // check whether the record still exists
	observed    map[kube.Ref]observation // the last event of each object that seemed to have drifted
}

// New returns a Corrector. It sends no request before Run.
func New(opts Options) *Corrector {
	return &Corrector{
		Options: opts, notifier: newChangeNotifier(),
		queue: workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[bundle.ID]{
			Name:  "engine-heal", // a label value of the workqueue metrics, kept for existing dashboards
			Clock: opts.Clock,
		}),
		tasks: map[bundle.ID]*task{}, withdrawals: map[bundle.ID]*withdrawal{}, recordFailures: map[bundle.ID]int{}, isRetryQueued: map[bundle.ID]bool{},
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
	watches := newWatchSet(c)
	defer watches.stop()
	defer stop()
	resync := c.Clock.NewTicker(resyncInterval)
	defer resync.Stop()
	c.listRecords(ctx)
	confirmed := c.ScopeConfirmed
	watches.watchRecords(ctx)
	for isFirst := true; ; isFirst = false {
		changes := c.Store.TakeChanges()
		watches.update(ctx, c.Store.WatchedKinds())
		for _, change := range changes {
			c.queueUnfinished(change.Record)
			// MayHaveDrifted: another process may have written the record. In the first round the lists of the new watches
			// compare its objects.
			if change.MayHaveDrifted && !isFirst {
				c.queueResync(change.Record)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-confirmed:
			c.Store.DeleteRecordsOfOlderRegistrations(ctx)
			confirmed = nil
		case <-c.Store.Changes():
		case <-resync.C():
			c.expireBackoffs()
			for _, rec := range c.Store.ListCached() {
				c.queueUnfinished(rec)
				c.queueResync(rec)
			}
		}
	}
}

// listRecords reads all records. It retries until the API server answers or ctx ends.
func (c *Corrector) listRecords(ctx context.Context) {
	for pause := minBackoff; ctx.Err() == nil; pause = min(2*pause, MaxBackoff) {
		if err := c.Store.List(ctx); err == nil {
			return
		}
		select {
		case <-ctx.Done():
		case <-c.Clock.After(pause):
		}
	}
}

// queueUnfinished queues a retry of an unfinished bundle, or a check of a withdrawal in progress. It does nothing if
// the retry or the check is queued already.
func (c *Corrector) queueUnfinished(rec *inventory.Record) {
	if rec.State == bundle.StateRemoving {
		c.ensureWithdrawalCheck(rec.ID)
		return
	}
	c.forgetWithdrawal(rec.ID)
	if rec.Suspended || !rec.IsUnfinished() {
		return
	}
	c.mu.Lock()
	isQueued := c.isRetryQueued[rec.ID]
	c.mu.Unlock()
	if !isQueued {
		c.queueRetry(rec)
	}
}

// queueRetry queues a retry of an unfinished bundle, unless it would fail again.
func (c *Corrector) queueRetry(rec *inventory.Record) {
	next, ok := c.Engine.NextAttempt(rec.ID, rec.BundleDigest())
	if !ok {
		return
	}
	poll, isWaiting := c.Engine.PollPause(rec.ID)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.taskFor(rec.ID).retry = true
	c.isRetryQueued[rec.ID] = true
	pause := minBackoff
	switch {
	case !next.IsZero():
		pause = next.Sub(c.Clock.Now())
	case isWaiting:
		pause = poll
	}
	c.queue.AddAfter(rec.ID, pause)
}

// queueResync queues a run of all objects of a bundle. It does nothing for a bundle without drift correction.
func (c *Corrector) queueResync(rec *inventory.Record) {
	if !needsDriftCorrection(rec) {
		return
	}
	c.mu.Lock()
	c.taskFor(rec.ID).resync = true
	c.mu.Unlock()
	c.queue.Add(rec.ID)
}

// expireBackoffs deletes the backoffs of objects that have not drifted for quietPeriod.
func (c *Corrector) expireBackoffs() {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.Clock.Now()
	maps.DeleteFunc(c.backoffs, func(_ objectKey, b objectBackoff) bool { return b.isOver(now) })
}

// taskFor returns the task of id, which it creates if necessary. The caller must hold mu.
func (c *Corrector) taskFor(id bundle.ID) *task {
	if c.tasks[id] == nil {
		c.tasks[id] = &task{observed: map[kube.Ref]observation{}}
	}
	return c.tasks[id]
}

// onEvent handles an event of an object, for each bundle that tracks it. It adds the bundle to the notifier. It queues
// the bundle if the object has drifted, or if a withdrawal waits for the object.
func (c *Corrector) onEvent(key kube.Ref, o observation) {
	for _, rec := range c.Store.RecordsTracking(key) {
		entry, _ := rec.FindTracked(key)
		c.notifier.add(rec.ID, o)
		if rec.State == bundle.StateRemoving && o.deleted {
			c.queueWithdrawalCheckSoon(rec.ID)
		}
		if !needsDriftCorrection(rec) || !isDrifted(entry, o, hashOwnerKey(c.Store.Scope().OwnerKey(rec.ID))) {
			continue
		}
		c.mu.Lock()
		// The key is the record's Ref, not the event's, so that the event's strings can be freed.
		c.taskFor(rec.ID).observed[entry.Ref.Key()] = o
		c.mu.Unlock()
		c.queue.Add(rec.ID)
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

// mergeFailedTask adds the observed objects of a failed task to the next task, except objects with newer events there.
func (c *Corrector) mergeFailedTask(id bundle.ID, failed *task) {
	if len(failed.observed) == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	next := c.taskFor(id)
	for key, o := range failed.observed {
		if _, hasNewer := next.observed[key]; !hasNewer {
			next.observed[key] = o
		}
	}
	c.queue.Add(id) // selectDrifted delays the objects
}

// needsDriftCorrection returns whether the drift of a bundle is corrected.
func needsDriftCorrection(rec *inventory.Record) bool {
	return rec.Options.CorrectDrift && rec.State != bundle.StateRemoving && !rec.Suspended
}
