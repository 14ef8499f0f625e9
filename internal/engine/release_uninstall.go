package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"helm.sh/helm/v4/pkg/release/common"
	helm "helm.sh/helm/v4/pkg/release/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/release"
)

// loadRecordedHooks reads the hooks of the operation from the record of its revision. If that is missing, it reads the
// newest record before it, or else the oldest record, as helm uninstall does. Without a record there are no hooks.
func (o *releaseOp) loadRecordedHooks(ctx context.Context, entries []release.Entry) error {
	o.hooks = nil
	for _, entry := range slices.Backward(entries) {
		if entry.Revision > o.state.Revision && entry.Revision != entries[0].Revision {
			continue
		}
		record, ok, err := o.readReleaseRecord(ctx, entry.Revision)
		if err != nil {
			return err
		}
		if ok {
			o.useRecord(record)
			o.hooks, err = record.DecodeHooks(ctx)
			return o.asMemoryFailure(err, entry.Revision)
		}
	}
	return nil
}

// isNeverDeployed returns whether this bundle has neither deployed nor adopted the release: it has no record and no
// objects of the release.
func (o *releaseOp) isNeverDeployed(entries []release.Entry) bool {
	for _, entry := range entriesOfRelease(o.inventory, o.state.Key()) {
		if entry.UID != "" {
			return false
		}
	}
	return o.state.HelmSecretUID == "" && !slices.ContainsFunc(entries, func(entry release.Entry) bool { return o.isFromBundle(entry.Secret) })
}

// uninstall runs the pre-delete hooks, deletes the objects that are not in keep, runs the post-delete hooks and deletes
// the release records. If another bundle has taken over the release, or this bundle has never deployed it, it only
// deletes the objects. done is false while the release waits.
func (o *releaseOp) uninstall(ctx context.Context, keep map[kube.Ref]bool) (done bool, err error) {
	s := o.state
	ctx = withReadingAccount(ctx, o.account)
	recordsCtx, entries, err := o.listToUninstall(ctx)
	if err != nil {
		return false, err
	}
	if err := o.deleteAbandoned(ctx); err != nil {
		return false, err
	}
	removesObjectsOnly := len(entries) > 0 && (o.isFromOtherBundle(entries[len(entries)-1]) || o.isNeverDeployed(entries))
	o.hooks = nil
	if !removesObjectsOnly && !s.Options.DisableUninstallHooks {
		if err := o.loadRecordedHooks(recordsCtx, entries); err != nil {
			return false, err
		}
	}
	steps := []struct {
		stage inventory.ReleaseStage
		run   func() (bool, error)
	}{
		{inventory.StagePreHooks, func() (bool, error) { return o.runHooks(ctx, helm.HookPreDelete) }},
		{inventory.StageObjects, func() (bool, error) { return o.removeObjects(ctx, keep, entriesOfRelease(o.inventory, s.Key())) }},
		{inventory.StagePostHooks, func() (bool, error) { return o.runPostDelete(ctx) }},
	}
	for i, step := range steps {
		if s.Stage != step.stage {
			continue
		}
		if done, err := step.run(); err != nil || !done {
			return false, err
		}
		next := inventory.StageHelmRecord
		if i+1 < len(steps) {
			next = steps[i+1].stage
		}
		enterStage(s, next, o.engine.now())
	}
	if removesObjectsOnly {
		return true, nil
	}
	o.hooks = nil
	o.close() // deleteReleaseRecords needs memory
	return true, o.deleteReleaseRecords(recordsCtx, entries)
}

// listToUninstall lists the release records, and returns the context for further requests about them. If the
// ServiceAccount has lost its rights, the engine itself reads and deletes the records that it has written for this
// bundle.
func (o *releaseOp) listToUninstall(ctx context.Context) (context.Context, []release.Entry, error) {
	entries, err := o.releaseRecords().List(ctx, o.state.Key())
	if o.account == "" || !apierrors.IsForbidden(err) {
		return ctx, entries, err
	}
	ctx = withAccount(ctx, "")
	entries, err = o.releaseRecords().List(ctx, o.state.Key())
	return ctx, slices.DeleteFunc(entries, func(entry release.Entry) bool { return !o.isFromBundle(entry.Secret) }), err
}

// runPostDelete runs the post-delete hooks. As in Helm, a failure is only logged, since the objects are deleted
// already.
func (o *releaseOp) runPostDelete(ctx context.Context) (done bool, err error) {
	done, err = o.runHooks(ctx, helm.HookPostDelete)
	if failure, ok := errors.AsType[*releaseError](err); ok {
		log.FromContext(ctx).Info("a hook failed after the release was uninstalled",
			logkeys.Bundle, o.id.String(), "release", o.state.Key().String(), logkeys.Reason, failure.text)
		return true, nil
	}
	return done, err
}

// deleteReleaseRecords deletes the release records. With the option keepHistory it sets the status of the last one to
// uninstalled instead.
func (o *releaseOp) deleteReleaseRecords(ctx context.Context, entries []release.Entry) error {
	records := o.releaseRecords()
	if !o.state.Options.KeepHistory {
		err := records.Delete(ctx, o.state.Key(), entries)
		if err == nil && len(entries) == release.MaxEntries {
			return fmt.Errorf("%d release records are deleted; the uninstallation is repeated, since there may be more", release.MaxEntries)
		}
		return err
	}
	if len(entries) == 0 {
		return nil
	}
	last := entries[len(entries)-1]
	if err := records.Supersede(ctx, entries, last.Revision); err != nil {
		return err
	}
	return records.SetStatus(ctx, last, common.StatusUninstalled, "Uninstallation complete")
}

// removeObjects deletes the objects of the entries that are not in keep, in reverse order of ranks. It deletes a rank
// when all objects of the rank before it no longer exist. done is false while it waits for that.
func (o *releaseOp) removeObjects(ctx context.Context, keep map[kube.Ref]bool, entries map[kube.Ref]inventory.Entry) (done bool, err error) {
	groups, err := o.engine.orderRoles(ctx, toPrune(entries, keep))
	if err != nil {
		return false, err
	}
	propagation := propagationOf(o.state.Options.DeletionPropagation)
	for _, group := range groups {
		removals, err := o.engine.removeRank(ctx, o.id, group, removeOptions{propagation: propagation, account: o.account})
		if err != nil {
			return false, err
		}
		if err := removalErrors(removals); err != nil {
			return false, err
		}
		left, err := o.engine.findRemaining(ctx, removals)
		if err != nil {
			return false, err
		}
		if len(left) > 0 {
			o.setDeletionWait(left)
			return false, nil
		}
		for _, r := range removals {
			delete(o.inventory.Entries, r.Ref.Key())
		}
	}
	return true, nil
}

// setDeletionWait sets the wait until the first of the objects no longer exists, or another client has created it
// again.
func (o *releaseOp) setDeletionWait(left map[kube.Ref]bool) {
	refs := make([]kube.Ref, 0, len(left))
	for key := range left {
		refs = append(refs, o.inventory.Entries[key].Ref)
	}
	slices.SortFunc(refs, kube.CompareRefs)
	engine := o.engine
	o.setWait(fmt.Sprintf("waiting for the deletion of %s", refs[0]), func(ctx context.Context) bool {
		obj, ok, err := engine.member.readObject(ctx, refs[0])
		return err == nil && (!ok || obj.GetDeletionTimestamp() == nil)
	})
}

// propagationOf returns the deletion propagation for the option deletionPropagation.
func propagationOf(option string) metav1.DeletionPropagation {
	switch option {
	case "orphan":
		return metav1.DeletePropagationOrphan
	case "foreground":
		return metav1.DeletePropagationForeground
	}
	return metav1.DeletePropagationBackground
}

// uninstallDropped uninstalls the releases that the bundle no longer has, last one first. done is false while a release
// waits or has failed.
func (p *applyRun) uninstallDropped(ctx context.Context) (done bool, err error) {
	for i := len(p.next.Releases) - 1; i >= 0; i-- {
		s := &p.next.Releases[i]
		if s.Operation != inventory.Uninstalling || p.hasItem(s.Key()) {
			continue
		}
		op := p.newReleaseOp(s, nil)
		op.account = cmp.Or(s.UninstallAs, op.account)
		done, err := op.uninstallWithRetry(ctx, p.keep)
		var failure *releaseError
		switch {
		case errors.As(err, &failure):
			p.failures = append(p.failures, &releaseFailure{key: s.Key(), message: failure.text})
			return false, nil
		case err != nil:
			return false, err
		case !done:
			p.waiting = op.waiting
			p.waiting.message = fmt.Sprintf("Helm release %s: %s", s.Key(), p.waiting.message)
			return false, nil
		}
		p.next.DeleteRelease(s.Key())
	}
	return true, nil
}

// uninstallWithRetry uninstalls a release, and closes o. After a failure it begins again when retryAt has passed; until
// then it returns the failure.
func (o *releaseOp) uninstallWithRetry(ctx context.Context, keep map[kube.Ref]bool) (done bool, err error) {
	defer o.close()
	s := o.state
	if s.Stage == inventory.StageFailed {
		if o.engine.now().Before(retryAt(s)) {
			return false, &releaseError{text: s.Message}
		}
		beginOperation(s, inventory.Uninstalling, o.engine.now())
	}
	done, err = o.uninstall(ctx, keep)
	var failure *releaseError
	if errors.As(err, &failure) {
		s.Failures++
		s.Message = "uninstalling failed: " + failure.text
		enterStage(s, inventory.StageFailed, o.engine.now())
		return false, &releaseError{text: s.Message}
	}
	return done, err
}

func (p *applyRun) hasItem(key release.Key) bool {
	for _, item := range p.bundle.Items {
		if item.Release != nil && releaseKey(item) == key {
			return true
		}
	}
	return false
}

// removeReleases uninstalls the releases of an inventory that is being withdrawn. If the objects are orphaned, it only
// removes the ownership labels from the release records.
func (e *Engine) removeReleases(ctx context.Context, rec *inventory.Record) (stored *inventory.Record, done bool, err error) {
	if rec.Orphan {
		e.waits.set(rec.ID, nil)
		return rec, true, e.removeMarksOfReleaseRecords(ctx, rec)
	}
	return e.uninstallReleases(ctx, rec)
}

// uninstallReleases uninstalls all releases of an inventory that is being withdrawn, last one first. It returns the
// stored inventory.
func (e *Engine) uninstallReleases(ctx context.Context, rec *inventory.Record) (stored *inventory.Record, done bool, err error) {
	for len(rec.Releases) > 0 {
		next := rec.Edit()
		saved := rec
		s := &next.Releases[len(next.Releases)-1]
		op := &releaseOp{engine: e, id: rec.ID, account: cmp.Or(s.UninstallAs, rec.Options.ServiceAccount), inventory: next, state: s, save: func(ctx context.Context) (err error) {
			saved, err = e.store.Save(withAccount(ctx, ""), saved, next, nil)
			return err
		}}
		done, err := op.uninstallWithRetry(ctx, nil)
		e.waits.set(rec.ID, op.waiting)
		if done {
			next.DeleteRelease(s.Key())
		}
		var failure *releaseError
		if (err == nil || errors.As(err, &failure)) && !saved.IsUpToDateWith(next) {
			if saveErr := op.save(ctx); saveErr != nil {
				return saved, false, saveErr
			}
		}
		if err != nil || !done {
			return saved, false, err
		}
		rec = saved
	}
	return rec, true, nil
}

// removeMarksOfReleaseRecords removes the ownership labels and annotations from the release records, which are kept.
func (e *Engine) removeMarksOfReleaseRecords(ctx context.Context, rec *inventory.Record) error {
	for i := range rec.Releases {
		op := &releaseOp{engine: e, id: rec.ID, state: &rec.Releases[i]}
		entries, err := op.releaseRecords().List(ctx, op.state.Key())
		if err != nil {
			return err
		}
		for _, entry := range entries {
			existing := liveOf(&metav1.PartialObjectMetadata{ObjectMeta: entry.Secret})
			if existing.OwnerKey() != e.ownerScope.OwnerKey(rec.ID) {
				continue
			}
			location := releaseRecordLocation(&inventory.ReleaseState{Namespace: entry.Namespace, Name: entry.Name, Revision: entry.Revision})
			if err := e.member.removeMarks(ctx, location, existing); err != nil {
				return err
			}
		}
	}
	return nil
}
