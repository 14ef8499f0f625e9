package summaries

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/status"
)

// forcedTimeout bounds a withdrawal request to a member that is deregistered by force.
const forcedTimeout = 20 * time.Second

// withdrawFeatures withdraws the features that are no longer wanted: all features if the summary is deleted. If the
// hub's cluster gets new features, its unwanted features are withdrawn after the new ones are delivered. So it keeps
// them while a source of the new ones does not exist yet.
func (c *Controller) withdrawFeatures(ctx context.Context, s *state) error {
	if s.local.hasNewFeatures() && s.local.hasDeliveredNewFeatures() {
		if err := c.withdrawFrom(ctx, s.local); err != nil {
			return err
		}
	}
	reason, err := c.abandonReason(ctx, s)
	if err != nil {
		return err
	}
	if reason == "" {
		return c.withdrawFrom(ctx, s)
	}
	if !s.local.isWithdrawn && !s.local.canAbandon {
		return nil // abandon must run only once, and so only after the withdrawal from the hub
	}
	return c.abandon(ctx, s, reason)
}

// withdrawFrom withdraws the unwanted features from the cluster of s, and sets isWithdrawn. While deleted objects still
// exist, the engine of the cluster continues, and its report triggers the next reconcile: by Wakeups, or by the
// ConfigurationGroup of a pull member.
func (c *Controller) withdrawFrom(ctx context.Context, s *state) error {
	s.isWithdrawn = true
	for _, feature := range s.featuresToWithdraw() {
		w := bundle.Withdrawal{ID: s.bundleID(feature), Orphan: s.orphansObjects() || s.isOrphaned(feature), ServiceAccount: s.withdrawalAccount(feature)}
		done, err := c.withdraw(ctx, s.member, w)
		if ctx.Err() != nil {
			s.isClusterSlow = s.isClusterSlow || isTimeout(ctx.Err())
			return fmt.Errorf("withdraw %s from %s: %w", w.ID, s.member.Key(), ctx.Err())
		}
		if done && err == nil {
			s.addResult(status.FeatureResult{Feature: feature, Kind: status.Withdrawn})
			s.removedFeatures = append(s.removedFeatures, feature)
			continue
		}
		s.isWithdrawn = false
		s.isClusterSlow = s.isClusterSlow || isTimeout(err)
		s.retryErr = errors.Join(s.retryErr, err)
		featureResult := status.FeatureResult{Feature: feature, Kind: status.Withdrawing, Err: err, Status: removingStatus(s.member)}
		if err != nil {
			featureResult.Reason = status.ReasonDeliver
		}
		s.addResult(featureResult)
	}
	return nil
}

// withdraw withdraws a bundle. isDone is false while the member still has objects. A deregistration by force limits the
// time, because the member possibly does not answer.
func (c *Controller) withdraw(ctx context.Context, m fleet.Member, w bundle.Withdrawal) (isDone bool, err error) {
	if m.Forced {
		limitedCtx, cancel := context.WithTimeout(ctx, forcedTimeout)
		defer cancel()
		ctx = limitedCtx
	}
	return c.Transport.Withdraw(ctx, m, w)
}
