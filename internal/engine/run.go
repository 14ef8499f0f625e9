package engine

import (
	"context"
	"sync"
	"time"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/drift"
	"github.com/towline/towline/internal/kube"
)

// Run corrects drift until ctx ends: it applies objects of bundles with the option CorrectDrift again after others have
// changed or deleted them. It also retries runs that failed or were interrupted, and continues withdrawals. It needs
// only the records on the cluster. It returns nil after ctx and all its goroutines have ended. It is called once.
func (e *Engine) Run(ctx context.Context) error {
	e.running.Store(true)
	defer e.running.Store(false)
	drift.New(drift.Options{
		Engine: driftEngine{e}, Store: e.store, Metadata: e.member.metadataClient, Mapper: e.member.mapper, Clock: e.clock,
		ScopeConfirmed: e.scopeConfirmed, OnCorrect: e.onCorrect, OnReport: e.onReport, OnRecordMissing: e.onLost, OnChange: e.onChange,
	}).Run(ctx)
	return nil
}

// onLost is called if the record of id no longer exists or has lost its content. It calls OnReport, so that the caller
// calls Converge or Withdraw, and makes sure that Converge runs.
func (e *Engine) onLost(id bundle.ID) {
	e.failedRuns.forget(id)
	if e.store.Cached(id) != nil { // otherwise FindDeployed does not find it either
		e.lostBundles.add(id)
	}
	e.onReport(id)
}

// lostBundles are the bundles whose records have lost content. Converge stores the content again and removes the
// bundle. The heads of the records do not show the loss.
type lostBundles struct {
	mu   sync.Mutex // guards byID
	byID map[bundle.ID]bool
}

func (l *lostBundles) add(id bundle.ID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byID == nil {
		l.byID = map[bundle.ID]bool{}
	}
	l.byID[id] = true
}

func (l *lostBundles) remove(id bundle.ID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.byID, id)
}

func (l *lostBundles) has(id bundle.ID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.byID[id]
}

// driftEngine implements drift.Engine.
type driftEngine struct{ engine *Engine }

var _ drift.Engine = driftEngine{}

// Acquire locks a bundle.
func (d driftEngine) Acquire(ctx context.Context, id bundle.ID) (unlock func(), err error) {
	return d.engine.bundleLocks.acquire(ctx, id)
}

// Resume converges objects of a bundle from its record.
func (d driftEngine) Resume(ctx context.Context, id bundle.ID, only map[kube.Ref]bool) (drift.Result, error) {
	e := d.engine
	ctx, cancel := kube.ContextUntil(ctx, e.store.ServingEnded(id))
	defer cancel()
	var before bundle.Report
	if rec := e.store.Cached(id); rec != nil {
		before = e.reportOf(rec)
	}
	report, ok, err := e.resume(ctx, id, only)
	result := drift.Result{Changes: report.Changes, IsLost: !ok && err == nil}
	if rec := e.store.Cached(id); rec != nil {
		// A run of all objects saves StateApplying before its first change. The agent may have reported that state, so the
		// final report is new even if it equals the first one.
		savedApplying := before.State == bundle.StateApplied && len(only) == 0 && report.Changes.Count(bundle.Unchanged) < len(report.Changes)
		result.IsReportNew = savedApplying || !isSameReport(before, e.reportOf(rec))
	}
	return result, err
}

// ResumeWithdrawal continues a withdrawal.
func (d driftEngine) ResumeWithdrawal(ctx context.Context, id bundle.ID) (done bool, err error) {
	ctx, cancel := kube.ContextUntil(ctx, d.engine.store.ServingEnded(id))
	defer cancel()
	return d.engine.resumeWithdrawal(ctx, id)
}

// NextAttempt returns the time of the next run of an unfinished bundle.
func (d driftEngine) NextAttempt(id bundle.ID, digest bundle.Digest) (at time.Time, ok bool) {
	return d.engine.nextAttempt(id, digest)
}

// PollPause returns the time until the next check of the condition that a bundle waits for.
func (d driftEngine) PollPause(id bundle.ID) (pause time.Duration, ok bool) {
	return d.engine.pollPause(id)
}
