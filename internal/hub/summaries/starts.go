package summaries

import (
	"context"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/status"
)

// startDelay is the time from the start of a delivery to a pull member until the status becomes Provisioning. Most
// agents report the result earlier, which saves one write of the status.
const startDelay = 2 * time.Second

// deliveryStarts has the time of each started delivery for which the status is not Provisioning yet. The zero value is
// ready to use.
type deliveryStarts struct {
	// mu guards since.
	mu sync.Mutex
	// since has the time of the start, by summary.
	since map[client.ObjectKey]time.Time
}

// remaining returns the time until the status must be written, zero or less if that time has passed. The first call for
// a summary records the start and returns startDelay.
func (d *deliveryStarts) remaining(summary client.ObjectKey, now time.Time) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.since == nil {
		d.since = map[client.ObjectKey]time.Time{}
	}
	since, ok := d.since[summary]
	if !ok {
		since = now
		d.since[summary] = now
	}
	return since.Add(startDelay).Sub(now)
}

// forget removes a summary.
func (d *deliveryStarts) forget(summary client.ObjectKey) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.since, summary)
}

// reportStart calls OnDeliveryStart, and writes the status Provisioning before the delivery to a push member, which can
// take minutes. In pull mode report writes the status when the agent reports, or after startDelay (isStartOnly).
func (c *Controller) reportStart(ctx context.Context, s *state) error {
	started := status.ReconcileResult{HashKey: s.result.HashKey}
	for _, composition := range s.compositions {
		old := s.featureSummary(composition.Feature)
		if !s.result.HashKey.IsHashOf(old.Hash, composition.Digest) || !hasDeliveryBegun(old.Status) {
			started.Features = append(started.Features, status.FeatureResult{Feature: composition.Feature, Kind: status.Delivered, DesiredDigest: composition.Digest, Releases: composition.Releases})
			if c.OnDeliveryStart != nil {
				c.OnDeliveryStart(client.ObjectKeyFromObject(s.summary), composition.Feature)
			}
		}
	}
	isReportedLater := s.member.Mode == fleet.Pull && s.spec().SyncMode != configv1beta1.SyncModeOneTime
	if len(started.Features) == 0 || isReportedLater {
		return nil
	}
	return c.writeStatus(ctx, s, status.ComputeStatus(s.summary.Status, started))
}
