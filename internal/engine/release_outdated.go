package engine

import (
	"context"
	"fmt"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/release"
)

// runDelivery calls run. If the bundle has outdated releases, it changes nothing and reports them instead.
func (p *applyRun) runDelivery(ctx context.Context) (bundle.Report, error) {
	report := p.prior.Report()
	report.Digest = p.digest
	outdated, err := p.findOutdated(ctx)
	if err != nil {
		return failed(report, err)
	}
	if len(outdated) == 0 {
		return p.run(ctx)
	}
	first := outdated[0]
	report.State, report.Outdated = bundle.StateApplying, outdated
	report.Message = fmt.Sprintf("Helm release %s/%s: waiting for the hub to render it as revision %d, as the release records demand",
		first.Namespace, first.Name, first.Revision)
	return report, nil
}

// findOutdated returns the releases whose templates have read another revision or operation than the one that comes
// after the release records. Nothing may have been written for the bundle before: the hub may render the revision again
// that is deployed now, as after the loss of its ConfigurationGroups, and that must not be a new revision.
func (p *applyRun) findOutdated(ctx context.Context) ([]bundle.OutdatedRelease, error) {
	if !p.bundle.RendersAgain || p.bundle.KeepObjects {
		return nil, nil // with KeepObjects the hub was restored from a backup, and its older version is deployed as it is
	}
	var all []bundle.OutdatedRelease
	for _, item := range p.bundle.Items {
		if item.Release == nil || item.Release.Inputs == "" {
			continue
		}
		begun, err := p.hasBegun(item)
		if err != nil {
			return nil, err
		}
		if begun {
			continue
		}
		outdated, ok, err := p.compareRendering(ctx, item)
		if err != nil {
			return nil, err
		}
		if !ok {
			all = append(all, outdated)
		}
	}
	return all, nil
}

// hasBegun returns whether the revision of an item has begun before, as the inventory says. Then the records change
// nothing: a later revision of another client of Helm is drift.
func (p *applyRun) hasBegun(item bundle.Item) (bool, error) {
	s := p.prior.FindRelease(releaseKey(item))
	if s == nil || s.Stage == inventory.StageBegin {
		return false, nil
	}
	digest, err := item.RevisionDigest()
	return s.Digest == digest, err
}

// compareRendering compares the rendering of an item with the release records. ok is true if the templates have read
// the revision and the operation that come next, or if the records were deleted.
func (p *applyRun) compareRendering(ctx context.Context, item bundle.Item) (next bundle.OutdatedRelease, ok bool, err error) {
	s := inventory.ReleaseState{Namespace: item.Release.Namespace, Name: item.Release.Name}
	op := p.newReleaseOp(&s, nil)
	entries, err := op.records().List(ctx, s.Key())
	if err != nil {
		return bundle.OutdatedRelease{}, false, err
	}
	if prior := p.prior.FindRelease(s.Key()); len(entries) == 0 && prior != nil && prior.Revision > 0 {
		return bundle.OutdatedRelease{}, true, nil
	}
	rendering := release.NextRendering(entries, item.Release.Inputs, op.isFromBundle)
	next = bundle.OutdatedRelease{
		Namespace: s.Namespace, Name: s.Name, Revision: rendering.Revision, IsUpgrade: rendering.IsUpgrade,
	}
	return next, next.Revision == item.Release.Revision && next.IsUpgrade == item.Release.IsUpgrade, nil
}
