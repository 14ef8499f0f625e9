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
// Outdated releases, the caller must report it and must not call Converge: the hub then renders them for their next
// revisions. A hub that has lost its ConfigurationGroups thus renders a deployed revision as before, and no new
// revision begins. Converge compares each release again before its revision begins, since other clients of Helm may
// work until then.
func (e *Engine) CompareRenderings(ctx context.Context, b bundle.Bundle) (bundle.Report, error) {
	if !slices.ContainsFunc(b.Items, func(item bundle.Item) bool { return item.Release != nil && item.Release.IsUnconfirmed }) {
		return bundle.Report{ID: b.ID}, nil
	}
	p, unlock, err := e.newRun(ctx, b)
	if err != nil {
		return failedReport(bundle.Report{ID: b.ID, Digest: p.digest}, err)
	}
	defer unlock()
	if err := p.load(ctx); err != nil {
		return failedReport(bundle.Report{ID: b.ID, Digest: p.digest}, err)
	}
	report := p.prior.Report()
	report.Digest, report.Outdated = p.digest, nil
	outdated, err := p.findOutdated(ctx)
	if err != nil {
		return failedReport(report, err)
	}
	for _, next := range outdated {
		if next.Revision > 0 {
			report.State, report.Message, report.Outdated = bundle.StateApplying, outdatedMessage(next), outdated
			break
		}
	}
	return report, nil
}

// findOutdated returns the releases whose templates read the revision, except those whose revision has begun. Revision
// is set for a release that the hub must render again, and 0 for the others.
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
			entries, err := op.releaseRecords().List(ctx, s.Key())
			if err != nil {
				return nil, err
			}
			if len(entries) == 0 || !op.setHelmClientWait(entries[len(entries)-1]) {
				next.Revision, next.IsUpgrade = p.compareRendering(op, item, entries)
			}
		}
		all = append(all, next)
	}
	return all, nil
}

// hasBegun returns whether the inventory shows that the revision of an item has begun. Then its rendering is not
// compared any more: a later revision of another client of Helm is drift.
func (p *applyRun) hasBegun(item bundle.Item) (bool, error) {
	s := p.prior.FindRelease(releaseKey(item))
	if s == nil || !s.HasBegun() {
		return false, nil
	}
	digest, err := item.RevisionDigest()
	return s.Digest == digest, err
}

// compareRendering returns the next revision and operation of a release if its item was rendered for others. It returns
// 0 if the rendering is right, and if the records of a deployed release were deleted.
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

// setRenderingWait sets a wait and returns true if the hub must render the release again. Only another bundle ends this
// wait. The release is not compared again, so that the hub can rely on the report.
func (d *releaseDeployment) setRenderingWait(entries []release.Entry) bool {
	s := d.op.state
	if s.IsUnconfirmed {
		s.NextRevision, s.NextIsUpgrade = d.compareRendering(d.op, d.item, entries)
		s.IsUnconfirmed = false
	}
	if s.NextRevision == 0 {
		return false
	}
	d.op.setWait(renderingMessage(s.NextRevision), func(context.Context) bool { return false })
	return true
}

func outdatedMessage(r bundle.OutdatedRelease) string {
	return fmt.Sprintf("Helm release %s/%s: %s", r.Namespace, r.Name, renderingMessage(r.Revision))
}

func renderingMessage(revision int) string {
	return fmt.Sprintf("waiting for the hub to render it as revision %d, as the release records demand", revision)
}
