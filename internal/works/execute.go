package works

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
)

const (
	// removalRecheck is how soon to look again at objects that were deleted and still exist. News of them usually comes earlier.
	removalRecheck = 2 * time.Second
	// staleDelay is how long to wait for a Work that changed while it was executed.
	staleDelay = 100 * time.Millisecond
)

// Engine makes one cluster equal one bundle. *engine.Engine is the implementation.
type Engine interface {
	// Converge makes the cluster equal b. It returns what it did even when it fails half-way.
	Converge(ctx context.Context, b bundle.Bundle) (bundle.Report, error)
	// Withdraw removes what w.ID put there; done is false while something that was deleted still exists.
	Withdraw(ctx context.Context, w bundle.Withdrawal) (done bool, err error)
	// Suspend leaves what id put there as it is from now on, until it is converged or withdrawn, and returns what became of it so far; there is
	// no State if nothing did.
	Suspend(ctx context.Context, id bundle.ID) (bundle.Report, error)
	// Observe reads how the objects are that were applied for id, and those that were to be.
	Observe(ctx context.Context, id bundle.ID) ([]engine.Observation, error)
}

var _ Engine = (*engine.Engine)(nil)

// Circumstances say how the cluster stands that a Work is for.
type Circumstances struct {
	// Reachable says that something can be done on the cluster now. Until it is, Works are left as they are.
	Reachable bool
	// Leaving says that the cluster is being removed from the fleet: nothing new is applied.
	Leaving bool
	// Orphan leaves the objects of deleted Works on the cluster, without our marks.
	Orphan bool
	// Abandon lets go of deleted Works without touching the cluster, which then needs no Engine.
	Abandon bool
}

// Executor carries out the Works of one cluster.
type Executor struct {
	// Hub reads and writes Works. It needs to patch their status, and their finalizers when they are deleted.
	Hub    client.Client
	Engine Engine
	Clock  clock.PassiveClock
}

// Hold gives a Work the finalizer that lets it be withdrawn before it goes, if it has none, and updates work. It does nothing to a Work that
// is being deleted. The error satisfies apierrors.IsConflict if work is not the newest.
func Hold(ctx context.Context, hub client.Client, work *workv1alpha1.Work) error {
	if !work.DeletionTimestamp.IsZero() || controllerutil.ContainsFinalizer(work, workv1alpha1.ExecutionFinalizer) {
		return nil
	}
	before := work.DeepCopy()
	controllerutil.AddFinalizer(work, workv1alpha1.ExecutionFinalizer)
	if err := hub.Patch(ctx, work, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("hold Work %s: %w", client.ObjectKeyFromObject(work), err)
	}
	return nil
}

// Execute does for one Work what has to be done now, and says in its status what became of it: apply it, or withdraw it and let it go if it
// was deleted. The zero duration means that there is nothing to come back for; news of the objects, a change of the Work or of the
// circumstances are for the caller to notice. With an error the same has to be tried again.
//
// A Work without the finalizer (see Hold) is not applied: its deletion would be missed. One that has vanished without a deletion is none
// of the Executor's business, so what it left stays. While a Work is suspended nothing of it reaches the cluster: what was applied before
// stays there as it is, is not healed, and is reported.
func (e *Executor) Execute(ctx context.Context, work *workv1alpha1.Work, at Circumstances) (again time.Duration, err error) {
	held := controllerutil.ContainsFinalizer(work, workv1alpha1.ExecutionFinalizer)
	switch {
	case !held:
		return 0, nil
	case !work.DeletionTimestamp.IsZero():
		return e.remove(ctx, work, at)
	case !at.Reachable || at.Leaving:
		return 0, nil
	}
	next := work.Status.DeepCopy()
	var failure error
	if ptr.Deref(work.Spec.SuspendDispatching, false) {
		e.set(next, work, suspended())
		failure = e.suspend(ctx, work, next)
	} else {
		e.set(next, work, dispatching())
		failure = e.apply(ctx, work, next)
	}
	if ctx.Err() != nil {
		return 0, fmt.Errorf("execute Work %s: %w", client.ObjectKeyFromObject(work), context.Cause(ctx))
	}
	seen, err := e.Engine.Observe(ctx, Requestor(work))
	if err == nil {
		next.ManifestStatuses = manifestStatuses(work, seen)
	}
	again, unreported := e.report(ctx, work, next)
	if err := errors.Join(failure, err, unreported); err != nil {
		return 0, fmt.Errorf("execute Work %s: %w", client.ObjectKeyFromObject(work), err)
	}
	return again, nil
}

// apply makes the cluster equal the Work and sets the condition that says how that went.
func (e *Executor) apply(ctx context.Context, work *workv1alpha1.Work, next *workv1alpha1.WorkStatus) error {
	b, err := Bundle(work)
	var report bundle.Report
	if err == nil {
		report, err = e.Engine.Converge(ctx, b)
	}
	if err == nil {
		e.set(next, work, applied())
		return nil
	}
	done := report.Changes.Count(bundle.Created) + report.Changes.Count(bundle.Configured) + report.Changes.Count(bundle.Unchanged)
	e.set(next, work, notApplied(done, len(work.Spec.Workload.Manifests), steady(err, report.Message)))
	return err
}

// suspend has the cluster left as it is, and sets the condition that says how far the Work had come.
func (e *Executor) suspend(ctx context.Context, work *workv1alpha1.Work, next *workv1alpha1.WorkStatus) error {
	report, err := e.Engine.Suspend(ctx, Requestor(work))
	if err != nil {
		return err
	}
	b, err := Bundle(work)
	var digest bundle.Digest
	if err == nil {
		digest, err = b.Digest()
	}
	switch {
	case err != nil || report.Digest != digest:
		e.set(next, work, notAppliedYet())
	case report.State == bundle.StateApplied:
		e.set(next, work, applied())
	default:
		e.set(next, work, cutOff(report.Message))
	}
	return nil
}

// remove withdraws a deleted Work and lets it go.
func (e *Executor) remove(ctx context.Context, work *workv1alpha1.Work, at Circumstances) (time.Duration, error) {
	if at.Abandon {
		return e.release(ctx, work)
	}
	if !at.Reachable {
		return 0, nil
	}
	leave := at.Orphan || ptr.Deref(work.Spec.PreserveResourcesOnDeletion, false)
	done, err := e.Engine.Withdraw(ctx, bundle.Withdrawal{ID: Requestor(work), Leave: leave})
	if err != nil {
		next := work.Status.DeepCopy()
		e.set(next, work, notRemoved(steady(err, "")))
		if ctx.Err() == nil {
			_, unreported := e.report(ctx, work, next)
			err = errors.Join(err, unreported)
		}
		return 0, fmt.Errorf("withdraw Work %s: %w", client.ObjectKeyFromObject(work), err)
	}
	if !done {
		return removalRecheck, nil
	}
	return e.release(ctx, work)
}

// release takes the finalizer off, which is the last thing that is done for a Work.
func (e *Executor) release(ctx context.Context, work *workv1alpha1.Work) (time.Duration, error) {
	freed := work.DeepCopy()
	controllerutil.RemoveFinalizer(freed, workv1alpha1.ExecutionFinalizer)
	patch := client.MergeFromWithOptions(work, client.MergeFromWithOptimisticLock{})
	err := e.Hub.Patch(ctx, freed, patch)
	if apierrors.IsConflict(err) {
		return staleDelay, nil
	}
	if client.IgnoreNotFound(err) != nil {
		return 0, fmt.Errorf("let go of Work %s: %w", client.ObjectKeyFromObject(work), err)
	}
	return 0, nil
}
