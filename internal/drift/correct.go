package drift

import (
	"context"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// processNext processes one bundle from the queue. It returns false when the queue is shut down.
func (c *Corrector) processNext(ctx context.Context) bool {
	id, shutdown := c.queue.Get()
	if shutdown {
		return false
	}
	defer c.queue.Done(id)
	c.mu.Lock()
	t := c.tasks[id]
	delete(c.tasks, id)
	delete(c.isRetryQueued, id)
	c.mu.Unlock()
	if t != nil && ctx.Err() == nil {
		c.processTask(ctx, id, t)
	}
	return true
}

// processTask processes one bundle, and calls OnCorrect, OnReport and OnLost.
func (c *Corrector) processTask(ctx context.Context, id bundle.ID, t *task) {
	if t.retry {
		if rec := c.Store.Cached(id); rec != nil && rec.State == bundle.StateRemoving {
			c.resumeWithdrawal(ctx, id)
			return
		}
		c.forgetWithdrawal(id)
	}
	result := c.correct(ctx, id, t)
	if hasChanges(result.Changes) {
		c.OnCorrect(id, result.Changes)
	}
	if result.IsReportNew {
		c.OnReport(id)
	}
	if result.IsLost {
		c.OnLost(id)
	}
}

// correct converges the drifted objects of one bundle, or all its objects. It compares the observed objects with the
// record after it has acquired the bundle, because a run may have saved the record since the event.
func (c *Corrector) correct(ctx context.Context, id bundle.ID, t *task) Result {
	unlock, err := c.Engine.Acquire(ctx, id)
	if err != nil {
		return Result{}
	}
	defer unlock()
	rec := c.Store.Cached(id)
	if rec == nil {
		return Result{}
	}
	if t.checkRecord && c.isRecordLost(ctx, id) {
		return Result{IsLost: true}
	}
	selected, needed := c.selectObjects(rec, t)
	if !needed {
		return Result{}
	}
	result, err := c.Engine.Resume(ctx, id, selected)
	if result.IsLost || ctx.Err() != nil {
		return result
	}
	c.recordResult(id, selected, result.Changes, err)
	if err != nil {
		// The record does not show the drift if the run failed early, so keep the observed objects.
		c.mergeFailedTask(id, t)
	}
	if after := c.Store.Cached(id); after != nil && after.IsUnfinished() {
		c.queueRetry(after)
	}
	return result
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
	switch {
	case rec.Suspended || rec.State == bundle.StateRemoving:
		return nil, false
	case rec.IsUnfinished():
		return c.selectUnfinished(rec, t)
	case t.all && needsDriftCorrection(rec):
		return nil, true
	}
	selected = c.selectDrifted(rec, t)
	return selected, len(selected) > 0
}

// selectUnfinished is selectObjects for an unfinished bundle. An event can start the task of a retry before the retry
// is due. Then selectUnfinished queues the retry again.
func (c *Corrector) selectUnfinished(rec *inventory.Record, t *task) (selected map[kube.Ref]bool, needed bool) {
	isRetry := t.retry || t.all
	next, ok := c.Engine.NextAttempt(rec.ID, rec.BundleDigest())
	isDue := ok && !c.Clock.Now().Before(next)
	switch {
	case isDue && isRetry && rec.State == bundle.StateFailed:
		return nil, true
	case !isDue && isRetry:
		c.queueRetry(rec)
	}
	if !isDue && rec.State == bundle.StateApplying {
		return nil, false // the Engine does not converge single objects of an interrupted run
	}
	// The Engine always converges all objects of an interrupted bundle, also if some are selected. With selected objects
	// it does so even while a Helm release waits.
	selected = c.selectDrifted(rec, t)
	return selected, len(selected) > 0 || isDue && isRetry
}

// selectDrifted returns the observed objects that differ from the record, nil if there are none. An object whose
// backoff has not passed is not returned, but queued again.
func (c *Corrector) selectDrifted(rec *inventory.Record, t *task) (selected map[kube.Ref]bool) {
	if !needsDriftCorrection(rec) {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for key, o := range t.observed {
		entry, ok := rec.FindTracked(key)
		if !ok || !isDrifted(entry, o, hashOwnerKey(c.Store.Scope().OwnerKey(rec.ID))) || needsRetry(rec, entry) {
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

// needsRetry returns whether only the retry of a failed bundle can correct an object: the bundle has not applied the
// object, or its Helm releases are not deployed.
func needsRetry(rec *inventory.Record, entry inventory.Entry) bool {
	return rec.State == bundle.StateFailed && (entry.UID == "" && !entry.IsReleaseRecord || !rec.AreReleasesDeployed())
}

// recordResult updates the backoff of the objects that a run has changed, or has failed to change.
func (c *Corrector) recordResult(id bundle.ID, selected map[kube.Ref]bool, changes bundle.ChangeSet, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.Clock.Now()
	failed := map[kube.Ref]bool{}
	for key := range selected {
		failed[key] = err != nil
	}
	for _, change := range changes {
		key := change.Ref.Key()
		failed[key] = change.Action == bundle.Failed
		if change.Action == bundle.Created || change.Action == bundle.Configured {
			c.backoffs[objectKey{id, key}] = objectBackoff{corrections: c.backoffs[objectKey{id, key}].unlessOver(now).corrections + 1, last: now}
		}
	}
	for key, hasFailed := range failed {
		if b := c.backoffs[objectKey{id, key}].unlessOver(now); hasFailed {
			c.backoffs[objectKey{id, key}] = objectBackoff{corrections: b.corrections, failures: b.failures + 1, last: now}
		}
	}
}

func hasChanges(changes bundle.ChangeSet) bool {
	return changes.Count(bundle.Created)+changes.Count(bundle.Configured)+changes.Count(bundle.Deleted) > 0
}
