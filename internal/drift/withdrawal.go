package drift

import (
	"context"
	"time"

	"github.com/towline/towline/internal/bundle"
)

// withdrawal is a withdrawal in progress: deleted objects still exist, for example because of finalizers, or the last
// check has failed.
type withdrawal struct {
	began     time.Time
	checked   time.Time // the end of the last check, zero before the first one
	hasFailed bool      // the last check has failed
}

// withdrawalPause returns the pause before the next check of a withdrawal that began the given time ago: a quarter of
// that time, at least 1 s and at most 5 minutes.
func withdrawalPause(elapsed time.Duration) time.Duration {
	return min(max(elapsed/4, minBackoff), MaxBackoff)
}

// ensureWithdrawalCheck queues a check of the withdrawal of id, unless a check is queued. A retry that is queued since
// before the withdrawal is not enough, because its pause can be long.
func (c *Corrector) ensureWithdrawalCheck(id bundle.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.withdrawals[id] == nil || !c.isRetryQueued[id] {
		c.queueWithdrawalCheckLocked(id)
	}
}

// queueWithdrawalCheckLocked queues the next check of the withdrawal of id. The caller must hold mu.
func (c *Corrector) queueWithdrawalCheckLocked(id bundle.ID) {
	now := c.Clock.Now()
	if c.withdrawals[id] == nil {
		c.withdrawals[id] = &withdrawal{began: now}
	}
	c.taskFor(id).retry = true
	c.isRetryQueued[id] = true
	c.queue.AddAfter(id, withdrawalPause(now.Sub(c.withdrawals[id].began)))
}

// queueWithdrawalCheckSoon queues a check of the withdrawal of id, because one of its objects no longer exists. The
// check is at least minBackoff after the last one, since each check reads all remaining objects of the rank that is
// being deleted.
func (c *Corrector) queueWithdrawalCheckSoon(id bundle.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := c.withdrawals[id]
	if w == nil || w.checked.IsZero() {
		return // the first check is queued
	}
	c.taskFor(id).retry = true
	c.isRetryQueued[id] = true
	c.queue.AddAfter(id, w.checked.Add(minBackoff).Sub(c.Clock.Now()))
}

// forgetWithdrawal deletes the state of the withdrawal of id, if there is one. The caller has found that no withdrawal
// of id is in progress.
func (c *Corrector) forgetWithdrawal(id bundle.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.withdrawals, id)
}

// resumeWithdrawal continues a withdrawal that the hub has requested, also while the hub is unreachable. It calls
// OnRecordMissing when the withdrawal is complete, and OnReport after the first of consecutive failures.
func (c *Corrector) resumeWithdrawal(ctx context.Context, id bundle.ID) {
	done, err := c.Engine.ResumeWithdrawal(ctx, id)
	if done {
		c.forgetWithdrawal(id)
		c.OnRecordMissing(id)
		return
	}
	if ctx.Err() != nil {
		return
	}
	if beginsToFail := c.finishWithdrawalCheck(id, err != nil); beginsToFail {
		c.OnReport(id)
	}
}

// finishWithdrawalCheck stores the result of a check of the withdrawal of id, and queues the next check. beginsToFail
// is true if this check has failed and the check before it has not.
func (c *Corrector) finishWithdrawalCheck(id bundle.ID, hasFailed bool) (beginsToFail bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queueWithdrawalCheckLocked(id)
	w := c.withdrawals[id]
	beginsToFail = hasFailed && !w.hasFailed
	w.checked, w.hasFailed = c.Clock.Now(), hasFailed
	return beginsToFail
}
