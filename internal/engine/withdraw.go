package engine

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
)

// Withdraw removes the objects of a bundle from the cluster: the objects in its record, or those with its ownership
// labels if the record is lost. It removes the highest rank first, and the next rank after all objects of the former
// one no longer exist. So a controller that cleans up after an object is not deleted before the object. done is false
// while a deleted object still exists. Then Run continues the withdrawal, and calls Options.OnReport when it is
// complete or begins to fail; without Run the caller must call again. An error names the objects that could not be
// removed.
func (e *Engine) Withdraw(ctx context.Context, w bundle.Withdrawal) (done bool, err error) {
	unlock, err := e.bundleLocks.acquire(ctx, w.ID)
	if err != nil {
		return false, err
	}
	defer unlock()
	e.failedRuns.forget(w.ID)
	rec, err := e.loadOrRebuild(ctx, w.ID)
	if err != nil {
		return false, fmt.Errorf("withdraw %s: %w", w.ID, err)
	}
	if rec.Options.ServiceAccount != "" {
		w.ServiceAccount = rec.Options.ServiceAccount
	}
	return e.withdraw(ctx, rec, w)
}

// resumeWithdrawal continues the withdrawal of id. done is also true if no withdrawal is in progress.
func (e *Engine) resumeWithdrawal(ctx context.Context, id bundle.ID) (done bool, err error) {
	unlock, err := e.bundleLocks.acquire(ctx, id)
	if err != nil {
		return false, err
	}
	defer unlock()
	rec, err := e.store.Load(ctx, id)
	if errors.Is(err, inventory.ErrIncomplete) {
		return true, nil // the caller of the Engine calls Withdraw, which rebuilds the inventory
	}
	if err != nil {
		return false, fmt.Errorf("withdraw %s: %w", id, err)
	}
	if rec.State != bundle.StateRemoving {
		return true, nil
	}
	return e.withdraw(ctx, rec, bundle.Withdrawal{ID: id, Orphan: rec.Orphan, ServiceAccount: rec.Options.ServiceAccount})
}

// withdraw removes the objects of a record. The caller must hold the lock of its ID.
func (e *Engine) withdraw(ctx context.Context, rec *inventory.Record, w bundle.Withdrawal) (done bool, err error) {
	if !rec.Exists() && len(rec.Entries) == 0 && len(rec.Releases) == 0 {
		return true, nil
	}
	unlock, err := e.objectLocks.acquire(ctx, slices.Collect(maps.Keys(rec.Entries))...)
	if err != nil {
		return false, fmt.Errorf("withdraw %s: %w", w.ID, err)
	}
	defer unlock()
	if rec, err = e.beginRemoval(ctx, rec, w); err != nil {
		return false, fmt.Errorf("withdraw %s: %w", w.ID, err)
	}
	removed := len(rec.Entries)
	if rec, done, err = e.removeReleases(ctx, rec); err == nil && done {
		done, err = e.removeAll(ctx, rec)
	}
	if err != nil {
		return false, fmt.Errorf("withdraw %s: %w", w.ID, err)
	}
	if !done {
		return false, nil
	}
	if err := e.store.Delete(ctx, rec); err != nil {
		return false, fmt.Errorf("withdraw %s: %w", w.ID, err)
	}
	e.observed.forget(w.ID)
	log.FromContext(ctx).Info("withdrew bundle", logkeys.Bundle, w.ID.String(), "objects", removed, "orphaned", rec.Orphan)
	return true, nil
}

// loadOrRebuild returns the record of id. If the record is lost, it is rebuilt from the objects on the cluster.
func (e *Engine) loadOrRebuild(ctx context.Context, id bundle.ID) (*inventory.Record, error) {
	rec, err := e.store.Load(ctx, id)
	if errors.Is(err, inventory.ErrIncomplete) || (err == nil && !rec.Exists()) {
		return e.rebuildInventory(ctx, rec)
	}
	return rec, err
}

// beginRemoval saves that the bundle of a record is being withdrawn, whether its objects are orphaned, and as which
// ServiceAccount, so that resumeWithdrawal continues in the same way. From then on drift is not corrected.
func (e *Engine) beginRemoval(ctx context.Context, rec *inventory.Record, w bundle.Withdrawal) (*inventory.Record, error) {
	if rec.State == bundle.StateRemoving && rec.Orphan == w.Orphan && rec.Options.ServiceAccount == w.ServiceAccount {
		return rec, nil
	}
	next := rec.Edit()
	next.State, next.Message, next.Orphan, next.Options.ServiceAccount = bundle.StateRemoving, "", w.Orphan, w.ServiceAccount
	for i := range next.Releases {
		if s := &next.Releases[i]; s.Operation != inventory.Uninstalling && !w.Orphan {
			beginUninstall(s, w.ServiceAccount, e.now())
		}
	}
	return e.store.Save(ctx, rec, next, nil)
}

// removeAll removes all objects of a record, rank by rank. done is false while a deleted object still exists.
func (e *Engine) removeAll(ctx context.Context, rec *inventory.Record) (done bool, err error) {
	groups := toPrune(rec.Entries, nil)
	var instead map[pruneAction]pruneAction
	if rec.Orphan {
		instead = map[pruneAction]pruneAction{pruneDelete: pruneOrphan, pruneAwait: pruneForget}
	} else if groups, err = e.orderRoles(ctx, groups); err != nil {
		return false, err
	}
	for _, entries := range groups {
		removals, err := e.removeRank(ctx, rec.ID, entries, removeOptions{instead: instead, account: rec.Options.ServiceAccount})
		if err != nil {
			return false, err
		}
		if err := removalErrors(removals); err != nil {
			return false, err
		}
		left, err := e.findRemaining(ctx, removals)
		if err != nil || len(left) > 0 {
			return false, err
		}
	}
	return true, nil
}

func removalErrors(removals []removal) error {
	var failures applyErrors
	for _, r := range removals {
		if r.err != nil {
			failures = append(failures, &objectError{ref: r.Ref, err: r.err})
		}
	}
	if len(failures) == 0 {
		return nil
	}
	return failures
}

// findRemaining reads the deleted objects again, and returns those that still exist, for example because of a
// finalizer. A ClusterRole that the aggregation controller has created again counts as deleted, since the last group of
// orderRoles removes it. It counts as existing if the deleted role was such a role, too.
func (e *Engine) findRemaining(ctx context.Context, removals []removal) (map[kube.Ref]bool, error) {
	var locations []objectLocation
	before := map[kube.Ref]*live{}
	for _, r := range removals {
		if r.action == pruneDelete || r.action == pruneAwait {
			locations = append(locations, r.location)
			before[r.location.key] = r.existing
		}
	}
	if len(locations) == 0 {
		return map[kube.Ref]bool{}, nil
	}
	found, err := e.member.readMetadata(ctx, locations)
	if err != nil {
		return nil, errors.Join(errors.New("read whether the deleted objects still exist"), err)
	}
	left := map[kube.Ref]bool{}
	for key, existing := range found {
		if old := before[key]; existing.UID == old.UID || (old.role == roleRecreated && existing.role == roleRecreated) {
			left[key] = true
		}
	}
	return left, nil
}
