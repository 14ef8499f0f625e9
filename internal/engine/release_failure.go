package engine

import (
	"context"
	"errors"
	"fmt"

	"helm.sh/helm/v4/pkg/release/common"

	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/release"
)

// fail ends the operation of a release. With the option atomic it begins the one that undoes it.
func (d *releaseDeployment) fail(ctx context.Context, failure *releaseError) error {
	s := d.op.state
	now := d.engine.now()
	if s.Operation == inventory.Uninstalling {
		// What undoes a failed installation failed itself: the next attempt begins with a revision of its own.
		enterStage(s, inventory.StageFailed, now)
		s.Message += "; uninstalling it failed: " + failure.text
		return nil
	}
	if err := d.putRecord(ctx, common.StatusFailed, failure.text); err != nil {
		refused, ok := errors.AsType[*releaseError](err)
		if !ok {
			return err
		}
		failure = &releaseError{text: failure.text + "; " + refused.text}
	}
	if s.Operation == inventory.RollingBack {
		enterStage(s, inventory.StageFailed, now)
		s.Message += "; the rollback failed: " + failure.text
		return nil
	}
	s.Failures++
	s.Message = fmt.Sprintf("%s of revision %d failed: %s", s.Operation, s.Revision, failure.text)
	switch {
	case s.Options.Atomic && s.Operation == inventory.Upgrading:
		beginOperation(s, inventory.RollingBack, now)
		s.Revision++
		return d.endFailed(d.loadFormer(ctx), "it is not rolled back")
	case s.Options.Atomic:
		beginOperation(s, inventory.Uninstalling, now)
		return nil
	case s.Options.CleanupOnFail && s.Operation == inventory.Upgrading:
		if err := d.cleanUp(ctx); err != nil {
			return err
		}
	}
	enterStage(s, inventory.StageFailed, now)
	return nil
}

// endFailed ends an operation as failed if err is a releaseError, and returns any other error.
func (d *releaseDeployment) endFailed(err error, what string) error {
	failure, ok := errors.AsType[*releaseError](err)
	if !ok {
		return err
	}
	d.op.state.Message += fmt.Sprintf("; %s: %s", what, failure.text)
	enterStage(d.op.state, inventory.StageFailed, d.engine.now())
	return nil
}

// reportFailure reports a release that failed and is not tried again yet. What it has deployed is kept as it is, unless that was undone.
func (d *releaseDeployment) reportFailure(ctx context.Context) (goOn bool, err error) {
	s := d.op.state
	if s.ObjectsApplied && !d.written {
		if _, err := d.writeRanks(ctx, d.verdicts); err != nil {
			return false, err
		}
	} else {
		d.skip()
	}
	d.failures = append(d.failures, &releaseFailure{key: s.Key(), message: s.Message})
	return d.bundle.Options.ContinueOnError, nil
}

// cleanUp deletes the objects that a failed upgrade has created.
func (d *releaseDeployment) cleanUp(ctx context.Context) error {
	s := d.op.state
	former, ok, err := d.op.records().Get(ctx, s.Key(), s.Former)
	if err != nil || !ok || !release.HasManifest(former) {
		return err
	}
	item, err := release.Item(former, s.Options)
	if err != nil {
		return err
	}
	keep := map[kube.Ref]bool{}
	for _, obj := range item.Objects {
		ref := kube.RefOf(obj)
		keep[ref.Key()] = true
		ref.Namespace = s.Namespace // of an object that names none; one that is not namespaced is not mistaken for another one
		keep[ref.Key()] = true
	}
	s.ObjectsApplied = false
	return d.pruneGroups(ctx, toPrune(entriesOfRelease(d.next, s.Key()), keep))
}

// releaseFailure is why a release of a bundle is not deployed.
type releaseFailure struct {
	key     release.Key
	message string
}

// Error names the release and the reason.
func (e *releaseFailure) Error() string { return fmt.Sprintf("helm release %s: %s", e.key, e.message) }
