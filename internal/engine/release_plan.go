package engine

import (
	"fmt"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/release"
)

func releaseKey(item bundle.Item) release.Key {
	return release.Key{Namespace: item.Release.Namespace, Name: item.Release.Name}
}

// planReleases sets the state of each release in the next inventory: it must be deployed or uninstalled.
func (p *applyRun) planReleases() error {
	if p.only != nil {
		return nil
	}
	wanted := map[release.Key]bool{}
	for _, item := range p.bundle.Items {
		if item.Release == nil {
			continue
		}
		key := releaseKey(item)
		if wanted[key] {
			return &invalidBundleError{fmt.Errorf("helm release %s is listed twice", key)}
		}
		wanted[key] = true
		if err := p.planRelease(item); err != nil {
			return err
		}
	}
	for i := range p.next.Releases {
		s := &p.next.Releases[i]
		if wanted[s.Key()] || s.Operation == inventory.Uninstalling && s.Digest == "" {
			continue // the bundle has it, or its uninstallation has begun
		}
		if p.bundle.KeepObjects || isReleaseKept(p.next, s.Key()) {
			continue // the hub was restored from a backup: the objects are kept, and so is the release
		}
		beginUninstall(s, p.prior.Options.ServiceAccount, p.engine.now())
	}
	return nil
}

// planRelease copies the options of an item to the state of its release. If the bundle is new, it also decides whether
// a new revision must be deployed (the digest of the item differs), and whether begin must compare the rendering with
// the release records first (IsUnconfirmed, see setRenderingWait).
func (p *applyRun) planRelease(item bundle.Item) error {
	key := releaseKey(item)
	s := p.next.FindRelease(key)
	if s == nil {
		p.next.Releases = append(p.next.Releases, inventory.ReleaseState{Namespace: key.Namespace, Name: key.Name})
		s = p.next.FindRelease(key)
	}
	s.Options, s.Sensitive = item.Release.Options, item.Sensitive
	s.Inputs, s.RenderedRevision, s.IsUpgrade = item.Release.Inputs, item.Release.Revision, item.Release.IsUpgrade
	if s.Digest != "" && p.prior.BundleDigest() == p.digest {
		return nil
	}
	digest, err := item.RevisionDigest()
	isBegun := s.Digest == digest && s.HasBegun()
	s.IsUnconfirmed, s.NextRevision, s.NextIsUpgrade = item.Release.IsUnconfirmed && !p.bundle.KeepObjects && !isBegun, 0, false
	if err == nil && s.Digest != digest {
		s.Digest, s.Failures, s.FailuresAtUninstall, s.Message, s.ObjectsApplied = digest, 0, 0, "", false
		enterStage(s, inventory.StageBegin, p.engine.now())
	}
	return err
}
