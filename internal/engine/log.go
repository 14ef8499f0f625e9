package engine

import (
	"context"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube/logkeys"
)

// logRun logs the number of objects that a run has created, changed, deleted and left unchanged. It omits a run that
// has changed nothing, unless it is the first one of a delivery. storeFailure or the caller logs err.
func (p *applyRun) logRun(ctx context.Context, started time.Time, report bundle.Report, err error) {
	count := p.changes.Count
	if count(bundle.Created)+count(bundle.Configured)+count(bundle.Deleted) == 0 && (p.trigger != triggerDelivery || err != nil) {
		return
	}
	message := "applied bundle"
	switch {
	case err != nil:
		message = "applied a part of the bundle"
	case p.trigger == triggerDrift:
		message = "corrected drift"
	}
	log.FromContext(ctx).Info(message, logkeys.Bundle, p.bundle.ID.String(), logkeys.Profile, p.bundle.Owner.Name, logkeys.Digest, p.digest.String(),
		"state", report.State, "created", count(bundle.Created), "changed", count(bundle.Configured), "deleted", count(bundle.Deleted),
		"unchanged", count(bundle.Unchanged), "failed", count(bundle.Failed), logkeys.Duration, p.engine.clock.Since(started).String())
}

// logRelease logs the end of an operation on a release.
func logRelease(ctx context.Context, message string, s *inventory.ReleaseState) {
	log.FromContext(ctx).Info(message, "release", s.Key().String(), "revision", s.Revision, "operation", string(s.Operation))
}
