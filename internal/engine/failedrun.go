package engine

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/drift"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube/logkeys"
)

// failureKind is the kind of change that a failed run needs to succeed. The constants are in ascending order of need.
type failureKind int

const (
	failureTransient failureKind = iota // it may succeed at any time
	failureOfMember                     // it succeeds only after others have changed the cluster, see refusedError
	failureOfBundle                     // only another bundle can succeed
)

// failedRun is a run of all objects of a bundle that failed in this process.
type failedRun struct {
	digest      bundle.Digest
	report      bundle.Report
	err         error
	kind        failureKind
	failures    int       // runs of the same bundle that failed in a row
	nextAttempt time.Time // when Run repeats it, unless kind is failureOfBundle
}

// failedRuns has the last run of each bundle, if it failed. A stored failedRun is never changed. All are lost when the
// process ends: then each unfinished bundle is run once more.
type failedRuns struct {
	mu   sync.Mutex // guards byID
	byID map[bundle.ID]*failedRun
}

// get returns the failed run of the bundle with this digest, or nil.
func (f *failedRuns) get(id bundle.ID, digest bundle.Digest) *failedRun {
	f.mu.Lock()
	defer f.mu.Unlock()
	if run := f.byID[id]; run != nil && run.digest == digest {
		return run
	}
	return nil
}

// forget deletes the failed run of id, so that the next Converge runs.
func (f *failedRuns) forget(id bundle.ID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.byID, id)
}

// forgetAll is forget for the bundles for which isForgotten returns true.
func (f *failedRuns) forgetAll(isForgotten func(bundle.ID) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	maps.DeleteFunc(f.byID, func(id bundle.ID, _ *failedRun) bool { return isForgotten(id) })
}

// add stores a failed run that ended at the given time. isNew is true if the former run did not fail in the same way.
func (f *failedRuns) add(run *failedRun, ended time.Time) (isNew bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	before := f.byID[run.report.ID]
	run.failures = 1
	if before != nil && before.digest == run.digest {
		run.failures += before.failures
	}
	pause := drift.MaxBackoff
	if run.kind == failureTransient {
		pause = drift.Backoff(run.failures - 1)
	}
	run.nextAttempt = ended.Add(pause)
	if f.byID == nil {
		f.byID = map[bundle.ID]*failedRun{}
	}
	f.byID[run.report.ID] = run
	return before == nil || !isSameReport(before.report, run.report)
}

// postpone delays the next run of id after an attempt that failed before the run began.
func (f *failedRuns) postpone(id bundle.ID, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	run := f.byID[id]
	if run == nil || now.Before(run.nextAttempt) {
		return
	}
	postponed := *run
	postponed.failures++
	postponed.nextAttempt = now.Add(drift.Backoff(postponed.failures - 1))
	f.byID[id] = &postponed
}

// endPause ends the pause after the failed run of id if one of its failed objects has been applied since.
func (f *failedRuns) endPause(id bundle.ID, changes bundle.ChangeSet, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	run := f.byID[id]
	if run == nil {
		return
	}
	for _, failed := range run.report.Changes {
		isApplied := func(c bundle.Change) bool {
			return c.Ref == failed.Ref && c.Action != bundle.Failed && c.Action != bundle.Skipped
		}
		if failed.Action == bundle.Failed && slices.ContainsFunc(changes, isApplied) {
			ended := *run
			ended.kind, ended.nextAttempt = failureTransient, now
			f.byID[id] = &ended
			return
		}
	}
}

// storeFailure stores the failure of a run of all objects, unless the context has ended, and forgets it after a
// success. A run of some objects only ends the pause after the failure. It returns err, as a bundle.TerminalError if
// the caller must not repeat the run.
func (p *applyRun) storeFailure(ctx context.Context, report bundle.Report, err error) error {
	e, id := p.engine, p.bundle.ID
	switch {
	case p.only != nil && err == nil:
		e.failedRuns.endPause(id, p.changes, e.clock.Now())
		return nil
	case err == nil:
		e.failedRuns.forget(id)
		return nil
	case p.only != nil || ctx.Err() != nil:
		return err
	}
	run := &failedRun{digest: p.digest, report: report, err: err, kind: failureKindOf(err)}
	if run.kind != failureOfBundle && !p.isStoredUnfinished() {
		e.failedRuns.forget(id) // Run finds no unfinished record, so the caller repeats the run
		return err
	}
	if e.failedRuns.add(run, e.clock.Now()) {
		log.FromContext(ctx).Error(err, "apply bundle", logkeys.Bundle, id.String(), logkeys.Profile, p.bundle.Owner.Name, logkeys.Digest, p.digest.String())
	}
	if e.isServedElsewhere(id) {
		e.failedRuns.forget(id) // StopServing may have been called before add
	}
	return e.asTerminal(err)
}

// isStoredUnfinished returns whether the stored inventory shows that the bundle is unfinished, so that Run repeats the
// run.
func (p *applyRun) isStoredUnfinished() bool {
	stored := p.saved
	if stored == nil {
		stored = p.prior
	}
	return stored.Exists() && stored.BundleDigest() == p.digest && stored.IsUnfinished()
}

// asTerminal returns err as a bundle.TerminalError while Run runs, which repeats the run.
func (e *Engine) asTerminal(err error) error {
	if !e.running.Load() {
		return err
	}
	return &bundle.TerminalError{Err: err}
}

// findFailedRun returns the result of the last run of the bundle if it failed and the caller must not repeat it, else
// nil.
func (e *Engine) findFailedRun(id bundle.ID, digest bundle.Digest) *failedRun {
	if !e.running.Load() {
		return nil
	}
	return e.failedRuns.get(id, digest)
}

// Failure returns the report of the last run of the bundle, without a request, if it failed and the caller must not
// repeat it. Otherwise ok is false.
func (e *Engine) Failure(id bundle.ID, digest bundle.Digest) (report bundle.Report, ok bool) {
	if run := e.findFailedRun(id, digest); run != nil {
		return run.report, true
	}
	return bundle.Report{}, false
}

// nextAttempt returns the time of the next run of an unfinished bundle. It is zero if no failed run of the bundle is
// stored. ok is false if only another bundle can succeed.
func (e *Engine) nextAttempt(id bundle.ID, digest bundle.Digest) (at time.Time, ok bool) {
	run := e.failedRuns.get(id, digest)
	if run == nil {
		return time.Time{}, true
	}
	return run.nextAttempt, run.kind != failureOfBundle
}

// reportOf returns the report of the failed run of rec's bundle, since a run may fail without a change of the record.
// Otherwise it returns the report of rec.
func (e *Engine) reportOf(rec *inventory.Record) bundle.Report {
	if run := e.failedRuns.get(rec.ID, rec.BundleDigest()); run != nil && rec.IsUnfinished() {
		report := run.report
		report.Changes = nil
		return report
	}
	return rec.Report()
}

// isSameReport returns whether two reports of a bundle show the same to the hub.
func isSameReport(a, b bundle.Report) bool {
	return a.Digest == b.Digest && a.State == b.State && a.Message == b.Message && slices.Equal(a.Kinds, b.Kinds) && slices.Equal(a.Outdated, b.Outdated)
}

// invalidBundleError is an error of the bundle itself: each run of the bundle returns it.
type invalidBundleError struct{ err error }

// Error returns the reason.
func (e *invalidBundleError) Error() string { return e.err.Error() }

// Unwrap returns the reason.
func (e *invalidBundleError) Unwrap() error { return e.err }

// failureKindOf returns the kind of a failed run: the lowest kind of its failures.
func failureKindOf(err error) failureKind {
	if failures, ok := errors.AsType[applyErrors](err); ok && len(failures) > 0 {
		least := failureOfBundle
		for _, failure := range failures {
			least = min(least, failureKindOf(failure))
		}
		return least
	}
	if _, ok := errors.AsType[*invalidBundleError](err); ok {
		return failureOfBundle
	}
	if _, ok := errors.AsType[*refusedError](err); ok {
		return failureOfMember
	}
	return failureTransient
}

// refusedError is the error of an object that the API server refuses as invalid. Only a change by another client can
// help: of an object whose immutable field differs, of a CustomResourceDefinition, or of an admission policy.
type refusedError struct{ err error }

// Error returns the reason.
func (e *refusedError) Error() string { return e.err.Error() }

// Unwrap returns the reason.
func (e *refusedError) Unwrap() error { return e.err }

// asRefused returns err as a refusedError if the API server has refused the object as invalid. It returns err itself if
// this run has changed the schema, which may not be effective yet.
func (p *applyRun) asRefused(v decision, err error) error {
	if !apierrors.IsInvalid(err) && !apierrors.IsBadRequest(err) {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.defined[v.ref.GVK().GroupKind()] {
		return err
	}
	return &refusedError{err: err}
}
