package works

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
)

// removalRecheck is how soon to look again at objects that were deleted and still exist. News of them usually comes earlier.
const removalRecheck = 2 * time.Second

// Limit bounds what is done on a cluster for one Work at a time, and then how long is looked at its objects: clusters that take requests and never
// answer are not waited for longer. What was not finished goes on with the next attempt.
const Limit = time.Minute

var (
	// ErrSilent is in the error about a cluster that used up the limit and answered nothing.
	ErrSilent = errors.New("the cluster does not answer")
	// ErrStale is in the error about a Work that changed while it was executed. The caller should wait until it has the newer one.
	ErrStale = errors.New("the Work has changed")
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
	// Reachable says that something can be done on the cluster now. Until it is, Works only say so.
	Reachable bool
	// Hindrance says why the cluster is not reachable, if it is not for want of an answer.
	Hindrance string
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
	// Limit bounds what is done on the cluster for one Work at a time. Default: Limit.
	Limit time.Duration
}

// limited returns the context for what is done on the cluster.
func (e *Executor) limited(ctx context.Context) (context.Context, context.CancelFunc) {
	return engine.WithPatience(ctx, cmp.Or(e.Limit, Limit))
}

// silence returns err, and says in it if the cluster has used up its time: with ErrSilent if it answered nothing.
func silence(cluster context.Context, err error) error {
	why := ErrSilent
	if engine.Answered(cluster) {
		why = engine.ErrTimeUp
	}
	if err != nil && errors.Is(context.Cause(cluster), engine.ErrTimeUp) && !errors.Is(err, why) {
		return fmt.Errorf("%w: %w", why, err)
	}
	return err
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
// circumstances are for the caller to notice. With an error the same has to be tried again; it satisfies ErrStale if work is not the newest.
//
// A Work without the finalizer (see Hold) is not applied: its deletion would be missed. One that has vanished without a deletion is none
// of the Executor's business, so what it left stays. While a Work is suspended nothing of it reaches the cluster: what was applied before
// stays there as it is, is not healed, and is reported. While the cluster is not reached, nothing is known of the objects' health.
func (e *Executor) Execute(ctx context.Context, work *workv1alpha1.Work, at Circumstances) (again time.Duration, err error) {
	held := controllerutil.ContainsFinalizer(work, workv1alpha1.ExecutionFinalizer)
	switch {
	case !held:
		return 0, nil
	case !work.DeletionTimestamp.IsZero():
		return e.remove(ctx, work, at)
	case at.Leaving:
		return 0, nil
	}
	next := work.Status.DeepCopy()
	var verdict metav1.Condition
	if at.Reachable {
		verdict, err = e.carryOut(ctx, work, next)
	} else {
		verdict = unreached(work, cmp.Or(at.Hindrance, ErrSilent.Error()))
		next.ManifestStatuses, _ = manifestStatuses(work, unseen(work))
	}
	if ctx.Err() != nil {
		return 0, fmt.Errorf("execute Work %s: %w", client.ObjectKeyFromObject(work), context.Cause(ctx))
	}
	e.set(next, work, verdict)
	if ptr.Deref(work.Spec.SuspendDispatching, false) {
		e.set(next, work, suspended())
	} else {
		e.set(next, work, dispatching())
	}
	if err := errors.Join(err, e.report(ctx, work, next)); err != nil {
		return 0, fmt.Errorf("execute Work %s: %w", client.ObjectKeyFromObject(work), err)
	}
	return 0, nil
}

// carryOut does what has to be done on the cluster, and looks how the objects are. It returns the condition that says how that went, even with
// an error.
func (e *Executor) carryOut(ctx context.Context, work *workv1alpha1.Work, next *workv1alpha1.WorkStatus) (metav1.Condition, error) {
	do := e.apply
	if ptr.Deref(work.Spec.SuspendDispatching, false) {
		do = e.suspend
	}
	verdict, failure := do(ctx, work)
	seen, blind := unseen(work), error(nil)
	if !unanswered(failure) {
		seen, blind = e.observe(ctx, work)
	}
	var omitted int
	next.ManifestStatuses, omitted = manifestStatuses(work, seen)
	if omitted > 0 {
		verdict.Message += fmt.Sprintf("; %d of the objects' statuses are left out, they would make the Work too big", omitted)
	}
	return verdict, errors.Join(failure, blind)
}

// observe looks how the objects are.
func (e *Executor) observe(ctx context.Context, work *workv1alpha1.Work) ([]engine.Observation, error) {
	ctx, cancel := e.limited(ctx)
	defer cancel()
	seen, err := e.Engine.Observe(ctx, Requestor(work))
	if err != nil && seen == nil {
		seen = unseen(work)
	}
	return seen, silence(ctx, err)
}

// apply makes the cluster equal the Work.
func (e *Executor) apply(ctx context.Context, work *workv1alpha1.Work) (metav1.Condition, error) {
	ctx, cancel := e.limited(ctx)
	defer cancel()
	report, err := e.Engine.Converge(ctx, Bundle(work))
	err = silence(ctx, err)
	done := report.Changes.Count(bundle.Created) + report.Changes.Count(bundle.Configured) + report.Changes.Count(bundle.Unchanged)
	switch {
	case err == nil:
		return applied(), nil
	case unanswered(err) && done == 0:
		return unreached(work, ErrSilent.Error()), err
	}
	return notApplied(done, len(work.Spec.Workload.Manifests), steady(err, report.Message)), err
}

// suspend has the cluster left as it is, and says how far the Work had come.
func (e *Executor) suspend(ctx context.Context, work *workv1alpha1.Work) (metav1.Condition, error) {
	ctx, cancel := e.limited(ctx)
	defer cancel()
	report, err := e.Engine.Suspend(ctx, Requestor(work))
	if err != nil {
		err = silence(ctx, err)
		return unreached(work, steady(err, "")), err
	}
	digest, err := Bundle(work).Digest()
	switch {
	case err != nil:
		return notAppliedYet(), err
	case report.Digest != digest:
		return notAppliedYet(), nil
	case report.State == bundle.StateApplied:
		return applied(), nil
	}
	return cutOff(report.Message), nil
}

// remove withdraws a deleted Work and lets it go.
func (e *Executor) remove(ctx context.Context, work *workv1alpha1.Work, at Circumstances) (time.Duration, error) {
	if at.Abandon {
		return 0, e.release(ctx, work)
	}
	if !at.Reachable {
		return 0, nil
	}
	leave := at.Orphan || ptr.Deref(work.Spec.PreserveResourcesOnDeletion, false)
	cluster, cancel := e.limited(ctx)
	defer cancel()
	done, err := e.Engine.Withdraw(cluster, bundle.Withdrawal{ID: Requestor(work), Orphan: leave})
	if err != nil {
		err = silence(cluster, err)
		next := work.Status.DeepCopy()
		e.set(next, work, notRemoved(steady(err, "")))
		if ctx.Err() == nil {
			err = errors.Join(err, e.report(ctx, work, next))
		}
		return 0, fmt.Errorf("withdraw Work %s: %w", client.ObjectKeyFromObject(work), err)
	}
	if !done {
		return removalRecheck, nil
	}
	return 0, e.release(ctx, work)
}

// release takes the finalizer off, which is the last thing that is done for a Work.
func (e *Executor) release(ctx context.Context, work *workv1alpha1.Work) error {
	freed := work.DeepCopy()
	controllerutil.RemoveFinalizer(freed, workv1alpha1.ExecutionFinalizer)
	err := e.Hub.Patch(ctx, freed, client.MergeFromWithOptions(work, client.MergeFromWithOptimisticLock{}))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("let go of Work %s: %w", client.ObjectKeyFromObject(work), stale(err))
	}
	return nil
}

// stale adds ErrStale to err if the Work was not the newest.
func stale(err error) error {
	if apierrors.IsConflict(err) {
		return fmt.Errorf("%w: %w", ErrStale, err)
	}
	return err
}
