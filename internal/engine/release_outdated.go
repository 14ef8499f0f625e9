package engine

import (
	"context"
	"fmt"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/release"
)

// findOutdated returns the releases that the hub must render again: it rendered an installation of revision 1, since it
// cannot read the release records of the cluster. The next rendering has a higher revision or is an upgrade, and is
// deployed in any case.
//
// It must be called before the run writes anything: the hub may render the same release again that is deployed now, as
// after the loss of its ConfigurationGroups, and that must not be a new revision.
func (p *applyRun) findOutdated(ctx context.Context) ([]bundle.OutdatedRelease, error) {
	if !p.bundle.RendersAgain || p.bundle.KeepObjects {
		return nil, nil // an older version from a backup is deployed as it is
	}
	var all []bundle.OutdatedRelease
	for _, item := range p.bundle.Items {
		if !isRenderedAsFirst(item.Release) {
			continue
		}
		begun, err := p.hasBegun(item)
		if err != nil {
			return nil, err
		}
		if begun {
			continue
		}
		s := inventory.ReleaseState{Namespace: item.Release.Namespace, Name: item.Release.Name}
		op := p.newReleaseOp(&s, nil)
		entries, err := op.records().List(ctx, s.Key())
		if err != nil {
			return nil, err
		}
		if next := release.NextRendering(entries, item.Release.Inputs, op.isFromBundle); next.Revision > 1 || next.IsUpgrade {
			all = append(all, bundle.OutdatedRelease{
				Namespace: s.Namespace, Name: s.Name, Revision: next.Revision, IsUpgrade: next.IsUpgrade,
			})
		}
	}
	return all, nil
}

// isRenderedAsFirst returns whether the templates of a release have read that it is an installation of revision 1.
func isRenderedAsFirst(r *bundle.Release) bool {
	return r != nil && r.Inputs != "" && r.Revision == 1 && !r.IsUpgrade
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

// outdatedMessage is the message of a run that changes nothing because of an outdated release.
func outdatedMessage(r bundle.OutdatedRelease) string {
	return fmt.Sprintf("Helm release %s/%s exists on the cluster: waiting for the hub to render revision %d",
		r.Namespace, r.Name, r.Revision)
}
