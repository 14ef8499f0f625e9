package engine

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
)

// deployed returns the description of the bundle of a record.
func (e *Engine) deployed(rec *inventory.Record) bundle.Deployed {
	inputs := rec.Inputs
	if rec.Suspended || e.lostBundles.has(rec.ID) {
		inputs = "" // so that the hub delivers the bundle again, which calls Converge
	}
	return bundle.Deployed{
		ID: rec.ID, Owner: rec.Owner, Hub: cmp.Or(rec.Hub, e.ownerScope.Hub), Removing: rec.State == bundle.StateRemoving, Orphan: rec.Orphan,
		CorrectDrift: rec.Options.CorrectDrift, Report: e.reportOf(rec), Releases: rec.DeployedReleases(), Inputs: inputs,
	}
}

// FindDeployed returns the Deployed of the record of id; ok is false if there is none. It sends no request after Run or
// ListPartition has read the records.
func (e *Engine) FindDeployed(ctx context.Context, id bundle.ID) (d bundle.Deployed, ok bool, err error) {
	if rec := e.store.Cached(id); rec != nil {
		return e.deployed(rec), true, nil
	}
	if e.store.IsPartitionListed(id) {
		return bundle.Deployed{}, false, nil
	}
	// With inventory.ErrIncomplete the record exists and is empty.
	rec, err := e.store.Load(ctx, id)
	if err != nil && !errors.Is(err, inventory.ErrIncomplete) {
		return bundle.Deployed{}, false, err
	}
	return e.deployed(rec), rec.Exists(), nil
}

// ListCachedDeployed lists the cached records, sorted by ID, without a request; ok is false before Run has listed them.
func (e *Engine) ListCachedDeployed() (all []bundle.Deployed, ok bool) {
	if !e.store.IsListed() {
		return nil, false
	}
	for _, rec := range e.store.ListCached() {
		all = append(all, e.deployed(rec))
	}
	slices.SortFunc(all, func(a, b bundle.Deployed) int { return strings.Compare(a.ID.String(), b.ID.String()) })
	return all, true
}

// ListDeployed lists the bundles of the records on the cluster, sorted by ID. It costs one list of metadata, and one
// read of each record that another process has changed.
func (e *Engine) ListDeployed(ctx context.Context) ([]bundle.Deployed, error) {
	records, err := e.store.ListHeads(ctx)
	if err != nil {
		return nil, err
	}
	var all []bundle.Deployed
	for _, rec := range records {
		all = append(all, e.deployed(rec))
	}
	return all, nil
}
