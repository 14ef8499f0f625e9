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

// ensureWithdrawalCheck queues a check of the withdrawal of id, unless a check is queued. A retry that was queued
// before the withdrawal began does not count, because its pause can be long.
func (c *Corrector) ensureWithdrawalCheck(id bundle.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.withdrawals[id] == nil || !c.isRetryQueued[id] {
		c.queueWithdrawal(id)
	}
}

// queueWithdrawal queues the next check of the withdrawal of id. The caller must hold mu.
func (c *Corrector) queueWithdrawal(id bundle.ID) {
	now := c.Clock.Now()
	if c.withdrawals[id] == nil {
		c.withdrawals[id] = &withdrawal{began: now}
	}
	c.taskFor(id).retry = true
	c.isRetryQueued[id] = true
	c.queue.AddAfter(id, withdrawalPause(now.Sub(c.withdrawals[id].began)))
}

// wakeWithdrawal queues a check of the withdrawal of id, because one of its objects no longer exists. The check is at
// least minBackoff after the last one, since each check reads all remaining objects of one rank of the deletion order.
func (c *Corrector) wakeWithdrawal(id bundle.ID) {
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

// forgetWithdrawal deletes the state of the withdrawal of id, if there is one. No withdrawal of id is in progress then.
func (c *Corrector) forgetWithdrawal(id bundle.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.withdrawals, id)
}

// resumeWithdrawal continues a withdrawal that the hub has requested, also while the hub is unreachable. It calls
// OnLost when the withdrawal is complete, and OnReport after the first of consecutive failures.
func (c *Corrector) resumeWithdrawal(ctx context.Context, id bundle.ID) {
	done, err := c.Engine.ResumeWithdrawal(ctx, id)
	if done {
		c.forgetWithdrawal(id)
		c.OnLost(id)
		return
	}
	if ctx.Err() != nil {
		return
	}
	if beginsToFail := c.queueNextCheck(id, err != nil); beginsToFail {
		c.OnReport(id)
	}
}

// queueNextCheck queues the next check after a check of the withdrawal of id. beginsToFail is true if this check has
// failed and the check before it has not.
func (c *Corrector) queueNextCheck(id bundle.ID, hasFailed bool) (beginsToFail bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queueWithdrawal(id)
	w := c.withdrawals[id]
	beginsToFail = hasFailed && !w.hasFailed
	w.checked, w.hasFailed = c.Clock.Now(), hasFailed
	return beginsToFail
}
