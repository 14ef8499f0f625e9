package drift

import (
	"context"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// processNext works on one bundle from the queue. It returns false when the queue is shut down.
func (c *Corrector) processNext(ctx context.Context) bool {
	id, down := c.queue.Get()
	if down {
		return false
	}
	defer c.queue.Done(id)
	c.mu.Lock()
	t := c.tasks[id]
	delete(c.tasks, id)
	delete(c.retrying, id)
	c.mu.Unlock()
	if t != nil && ctx.Err() == nil {
		c.process(ctx, id, t)
	}
	return true
}

// process works on one bundle, and calls OnCorrect if that changed anything.
func (c *Corrector) process(ctx context.Context, id bundle.ID, t *task) {
	if rec := c.Store.Cached(id); rec != nil && rec.State == bundle.StateRemoving && t.retry {
		c.resumeWithdrawal(ctx, rec)
		return
	}
	changes, changed := c.correct(ctx, id, t)
	if changed {
		c.OnCorrect(id, changes)
	}
}

// resumeWithdrawal continues a withdrawal. The hub that requested it may not be reachable now.
func (c *Corrector) resumeWithdrawal(ctx context.Context, rec *inventory.Record) {
	done, err := c.Engine.ResumeWithdrawal(ctx, rec.ID)
	c.recordResult(rec.ID, nil, err)
	if done {
		c.OnCorrect(rec.ID, nil)
		return
	}
	if ctx.Err() == nil {
		c.requeueAfterBackoff(rec.ID)
	}
}

// correct converges what has drifted of one bundle. It acquires the bundle before it compares again: an event that came
// during a run is compared with the record that the run has saved.
func (c *Corrector) correct(ctx context.Context, id bundle.ID, t *task) (changes bundle.ChangeSet, changed bool) {
	release, err := c.Engine.Acquire(ctx, id)
	if err != nil {
		return nil, false
	}
	defer release()
	rec := c.Store.Cached(id)
	if rec == nil {
		return nil, false
	}
	if t.checkRecord && c.isRecordLost(ctx, id) {
		return nil, true
	}
	only, needed := c.selectObjects(rec, t)
	if !needed {
		return nil, false
	}
	report, ok, err := c.Engine.Resume(ctx, id, only)
	if !ok && err == nil {
		return nil, true // there is no content to apply
	}
	c.recordResult(id, report.Changes, err)
	if err != nil && ctx.Err() == nil {
		// A run that failed early has not saved the difference in the record.
		c.requeueTask(id, t)
		c.requeueAfterBackoff(id)
	} else if report.State == bundle.StateApplying && ctx.Err() == nil {
		c.requeueAfterBackoff(id)
	}
	return report.Changes, hasChanges(report.Changes) || report.State != rec.State || report.Message != rec.Message
}

// isRecordLost returns whether the record of id is lost. If it cannot be read, it is checked again later.
func (c *Corrector) isRecordLost(ctx context.Context, id bundle.ID) bool {
	lost, err := c.Store.IsLost(ctx, id)
	if err != nil {
		c.retryRecordCheck(id)
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.recordFailures, id)
	return lost
}

// selectObjects returns the objects to converge now, nil for all. needed is false if there are none.
func (c *Corrector) selectObjects(rec *inventory.Record, t *task) (only map[kube.Ref]bool, needed bool) {
	if rec.Suspended {
		return nil, false
	}
	switch {
	case t.all && correctsDrift(rec):
		return nil, true
	case t.retry && rec.State != bundle.StateApplied:
		// Drifted objects are corrected although a release waits.
		return c.selectDrifted(rec, t), rec.State != bundle.StateRemoving
	case !correctsDrift(rec):
		return nil, false
	}
	only = c.selectDrifted(rec, t)
	return only, len(only) > 0
}

// selectDrifted returns the observed objects that differ from the record, or nil if there are none. It queues objects
// again that may not be corrected yet because of their backoff.
func (c *Corrector) selectDrifted(rec *inventory.Record, t *task) (only map[kube.Ref]bool) {
	if !correctsDrift(rec) {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for key, o := range t.observed {
		entry, ok := rec.FindTracked(key)
		if !ok || !isDrifted(entry, o, c.Store.Scope().Signature(rec.ID)) {
			continue
		}
		if pause := c.backoffs[objectKey{rec.ID, key}].pause(c.Clock.Now()); pause > 0 {
			c.taskOf(rec.ID).observed[key] = o
			c.queue.AddAfter(rec.ID, pause)
			continue
		}
		if only == nil {
			only = map[kube.Ref]bool{}
		}
		only[key] = true
	}
	return only
}

// recordResult counts failures of a bundle and corrections of its objects, for the pauses before the next ones.
func (c *Corrector) recordResult(id bundle.ID, changes bundle.ChangeSet, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		delete(c.failures, id)
	} else {
		c.failures[id]++
	}
	now := c.Clock.Now()
	for key, b := range c.backoffs {
		if now.Sub(b.last) > quietPeriod {
			delete(c.backoffs, key)
		}
	}
	for _, change := range changes {
		if change.Action == bundle.Created || change.Action == bundle.Configured {
			key := objectKey{id, change.Ref.Key()}
			c.backoffs[key] = objectBackoff{corrections: c.backoffs[key].corrections + 1, last: now}
		}
	}
}

func hasChanges(changes bundle.ChangeSet) bool {
	return changes.Count(bundle.Created)+changes.Count(bundle.Configured)+changes.Count(bundle.Deleted) > 0
}
