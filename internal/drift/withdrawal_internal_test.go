package drift

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// removalEngine is an Engine with a withdrawal that ends at a time. It counts the checks.
type removalEngine struct {
	Engine // its other methods are not called for a bundle that is being withdrawn

	ends   time.Time
	err    atomic.Pointer[error]
	checks atomic.Int64
}

// ResumeWithdrawal checks the withdrawal.
func (e *removalEngine) ResumeWithdrawal(context.Context, bundle.ID) (done bool, err error) {
	e.checks.Add(1)
	if err := e.err.Load(); err != nil {
		return false, *err
	}
	return !time.Now().Before(e.ends), nil
}

// NextAttempt returns that a failed bundle is applied again in 5 minutes.
func (e *removalEngine) NextAttempt(bundle.ID, bundle.Digest) (at time.Time, ok bool) {
	return time.Now().Add(MaxBackoff), true
}

// PollPause returns that the bundle waits for nothing.
func (e *removalEngine) PollPause(bundle.ID) (pause time.Duration, ok bool) { return 0, false }

// removal is a bundle that is being withdrawn, and a Corrector.
type removal struct {
	*Corrector
	engine *removalEngine
	object kube.Ref
	// lost and reported count the calls of OnRecordMissing and OnReport.
	lost, reported atomic.Int64
}

// newRemoval begins a withdrawal that ends after the given time, and starts the workers of a Corrector. It must be
// called in the bubble of a test. before is the state of the bundle before the withdrawal.
func newRemoval(t *testing.T, before bundle.State, duration time.Duration) *removal {
	t.Helper()
	r := &removal{
		engine: &removalEngine{ends: time.Now().Add(duration)},
		object: kube.Ref{Version: "v1", Kind: "ConfigMap", Namespace: "default", Name: "object"},
	}
	r.Corrector = New(Options{
		Engine: r.engine, Store: newFakeStore(), Clock: clock.RealClock{},
		OnRecordMissing: func(bundle.ID) { r.lost.Add(1) }, OnReport: func(bundle.ID) { r.reported.Add(1) },
	})
	none := &inventory.Record{Head: inventory.Head{ID: bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "web", Feature: "Resources"}}}
	next := none.Edit()
	next.Entries[r.object.Key()] = inventory.Entry{Ref: r.object, UID: "uid"}
	next.State = before
	r.queueUnfinished(next)
	next.State = bundle.StateRemoving
	if _, err := r.Store.Save(t.Context(), none, next, &bundle.Bundle{ID: none.ID}); err != nil {
		t.Fatal(err)
	}
	r.queueUnfinished(next)
	var running sync.WaitGroup
	for range workers {
		running.Go(func() {
			for r.processNext(t.Context()) {
			}
		})
	}
	t.Cleanup(func() { r.queue.ShutDown(); running.Wait() })
	return r
}

// TestWithdrawalIsCheckedEverMoreRarely withdraws bundles with objects that stay after their deletion.
func TestWithdrawalIsCheckedEverMoreRarely(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		duration  time.Duration
		maxChecks int64
	}{
		"two seconds": {2 * time.Second, 3},
		"a minute":    {time.Minute, 20},
		"a day":       {24 * time.Hour, 350},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRemoval(t, bundle.StateApplied, tc.duration)
				<-time.After(tc.duration + min(tc.duration/4, MaxBackoff) + 2*minBackoff)
				if got := r.engine.checks.Load(); got > tc.maxChecks {
					t.Errorf("%d checks, want at most %d", got, tc.maxChecks)
				}
				if got := r.lost.Load(); got != 1 {
					t.Errorf("the end is reported %d times, want once", got)
				}
			})
		})
	}
}

// TestDeletionEndsAWithdrawal lets an object of a bundle end an hour after the bundle was withdrawn.
func TestDeletionEndsAWithdrawal(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRemoval(t, bundle.StateApplied, time.Hour)
		<-time.After(time.Hour)
		synctest.Wait()
		before := r.engine.checks.Load()
		for range 100 {
			r.onEvent(r.object.Key(), observation{deleted: true, uid: "uid"})
		}
		<-time.After(minBackoff)
		synctest.Wait()
		if got := r.lost.Load(); got != 1 {
			t.Errorf("the end is reported %d times, want once", got)
		}
		if got := r.engine.checks.Load() - before; got != 1 {
			t.Errorf("%d checks for the events of a second, want one", got)
		}
	})
}

// TestWithdrawalOfAFailedBundleIsChecked withdraws a bundle whose next attempt is due in 5 minutes.
func TestWithdrawalOfAFailedBundleIsChecked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRemoval(t, bundle.StateFailed, 2*time.Second)
		<-time.After(5 * time.Second)
		if got := r.lost.Load(); got != 1 {
			t.Errorf("the end is reported %d times, want once", got)
		}
	})
}

// TestFailureOfAWithdrawalIsReported lets a withdrawal fail while it waits for its objects.
func TestFailureOfAWithdrawalIsReported(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRemoval(t, bundle.StateApplied, time.Hour)
		<-time.After(time.Minute)
		if got := r.reported.Load(); got != 0 {
			t.Errorf("reported %d times before the failure, want never", got)
		}
		failure := errors.New("a webhook denies the deletion")
		r.engine.err.Store(&failure)
		<-time.After(5 * time.Minute)
		if got := r.reported.Load(); got != 1 {
			t.Errorf("the failure is reported %d times, want once", got)
		}
	})
}
