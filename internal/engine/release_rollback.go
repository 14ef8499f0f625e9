package engine

import (
	"context"
	"fmt"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/release"
)

// loadFormer makes the release that the operation deploys that of the former revision.
func (d *releaseDeployment) loadFormer(ctx context.Context) error {
	record, ok, err := d.op.records().Get(ctx, d.op.state.Key(), d.op.state.Former)
	if err != nil {
		return err
	}
	if !ok || !release.HasManifest(record) {
		return &releaseError{text: fmt.Sprintf("revision %d is not recorded any more", d.op.state.Former)}
	}
	if d.item, err = release.Item(record, d.op.state.Options); err != nil {
		return err
	}
	d.op.hooks = release.ItemHooks(d.item)
	return nil
}

// writeFormer applies the manifest of the former revision, and deletes what the failed one has beside it.
func (d *releaseDeployment) writeFormer(ctx context.Context) (bool, error) {
	s := d.op.state
	former := bundle.Bundle{ID: d.bundle.ID, Owner: d.bundle.Owner, Options: d.bundle.Options, Items: []bundle.Item{d.item}}
	rollback := &pass{engine: d.engine, bundle: former, digest: d.digest, motive: delivered, prior: d.next, defined: d.defined, next: d.next, saved: d.saved}
	if err := rollback.plan(); err != nil {
		return false, err
	}
	verdicts, err := rollback.look(ctx)
	if err != nil {
		return false, err
	}
	goOn, err := rollback.writeRanks(ctx, verdicts)
	d.saved, d.changes, d.unserved = rollback.saved, append(d.changes, rollback.changes...), rollback.unserved
	if err != nil {
		return false, err
	}
	if !goOn {
		return false, &releaseError{text: rollback.failures.Error()}
	}
	if done, err := d.op.removeObjects(ctx, rollback.wanted, entriesOfRelease(d.next, s.Key())); err != nil || !done {
		return false, err
	}
	enterStage(s, inventory.StageWait, d.engine.now())
	return true, nil
}
