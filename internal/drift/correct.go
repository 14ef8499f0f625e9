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

// processTask processes one bundle, and calls OnCorrect, OnReport and OnRecordMissing.
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
		c.OnRecordMissing(id)
	}
}

// correct converges the drifted objects of one bundle, or all its objects. It compares the observed objects with the
// record after it has acquired the bundle, because a run may have saved the record since the event.
func (c *Corrector) correct(ctx context.Context, id bundle.ID, t *task) Result {
	unlock, err := c.Engine.Acquire(ctx, id)
	if err != nil {
		return Result{} // ctx has ended
	}
	defer unlock()
	rec := c.Store.Cached(id)
	if rec == nil {
		return Result{}
	}
	if t.checkRecord && c.checkRecord(ctx, id) {
		return Result{IsLost: true}
	}
	only, needed := c.selectObjects(rec, t)
	if !needed {
		return Result{}
	}
	result, err := c.Engine.Resume(ctx, id, only)
	if result.IsLost || ctx.Err() != nil {
		return result
	}
	c.updateBackoffs(id, only, result.Changes, err)
	if err != nil {
		// If the run failed early, the record does not show the drift: keep the observed objects.
		c.mergeFailedTask(id, t)
	}
	if after := c.Store.Cached(id); after != nil && after.IsUnfinished() {
		c.queueRetry(after)
	}
	return result
}

// checkRecord returns whether the bundle of id is lost. If its record cannot be read, it queues another check.
func (c *Corrector) checkRecord(ctx context.Context, id bundle.ID) (isLost bool) {
	isLost, err := c.Store.IsLost(ctx, id)
	if err != nil {
		c.retryRecordCheck(id)
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.recordFailures, id)
	return isLost
}

// selectObjects returns the objects that Engine.Resume must converge now, nil for all objects of the bundle. needed is
// false if no object needs a run.
func (c *Corrector) selectObjects(rec *inventory.Record, t *task) (only map[kube.Ref]bool, needed bool) {
	switch {
	case rec.Suspended || rec.State == bundle.StateRemoving:
		return nil, false
	case rec.IsUnfinished():
		return c.selectUnfinished(rec, t)
	case t.resync && needsDriftCorrection(rec):
		return nil, true
	}
	drifted := c.selectDrifted(rec, t)
	return drifted, len(drifted) > 0
}

// selectUnfinished is selectObjects for an unfinished bundle:
//
//	state     retry is due   t has retry or resync   result
//	failed    yes            yes                     all objects
//	failed    yes            no                      the drifted objects
//	failed    no             yes                     the drifted objects, and the retry is queued again
//	failed    no             no                      the drifted objects
//	applying  yes            yes                     all objects: Resume ignores only
//	applying  yes            no                      all objects if one has drifted
//	applying  no             yes                     none, and the retry is queued again
//	applying  no             no                      none
//
// An event can start the task of a retry before the retry is due.
func (c *Corrector) selectUnfinished(rec *inventory.Record, t *task) (only map[kube.Ref]bool, needed bool) {
	isRetry := t.retry || t.resync
	next, ok := c.Engine.NextAttempt(rec.ID, rec.BundleDigest())
	isDue := ok && !c.Clock.Now().Before(next)
	switch {
	case isDue && isRetry && rec.State == bundle.StateFailed:
		return nil, true
	case !isDue && isRetry:
		c.queueRetry(rec)
	}
	if !isDue && rec.State == bundle.StateApplying {
		return nil, false // the Engine would converge all objects, not only the drifted ones
	}
	drifted := c.selectDrifted(rec, t)
	return drifted, len(drifted) > 0 || isDue && isRetry // without drifted objects, a due retry runs all objects
}

// selectDrifted returns the observed objects that have drifted, nil if there are none. An object that must be corrected
// later is not returned, but queued again.
func (c *Corrector) selectDrifted(rec *inventory.Record, t *task) (drifted map[kube.Ref]bool) {
	if !needsDriftCorrection(rec) {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for key, o := range t.observed {
		entry, ok := rec.FindTracked(key)
		if !ok || !isDrifted(entry, o, hashOwnerKey(c.Store.Scope().OwnerKey(rec.ID))) || isLeftToRetry(rec, entry) {
			continue
		}
		if pause := c.backoffs[objectKey{rec.ID, key}].pause(c.Clock.Now()); pause > 0 {
			c.taskFor(rec.ID).observed[key] = o
			c.queue.AddAfter(rec.ID, pause)
			continue
		}
		if drifted == nil {
			drifted = map[kube.Ref]bool{}
		}
		drifted[key] = true
	}
	return drifted
}

// isLeftToRetry returns whether only the retry of a failed bundle can correct an object: the bundle has not applied the
// object, or a Helm release is not deployed. Each run continues the deployment of all releases, even a run for one
// object, and only the retry may do that.
func isLeftToRetry(rec *inventory.Record, entry inventory.Entry) bool {
	return rec.State == bundle.StateFailed && (entry.UID == "" && !entry.IsHelmSecret || !rec.AreReleasesDeployed())
}

// updateBackoffs updates the backoff of the objects that a run has changed, or has failed to change. only are the
// selected objects of the run: if the run fails, all of them count as failed, except those in changes.
func (c *Corrector) updateBackoffs(id bundle.ID, only map[kube.Ref]bool, changes bundle.ChangeSet, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.Clock.Now()
	failed := map[kube.Ref]bool{}
	for key := range only {
		failed[key] = err != nil
	}
	for _, change := range changes {
		key := change.Ref.Key() // without the version, as in only
		failed[key] = change.Action == bundle.Failed
		if change.Action == bundle.Created || change.Action == bundle.Configured {
			c.backoffs[objectKey{id, key}] = objectBackoff{corrections: c.backoffs[objectKey{id, key}].orZeroIfOver(now).corrections + 1, last: now}
		}
	}
	for key, hasFailed := range failed {
		if b := c.backoffs[objectKey{id, key}].orZeroIfOver(now); hasFailed {
			c.backoffs[objectKey{id, key}] = objectBackoff{corrections: b.corrections, failures: b.failures + 1, last: now}
		}
	}
}

func hasChanges(changes bundle.ChangeSet) bool {
	return changes.Count(bundle.Created)+changes.Count(bundle.Configured)+changes.Count(bundle.Deleted) > 0
}
