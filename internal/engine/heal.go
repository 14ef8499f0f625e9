package engine

import (
	"context"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

const (
	// settleTime is how long healing waits for more of the same: one pass then heals what was changed together.
	settleTime = 100 * time.Millisecond
	// resyncInterval is how often everything is looked at, whatever the watches said.
	resyncInterval = 10 * time.Minute
	// retryFirst and retryMost are the first and the longest pause before a pass that failed is tried again; each is twice the one before.
	retryFirst = time.Second
	retryMost  = 5 * time.Minute
	// freeHeals is how often in a row an object is healed at once; whoever insists is answered ever more slowly, up to retryMost.
	freeHeals = 3
	// peaceTime is how long an object must be left alone until it is healed at once again.
	peaceTime = 10 * time.Minute
	healers   = 4
)

// sighting is what a watch saw of one object.
type sighting struct {
	gone      bool
	uid       types.UID // empty when gone means "not in the list"
	state     string
	signature string
	ignored   bool // its drift is not our business, or it is on its way out
}

// moved says whether an object is no longer as the record of a bundle says it was left; sign is in the marks of what the bundle has.
func moved(had inventory.Entry, s sighting, sign string) bool {
	switch {
	case had.Rival != "":
		return false
	case s.gone:
		return s.uid == "" || had.UID == "" || had.UID == s.uid
	case s.ignored:
		return false
	case had.IsReleaseRecord:
		// Clients of Helm drop our marks, and had may be older than the record that a pass has just written.
		return had.UID != s.uid || had.Fields != s.state
	case had.UID != s.uid && s.signature != sign:
		return false // somebody else's, and it was not ours before
	}
	return had.UID != s.uid || had.Fields != s.state || (s.signature != "" && s.signature != sign)
}

// task is why a bundle waits in the queue.
type task struct {
	all   bool // look at every object
	retry bool // look at every object if the last pass did not end well
	lost  bool // look whether the record is still there
	moved map[kube.Ref]sighting
}

// fight counts how often an object was healed.
type fight struct {
	heals int
	last  time.Time
}

type fightKey struct {
	id  bundle.ID
	key kube.Ref
}

// healer puts back what others change or delete, from the records alone.
type healer struct {
	engine *Engine
	queue  workqueue.TypedDelayingInterface[bundle.ID]
	news   *news

	// mu guards what follows.
	mu       sync.Mutex
	tasks    map[bundle.ID]*task
	failures map[bundle.ID]int // passes of this healer that failed in a row
	unread   map[bundle.ID]int // looks for the record that failed in a row
	retrying map[bundle.ID]bool
	fights   map[fightKey]fight
}

// Run heals until ctx ends: what others change or delete of bundles with the option Heal is put back, and passes that failed or were cut off
// are tried again. It needs nothing but the records on the cluster. It returns nil when ctx has ended and everything it started has too.
func (e *Engine) Run(ctx context.Context) error {
	h := &healer{
		engine: e,
		queue: workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[bundle.ID]{
			Name: "engine-heal", Clock: e.clock,
		}),
		tasks: map[bundle.ID]*task{}, failures: map[bundle.ID]int{}, unread: map[bundle.ID]int{}, retrying: map[bundle.ID]bool{},
		fights: map[fightKey]fight{}, news: newNews(),
	}
	var running sync.WaitGroup
	running.Go(func() { h.news.run(ctx, e.clock, e.onChange) })
	for range healers {
		running.Go(func() {
			for h.next(ctx) {
			}
		})
	}
	h.follow(ctx)
	h.queue.ShutDown()
	running.Wait()
	return nil
}

// follow keeps the watches in step with the records until ctx ends.
func (h *healer) follow(ctx context.Context) {
	ctx, stop := context.WithCancel(ctx)
	watches := &watches{healer: h, running: map[watched]context.CancelFunc{}}
	defer watches.stop()
	defer stop()
	resync := h.engine.clock.NewTicker(resyncInterval)
	defer resync.Stop()
	h.read(ctx)
	confirmed := h.engine.confirmed
	watches.records(ctx)
	for {
		watches.follow(ctx, h.engine.store.ListCached())
		h.retryFailed()
		select {
		case <-ctx.Done():
			return
		case <-confirmed:
			h.engine.store.DeleteOlderRegistrations(ctx)
			confirmed = nil
		case <-h.engine.store.Changes():
		case <-resync.C():
			h.resync()
		}
	}
}

// read loads all records, however long it takes to reach the API server.
func (h *healer) read(ctx context.Context) {
	for pause := retryFirst; ctx.Err() == nil; pause = min(2*pause, retryMost) {
		if _, err := h.engine.store.List(ctx); err == nil {
			return
		}
		select {
		case <-ctx.Done():
		case <-h.engine.clock.After(pause):
		}
	}
}

// retryFailed sees to it that each bundle whose last pass did not end well is tried again.
func (h *healer) retryFailed() {
	for _, rec := range h.engine.store.ListCached() {
		if rec.Suspended || (rec.State != bundle.StateFailed && rec.State != bundle.StateApplying && rec.State != bundle.StateRemoving) {
			continue
		}
		h.mu.Lock()
		waits := h.retrying[rec.ID]
		h.mu.Unlock()
		if !waits {
			h.retryLater(rec.ID)
		}
	}
}

// retryLater queues another try, later after each failure.
func (h *healer) retryLater(id bundle.ID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.taskOf(id).retry = true
	h.retrying[id] = true
	pause, waiting := h.engine.pollPause(id)
	if !waiting || h.failures[id] > 0 {
		pause = backoff(h.failures[id])
	}
	h.queue.AddAfter(id, pause)
}

// backoff returns the pause after the given number of failures.
func backoff(failures int) time.Duration {
	return min(retryFirst<<min(failures, 10), retryMost)
}

func (h *healer) resync() {
	for _, rec := range h.engine.store.ListCached() {
		if heals(rec) {
			h.mu.Lock()
			h.taskOf(rec.ID).all = true
			h.mu.Unlock()
			h.queue.Add(rec.ID)
		}
	}
}

// taskOf returns the task of id to add to. Its caller holds mu.
func (h *healer) taskOf(id bundle.ID) *task {
	if h.tasks[id] == nil {
		h.tasks[id] = &task{moved: map[kube.Ref]sighting{}}
	}
	return h.tasks[id]
}

// see tells of the bundles that hold an object, and queues those that left it otherwise than a watch saw it.
func (h *healer) see(key kube.Ref, s sighting) {
	for _, rec := range h.engine.store.ListCached() {
		had, ok := rec.FindTracked(key)
		if !ok {
			continue
		}
		h.news.add(rec.ID, s)
		if !heals(rec) || !moved(had, s, h.engine.ownerScope.Signature(rec.ID)) {
			continue
		}
		h.mu.Lock()
		h.taskOf(rec.ID).moved[key] = s
		h.mu.Unlock()
		h.queue.AddAfter(rec.ID, settleTime)
	}
}

// miss queues a look, after a pause, whether the record of id is still there.
func (h *healer) miss(id bundle.ID, pause time.Duration) {
	h.mu.Lock()
	h.taskOf(id).lost = true
	h.mu.Unlock()
	h.queue.AddAfter(id, pause)
}

// missAgain queues another look for a record that could not be read, later after each failure.
func (h *healer) missAgain(id bundle.ID) {
	h.mu.Lock()
	pause := backoff(h.unread[id])
	h.unread[id]++
	h.mu.Unlock()
	h.miss(id, pause)
}

// lost looks whether the record of id is no longer there. What cannot be read now is looked for again later.
func (h *healer) lost(ctx context.Context, id bundle.ID) bool {
	lost, err := h.engine.store.IsLost(ctx, id)
	if err != nil {
		h.missAgain(id)
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.unread, id)
	return lost
}

// putBack keeps what a failed pass was to look at for the next one, except what has been seen anew since.
func (h *healer) putBack(id bundle.ID, job *task) {
	h.mu.Lock()
	defer h.mu.Unlock()
	next := h.taskOf(id)
	next.all = next.all || job.all
	for key, s := range job.moved {
		if _, newer := next.moved[key]; !newer {
			next.moved[key] = s
		}
	}
}

func heals(rec *inventory.Record) bool {
	return rec.Options.Heal && rec.State != bundle.StateRemoving && !rec.Suspended
}

// next works on one bundle from the queue. It returns false when the queue is shut down.
func (h *healer) next(ctx context.Context) bool {
	id, down := h.queue.Get()
	if down {
		return false
	}
	defer h.queue.Done(id)
	h.mu.Lock()
	job := h.tasks[id]
	delete(h.tasks, id)
	delete(h.retrying, id)
	h.mu.Unlock()
	if job != nil && ctx.Err() == nil {
		h.heal(ctx, id, job)
	}
	return true
}

// heal works on one bundle and says so if that changed anything.
func (h *healer) heal(ctx context.Context, id bundle.ID, job *task) {
	if rec := h.engine.store.Cached(id); rec != nil && rec.State == bundle.StateRemoving && job.retry {
		h.withdraw(ctx, rec)
		return
	}
	changes, told := h.pass(ctx, id, job)
	if told {
		h.engine.onHeal(id, changes)
	}
}

// withdraw goes on with a withdrawal that was ordered: whoever ordered it may not be reachable now.
func (h *healer) withdraw(ctx context.Context, rec *inventory.Record) {
	done, err := h.engine.resumeWithdrawal(ctx, rec.ID)
	h.count(rec.ID, nil, err)
	if done {
		h.engine.onHeal(rec.ID, nil)
		return
	}
	if ctx.Err() == nil {
		h.retryLater(rec.ID)
	}
}

// pass holds the bundle's ID before it compares again: what was seen during a pass is judged by the record that the pass left.
func (h *healer) pass(ctx context.Context, id bundle.ID, job *task) (changes bundle.ChangeSet, tell bool) {
	release, err := h.engine.ids.acquire(ctx, id)
	if err != nil {
		return nil, false
	}
	defer release()
	rec := h.engine.store.Cached(id)
	if rec == nil {
		return nil, false
	}
	if job.lost && h.lost(ctx, id) {
		return nil, true
	}
	only, busy := h.due(rec, job)
	if !busy {
		return nil, false
	}
	report, ok, err := h.engine.resume(ctx, id, scope{motive: healing, only: only})
	if !ok && err == nil {
		return nil, true // there is nothing to heal from
	}
	h.count(id, report.Changes, err)
	if err != nil && ctx.Err() == nil {
		// A pass that failed early has not written that anything is amiss.
		h.putBack(id, job)
		h.retryLater(id)
	} else if report.State == bundle.StateApplying && ctx.Err() == nil {
		h.retryLater(id)
	}
	return report.Changes, changedAnything(report.Changes) || report.State != rec.State || report.Message != rec.Message
}

// due lists the objects to look at now; nil means all. What has been healed too often lately is put off.
func (h *healer) due(rec *inventory.Record, job *task) (only map[kube.Ref]bool, busy bool) {
	if rec.Suspended {
		return nil, false
	}
	switch {
	case job.all && heals(rec):
		return nil, true
	case job.retry && rec.State != bundle.StateApplied:
		// What has changed is looked at although a release waits.
		return h.movedNow(rec, job), rec.State != bundle.StateRemoving
	case !heals(rec):
		return nil, false
	}
	only = h.movedNow(rec, job)
	return only, len(only) > 0
}

// movedNow lists the objects of job that are not as the record of a bundle says they were left; nil if there are none. What has been healed too
// often lately is put off.
func (h *healer) movedNow(rec *inventory.Record, job *task) (only map[kube.Ref]bool) {
	if !heals(rec) {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for key, s := range job.moved {
		had, ok := rec.FindTracked(key)
		if !ok || !moved(had, s, h.engine.ownerScope.Signature(rec.ID)) {
			continue
		}
		if pause := h.pause(fightKey{rec.ID, key}); pause > 0 {
			h.taskOf(rec.ID).moved[key] = s
			h.queue.AddAfter(rec.ID, pause)
			continue
		}
		if only == nil {
			only = map[kube.Ref]bool{}
		}
		only[key] = true
	}
	return only
}

// pause says how long an object that was healed before has to wait. Its caller holds mu.
func (h *healer) pause(key fightKey) time.Duration {
	f, ok := h.fights[key]
	if !ok || f.heals < freeHeals {
		return 0
	}
	return backoff(f.heals-freeHeals) - h.engine.clock.Since(f.last)
}

// count remembers how a pass ended, for the pauses before the next ones.
func (h *healer) count(id bundle.ID, changes bundle.ChangeSet, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err == nil {
		delete(h.failures, id)
	} else {
		h.failures[id]++
	}
	now := h.engine.clock.Now()
	for key, f := range h.fights {
		if now.Sub(f.last) > peaceTime {
			delete(h.fights, key)
		}
	}
	for _, change := range changes {
		if change.Action == bundle.Created || change.Action == bundle.Configured {
			key := fightKey{id, change.Ref.Key()}
			h.fights[key] = fight{heals: h.fights[key].heals + 1, last: now}
		}
	}
}

func changedAnything(changes bundle.ChangeSet) bool {
	return changes.Count(bundle.Created)+changes.Count(bundle.Configured)+changes.Count(bundle.Deleted) > 0
}
