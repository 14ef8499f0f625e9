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

// fail ends the operation of a release as failed. With the option atomic it begins the rollback of an upgrade, or the
// uninstallation of an installation.
func (d *releaseDeployment) fail(ctx context.Context, failure *releaseError) error {
	s := d.op.state
	now := d.engine.now()
	if s.Operation == inventory.Uninstalling {
		// The uninstallation of a failed installation has failed: the next attempt is a new revision.
		enterStage(s, inventory.StageFailed, now)
		s.Message += "; uninstalling it failed: " + failure.text
		return nil
	}
	if err := d.putReleaseRecord(ctx, common.StatusFailed, failure.text); err != nil {
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
	logRelease(ctx, "Helm release failed", s)
	switch {
	case s.Options.Atomic && s.Operation == inventory.Upgrading:
		beginOperation(s, inventory.RollingBack, now)
		s.Revision++
		return d.endFailed(d.loadFormer(ctx), "it is not rolled back")
	case s.Options.Atomic:
		beginOperation(s, inventory.Uninstalling, now)
		return nil
	case s.Options.CleanupOnFail && s.Operation == inventory.Upgrading:
		if err := d.cleanUpCreated(ctx); err != nil {
			return d.endFailed(err, "the objects that it created are not deleted")
		}
	}
	enterStage(s, inventory.StageFailed, now)
	return nil
}

// endFailed ends an operation as failed if err is a releaseError, and returns any other error. The message of the
// release gets the given prefix and the reason.
func (d *releaseDeployment) endFailed(err error, prefix string) error {
	failure, ok := errors.AsType[*releaseError](err)
	if !ok {
		return err
	}
	d.op.state.Message += fmt.Sprintf("; %s: %s", prefix, failure.text)
	enterStage(d.op.state, inventory.StageFailed, d.engine.now())
	return nil
}

// reportFailure reports a failed release before its next attempt. It corrects drift of the applied objects, unless they
// were rolled back or uninstalled.
func (d *releaseDeployment) reportFailure(ctx context.Context) (proceed bool, err error) {
	s := d.op.state
	if s.ObjectsApplied && !d.allApplied {
		if _, err := d.applyRanks(ctx, d.decisions); err != nil {
			return false, err
		}
	} else {
		d.skipUnapplied()
	}
	d.failures = append(d.failures, &releaseFailure{key: s.Key(), message: s.Message})
	return d.bundle.Options.ContinueOnError, nil
}

// cleanUpCreated deletes the objects that a failed upgrade created.
func (d *releaseDeployment) cleanUpCreated(ctx context.Context) error {
	s := d.op.state
	former, ok, err := d.op.readReleaseRecord(ctx, s.PreviousRevision)
	if err != nil || !ok {
		return err
	}
	defer former.Close()
	if !release.HasManifest(former.Release) {
		return nil
	}
	item, err := former.Item(ctx, s.Options)
	if err != nil {
		return d.op.asMemoryFailure(err, s.PreviousRevision)
	}
	keep := map[kube.Ref]bool{}
	for _, obj := range item.Objects {
		ref := kube.RefOf(obj)
		keep[ref.Key()] = true
		// An object without a namespace is in the namespace of the release. For a cluster-scoped object this key matches
		// no entry.
		ref.Namespace = s.Namespace
		keep[ref.Key()] = true
	}
	s.ObjectsApplied = false
	return d.pruneGroups(ctx, toPrune(entriesOfRelease(d.next, s.Key()), keep))
}

// releaseFailure is the error of a release that is not deployed.
type releaseFailure struct {
	key     release.Key
	message string
}

// Error names the release and the reason.
func (e *releaseFailure) Error() string { return fmt.Sprintf("helm release %s: %s", e.key, e.message) }
