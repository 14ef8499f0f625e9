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

// DefaultLimit is the time limit of each call of the Engine. Waiting for locks of the Engine does not count.
const DefaultLimit = time.Minute

var (
	// ErrUnresponsive is wrapped in errors about a cluster that sent no response within the limit.
	ErrUnresponsive = errors.New("the cluster does not answer")
	// ErrStale is wrapped in errors about a Work that changed during Execute. The caller should wait for the newer
	// version.
	ErrStale = errors.New("the Work has changed")
)

// Engine is the part of *engine.Engine that an Executor uses.
type Engine interface {
	// Converge makes the cluster equal b. The report lists the changes made, also with an error.
	Converge(ctx context.Context, b bundle.Bundle) (bundle.Report, error)
	// Withdraw removes the objects of w.ID. done is false while a deleted object still exists; then the Engine continues
	// the withdrawal itself.
	Withdraw(ctx context.Context, w bundle.Withdrawal) (done bool, err error)
	// Suspend stops changes to the objects of id until the next Converge or Withdraw. It returns the report of the last
	// Converge; its State is empty if there was none.
	Suspend(ctx context.Context, id bundle.ID) (bundle.Report, error)
	// Observe reads the state of the objects that were, or should have been, applied for id.
	Observe(ctx context.Context, id bundle.ID) ([]engine.Observation, error)
}

var _ Engine = (*engine.Engine)(nil)

// ClusterState is the state of the cluster of a Work.
type ClusterState struct {
	// Reachable is true if the cluster accepts changes now. Otherwise Execute only updates the status of the Work.
	Reachable bool
	// UnreachableReason describes why the cluster is not reachable. Default: it does not answer.
	UnreachableReason string
	// Deregistering is true while the cluster is being deregistered: nothing is applied any more.
	Deregistering bool
	// Orphan is true if the objects of deleted Works stay on the cluster, without ownership labels.
	Orphan bool
	// Abandon is true if Works are deleted without a request to the cluster. Then Executor.Engine may be nil.
	Abandon bool
}

// Executor applies and removes the Works of one cluster.
type Executor struct {
	// Hub reads and writes Works. It must be allowed to patch their status and their finalizers.
	Hub    client.Client
	Engine Engine
	Clock  clock.PassiveClock
	// Limit is the time limit of each call of Engine. Default: DefaultLimit.
	Limit time.Duration
}

// withLimit returns a context with the time limit, for one call of Engine.
func (e *Executor) withLimit(ctx context.Context) (context.Context, context.CancelFunc) {
	return engine.WithWorkLimit(ctx, cmp.Or(e.Limit, DefaultLimit))
}

// wrapTimeout returns err. If the time limit of clusterCtx was reached, it wraps err with the cause: ErrUnresponsive if
// the cluster sent no response at all, otherwise engine.ErrTimeUp.
func wrapTimeout(clusterCtx context.Context, err error) error {
	cause := ErrUnresponsive
	if engine.Answered(clusterCtx) {
		cause = engine.ErrTimeUp
	}
	if err != nil && errors.Is(context.Cause(clusterCtx), engine.ErrTimeUp) && !errors.Is(err, cause) {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

// EnsureFinalizer adds the finalizer that delays the deletion of a Work until its objects are removed, and updates
// work. It does nothing if the Work is being deleted. If work is not the newest version, the error satisfies
// apierrors.IsConflict.
func EnsureFinalizer(ctx context.Context, hub client.Client, work *workv1alpha1.Work) error {
	if !work.DeletionTimestamp.IsZero() || controllerutil.ContainsFinalizer(work, workv1alpha1.ExecutionFinalizer) {
		return nil
	}
	before := work.DeepCopy()
	controllerutil.AddFinalizer(work, workv1alpha1.ExecutionFinalizer)
	if err := hub.Patch(ctx, work, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("set the finalizer of Work %s: %w", client.ObjectKeyFromObject(work), err)
	}
	return nil
}

// Execute applies a Work, or removes its objects and then its finalizer if the Work is being deleted. It writes the
// result to the status, and does not change work. The caller must call it again after an error, when the objects, the
// Work or the cluster state change, and when the Engine calls engine.Options.OnReport. If work is not the newest
// version, the error wraps ErrStale.
//
// A Work without the finalizer (see EnsureFinalizer) is not applied, because its deletion could be missed. While a Work
// is suspended, its objects are observed, but not changed, and their drift is not corrected. While the cluster is
// unreachable, all objects keep the status that was read last, with health Unknown. If the hub loses a Work without a
// deletion, its objects stay.
func (e *Executor) Execute(ctx context.Context, work *workv1alpha1.Work, state ClusterState) (err error) {
	hasFinalizer := controllerutil.ContainsFinalizer(work, workv1alpha1.ExecutionFinalizer)
	switch {
	case !hasFinalizer:
		return nil
	case !work.DeletionTimestamp.IsZero():
		return e.removeWork(ctx, work, state)
	case state.Deregistering:
		return nil
	}
	newStatus := work.Status.DeepCopy()
	var condition metav1.Condition
	if state.Reachable {
		condition, err = e.sync(ctx, work, newStatus)
	} else {
		condition = unreachableCondition(work, cmp.Or(state.UnreachableReason, ErrUnresponsive.Error()))
		newStatus.ManifestStatuses, _ = manifestStatuses(work, lastObservations(work))
	}
	if ctx.Err() != nil {
		return fmt.Errorf("execute Work %s: %w", client.ObjectKeyFromObject(work), context.Cause(ctx))
	}
	e.setCondition(newStatus, work, condition)
	if ptr.Deref(work.Spec.SuspendDispatching, false) {
		e.setCondition(newStatus, work, suspendedCondition())
	} else {
		e.setCondition(newStatus, work, dispatchingCondition())
	}
	if err := errors.Join(err, e.patchStatus(ctx, work, newStatus)); err != nil {
		return fmt.Errorf("execute Work %s: %w", client.ObjectKeyFromObject(work), err)
	}
	return nil
}

// sync applies or suspends a Work, and reads the state of its objects into newStatus. It returns the condition Applied,
// also with an error.
func (e *Executor) sync(ctx context.Context, work *workv1alpha1.Work, newStatus *workv1alpha1.WorkStatus) (metav1.Condition, error) {
	applyOrSuspend := e.apply
	if ptr.Deref(work.Spec.SuspendDispatching, false) {
		applyOrSuspend = e.suspend
	}
	condition, applyErr := applyOrSuspend(ctx, work)
	observations, observeErr := lastObservations(work), error(nil)
	if !isUnresponsive(applyErr) {
		observations, observeErr = e.observe(ctx, work)
	}
	var omitted int
	newStatus.ManifestStatuses, omitted = manifestStatuses(work, observations)
	if omitted > 0 {
		condition.Message += fmt.Sprintf("; %d object statuses are omitted, because the Work would be too large", omitted)
	}
	return condition, errors.Join(applyErr, observeErr)
}

// observe reads the state of the objects. If nothing can be read, it returns the last observations with the error.
func (e *Executor) observe(ctx context.Context, work *workv1alpha1.Work) ([]engine.Observation, error) {
	ctx, cancel := e.withLimit(ctx)
	defer cancel()
	observations, err := e.Engine.Observe(ctx, BundleID(work))
	if err != nil && observations == nil {
		observations = lastObservations(work)
	}
	return observations, wrapTimeout(ctx, err)
}

// apply makes the cluster equal the Work, and returns the condition Applied. It returns no error for a
// bundle.TerminalError, after which the caller must not repeat the run.
func (e *Executor) apply(ctx context.Context, work *workv1alpha1.Work) (metav1.Condition, error) {
	ctx, cancel := e.withLimit(ctx)
	defer cancel()
	report, err := e.Engine.Converge(ctx, Bundle(work))
	err = wrapTimeout(ctx, err)
	applied := report.Changes.Count(bundle.Created) + report.Changes.Count(bundle.Configured) + report.Changes.Count(bundle.Unchanged)
	switch {
	case err == nil:
		return appliedCondition(), nil
	case isUnresponsive(err) && applied == 0:
		return unreachableCondition(work, ErrUnresponsive.Error()), err
	}
	condition := notAppliedCondition(applied, len(work.Spec.Workload.Manifests), stableMessage(err, report.Message))
	if _, isTerminal := errors.AsType[*bundle.TerminalError](err); isTerminal {
		return condition, nil
	}
	return condition, err
}

// suspend stops changes to the objects of a Work, and returns the condition Applied for the last run.
func (e *Executor) suspend(ctx context.Context, work *workv1alpha1.Work) (metav1.Condition, error) {
	ctx, cancel := e.withLimit(ctx)
	defer cancel()
	report, err := e.Engine.Suspend(ctx, BundleID(work))
	if err != nil {
		err = wrapTimeout(ctx, err)
		return unreachableCondition(work, stableMessage(err, "")), err
	}
	digest, err := Bundle(work).Digest()
	switch {
	case err != nil:
		return pendingCondition(), err
	case report.Digest != digest:
		return pendingCondition(), nil
	case report.State == bundle.StateApplied:
		return appliedCondition(), nil
	}
	return interruptedCondition(report.Message), nil
}

// removeWork removes the objects of a deleted Work, and then its finalizer. While deleted objects still exist, the
// Engine continues the withdrawal, and its engine.Options.OnReport triggers the next call.
func (e *Executor) removeWork(ctx context.Context, work *workv1alpha1.Work, state ClusterState) error {
	if state.Abandon {
		return e.removeFinalizer(ctx, work)
	}
	if !state.Reachable {
		return nil
	}
	orphan := state.Orphan || ptr.Deref(work.Spec.PreserveResourcesOnDeletion, false)
	clusterCtx, cancel := e.withLimit(ctx)
	defer cancel()
	done, err := e.Engine.Withdraw(clusterCtx, bundle.Withdrawal{ID: BundleID(work), Orphan: orphan})
	if err != nil {
		err = wrapTimeout(clusterCtx, err)
		newStatus := work.Status.DeepCopy()
		e.setCondition(newStatus, work, removalFailedCondition(stableMessage(err, "")))
		if ctx.Err() == nil {
			err = errors.Join(err, e.patchStatus(ctx, work, newStatus))
		}
		return fmt.Errorf("remove the objects of Work %s: %w", client.ObjectKeyFromObject(work), err)
	}
	if !done {
		return nil
	}
	return e.removeFinalizer(ctx, work)
}

// removeFinalizer removes the finalizer of a deleted Work, so that the API server deletes it.
func (e *Executor) removeFinalizer(ctx context.Context, work *workv1alpha1.Work) error {
	changed := work.DeepCopy()
	controllerutil.RemoveFinalizer(changed, workv1alpha1.ExecutionFinalizer)
	err := e.Hub.Patch(ctx, changed, client.MergeFromWithOptions(work, client.MergeFromWithOptimisticLock{}))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("remove the finalizer of Work %s: %w", client.ObjectKeyFromObject(work), asStale(err))
	}
	return nil
}

// asStale wraps a conflict error with ErrStale.
func asStale(err error) error {
	if apierrors.IsConflict(err) {
		return fmt.Errorf("%w: %w", ErrStale, err)
	}
	return err
}
