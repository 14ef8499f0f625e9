package engine

import (
	"context"
	"fmt"
	"slices"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/release"
)

// loadFormer replaces the item and the hooks of the operation by those in the record of the previous revision.
func (d *releaseDeployment) loadFormer(ctx context.Context) error {
	record, ok, err := d.op.readReleaseRecord(ctx, d.op.state.PreviousRevision)
	if err != nil {
		return err
	}
	d.op.useRecord(record)
	if !ok || !release.HasManifest(record.Release) {
		return &releaseError{text: fmt.Sprintf("revision %d is not recorded any more", d.op.state.PreviousRevision)}
	}
	if d.item, err = record.Item(ctx, d.op.state.Options); err != nil {
		return d.op.asMemoryFailure(err, d.op.state.PreviousRevision)
	}
	d.op.hooks, d.op.releaseRecord = release.ItemHooks(d.item), nil
	return nil
}

// applyFormer applies the manifest of the former revision, and deletes the objects that only the failed revision has.
// It uses a second applyRun, whose bundle has the former manifest, and which shares the inventory of this run.
func (d *releaseDeployment) applyFormer(ctx context.Context) (bool, error) {
	s := d.op.state
	former := bundle.Bundle{ID: d.bundle.ID, Owner: d.bundle.Owner, Options: d.bundle.Options, Items: []bundle.Item{d.item}}
	rollback := &applyRun{
		engine: d.engine, bundle: former, digest: d.digest, trigger: triggerDelivery,
		prior: d.next, defined: d.defined, next: d.next, saved: d.saved, unserved: d.unserved,
	}
	if err := rollback.plan(); err != nil {
		return false, err
	}
	decisions, err := rollback.readAndDecide(ctx)
	if err != nil {
		return false, err
	}
	proceed, err := rollback.applyRanks(ctx, decisions)
	d.saved, d.changes, d.unserved = rollback.saved, append(d.changes, rollback.changes...), rollback.unserved
	if err != nil {
		return false, err
	}
	if slices.ContainsFunc(rollback.failures, isUnanswered) {
		return false, rollback.failures
	}
	if !proceed || len(rollback.failures) > 0 {
		// With ContinueOnError the other objects are rolled back, but the release record must not be deployed.
		return false, &releaseError{text: rollback.failures.Error()}
	}
	if done, err := d.op.removeObjects(ctx, rollback.desired, entriesOfRelease(d.next, s.Key())); err != nil || !done {
		return false, err
	}
	enterStage(s, inventory.StageWait, d.engine.now())
	return true, nil
}
