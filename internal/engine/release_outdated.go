package engine

import (
	"context"
	"fmt"
	"slices"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/release"
)

// CompareRenderings compares b with the release records before it is delivered, and changes nothing. If the report has
// Outdated releases, the caller must report it and must not call Converge: the hub may render the revision again that
// is deployed now, as after the loss of its ConfigurationGroups, and that must not become a new revision. Converge
// compares each release again before its revision begins, since other clients of Helm may work until then.
func (e *Engine) CompareRenderings(ctx context.Context, b bundle.Bundle) (bundle.Report, error) {
	if !slices.ContainsFunc(b.Items, func(item bundle.Item) bool { return item.Release != nil && item.Release.IsUnconfirmed }) {
		return bundle.Report{ID: b.ID}, nil
	}
	p, release, err := e.newDelivery(ctx, b)
	if err != nil {
		return failed(bundle.Report{ID: b.ID, Digest: p.digest}, err)
	}
	defer release()
	if err := p.load(ctx); err != nil {
		return failed(bundle.Report{ID: b.ID, Digest: p.digest}, err)
	}
	report := p.prior.Report()
	report.Digest, report.Outdated = p.digest, nil
	outdated, err := p.findOutdated(ctx)
	if err != nil {
		return failed(report, err)
	}
	for _, next := range outdated {
		if next.Revision > 0 {
			report.State, report.Message, report.Outdated = bundle.StateApplying, outdatedMessage(next), outdated
			break
		}
	}
	return report, nil
}

// findOutdated returns the Outdated releases of the report if the hub must render one of them again.
func (p *applyRun) findOutdated(ctx context.Context) ([]bundle.OutdatedRelease, error) {
	var all []bundle.OutdatedRelease
	for _, item := range p.bundle.Items {
		if item.Release == nil || item.Release.Inputs == "" {
			continue
		}
		if begun, err := p.hasBegun(item); err != nil {
			return nil, err
		} else if begun {
			continue
		}
		next := bundle.OutdatedRelease{Namespace: item.Release.Namespace, Name: item.Release.Name}
		if item.Release.IsUnconfirmed && !p.bundle.KeepObjects {
			s := inventory.ReleaseState{Namespace: next.Namespace, Name: next.Name}
			op := p.newReleaseOp(&s, nil)
			entries, err := op.records().List(ctx, s.Key())
			if err != nil {
				return nil, err
			}
			if len(entries) == 0 || !op.waitForHelmClient(entries[len(entries)-1]) {
				next.Revision, next.IsUpgrade = p.compareRendering(op, item, entries)
			}
		}
		all = append(all, next)
	}
	return all, nil
}

// hasBegun returns whether the revision of an item has begun before, as the inventory says. Then the records change
// nothing: a later revision of another client of Helm is drift.
func (p *applyRun) hasBegun(item bundle.Item) (bool, error) {
	s := p.prior.FindRelease(releaseKey(item))
	if s == nil || !s.HasBegun() {
		return false, nil
	}
	digest, err := item.RevisionDigest()
	return s.Digest == digest, err
}

// compareRendering compares the rendering of an item with the release records. It returns the revision and the
// operation that come next, or 0 if the templates have read them, or if the records were deleted.
func (p *applyRun) compareRendering(op *releaseOp, item bundle.Item, entries []release.Entry) (revision int, isUpgrade bool) {
	if prior := p.prior.FindRelease(releaseKey(item)); len(entries) == 0 && prior != nil && prior.Revision > 0 {
		return 0, false
	}
	next := release.NextRendering(entries, item.Release.Inputs, op.isFromBundle)
	if next.Revision == item.Release.Revision && next.IsUpgrade == item.Release.IsUpgrade {
		return 0, false
	}
	return next.Revision, next.IsUpgrade
}

// waitForRendering sets a wait and returns true if the hub must render the release again. After the comparison has
// shown that, only another bundle ends the wait: the hub may rely on it that the revision does not begin.
func (d *releaseDeployment) waitForRendering(entries []release.Entry) bool {
	s := d.op.state
	if s.IsUnconfirmed {
		s.NextRevision, s.NextIsUpgrade = d.compareRendering(d.op, d.item, entries)
		s.IsUnconfirmed = false
	}
	if s.NextRevision == 0 {
		return false
	}
	d.op.wait(renderingMessage(s.NextRevision), func(context.Context) bool { return false })
	return true
}

func outdatedMessage(r bundle.OutdatedRelease) string {
	return fmt.Sprintf("Helm release %s/%s: %s", r.Namespace, r.Name, renderingMessage(r.Revision))
}

func renderingMessage(revision int) string {
	return fmt.Sprintf("waiting for the hub to render it as revision %d, as the release records demand", revision)
}
