package drift

import (
	"context"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// processNext processes one bundle from the queue. It returns false when the queue is shut down.
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
		c.processTask(ctx, id, t)
	}
	return true
}

// processTask processes one bundle. It calls OnCorrect if something has changed.
func (c *Corrector) processTask(ctx context.Context, id bundle.ID, t *task) {
	if rec := c.Store.Cached(id); rec != nil && rec.State == bundle.StateRemoving && t.retry {
		c.resumeWithdrawal(ctx, rec)
		return
	}
	changes, changed := c.correct(ctx, id, t)
	if changed {
		c.OnCorrect(id, changes)
	}
}

// resumeWithdrawal continues a withdrawal that the hub has requested. The hub may be unreachable now.
func (c *Corrector) resumeWithdrawal(ctx context.Context, rec *inventory.Record) {
	done, err := c.Engine.ResumeWithdrawal(ctx, rec.ID)
	c.recordResult(rec.ID, nil, err)
	if done {
		c.OnCorrect(rec.ID, nil)
		return
	}
	if ctx.Err() == nil {
		c.queueRetry(rec.ID)
	}
}

// correct converges the drifted objects of one bundle. It compares again after it has acquired the bundle: an event
// during a run is compared with the record that the run has saved. changed is true if OnCorrect must be called.
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
	selected, needed := c.selectObjects(rec, t)
	if !needed {
		return nil, false
	}
	report, ok, err := c.Engine.Resume(ctx, id, selected)
	if !ok && err == nil {
		return nil, true // there is no content to apply
	}
	c.recordResult(id, report.Changes, err)
	if err != nil && ctx.Err() == nil {
		// A run that failed early has not saved the difference in the record.
		c.mergeFailedTask(id, t)
		c.queueRetry(id)
	} else if report.State == bundle.StateApplying && ctx.Err() == nil {
		c.queueRetry(id)
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
func (c *Corrector) selectObjects(rec *inventory.Record, t *task) (selected map[kube.Ref]bool, needed bool) {
	if rec.Suspended {
		return nil, false
	}
	switch {
	case t.all && needsDriftCorrection(rec):
		return nil, true
	case t.retry && rec.State != bundle.StateApplied:
		// Drifted objects are also corrected while a release waits.
		return c.selectDrifted(rec, t), rec.State != bundle.StateRemoving
	case !needsDriftCorrection(rec):
		return nil, false
	}
	selected = c.selectDrifted(rec, t)
	return selected, len(selected) > 0
}

// selectDrifted returns the observed objects that differ from the record, nil if there are none. It queues objects
// again whose backoff has not passed.
func (c *Corrector) selectDrifted(rec *inventory.Record, t *task) (selected map[kube.Ref]bool) {
	if !needsDriftCorrection(rec) {
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
			c.taskFor(rec.ID).observed[key] = o
			c.queue.AddAfter(rec.ID, pause)
			continue
		}
		if selected == nil {
			selected = map[kube.Ref]bool{}
		}
		selected[key] = true
	}
	return selected
}

// recordResult updates the counters for the backoff: failures of the bundle, and corrections of its objects.
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
