package clusterstatus

import (
	"context"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// lostAfter is how long list and watch may fail until the known objects count as stale. It leaves time for several
// attempts.
const lostAfter = time.Minute

// watchState is the state of the list and watch of one kind. counters.mu guards it.
type watchState struct {
	// hasSynced is true once all objects were listed. isLost is true while the known objects are stale.
	hasSynced, isLost bool
	// failingSince is the time of the first of consecutive failures; zero while requests succeed. message is the
	// StableMessage of a failure.
	failingSince time.Time
	message      string
}

// setWatching records that a watch is established.
func (s *watchState) setWatching() { s.isLost, s.failingSince, s.message = false, time.Time{}, "" }

// setFailed records a failed list or watch. After a failed watch the reflector lists again, so the error of a list
// replaces the error of a watch.
func (s *watchState) setFailed(verb string, err error, at time.Time) {
	if s.failingSince.IsZero() {
		s.failingSince = at
	}
	if s.message == "" || verb == verbList {
		s.message = StableMessage(err)
	}
}

// evaluate sets isLost if the requests have failed for lostAfter. It returns the failure message if the known objects
// are stale, else "". isPending is true while they are not stale and were never listed.
func (s *watchState) evaluate(at time.Time) (message string, isPending bool) {
	s.isLost = s.isLost || !s.failingSince.IsZero() && at.Sub(s.failingSince) >= lostAfter
	if s.isLost {
		return s.message, false
	}
	return "", !s.hasSynced
}

const (
	verbList  = "list"
	verbWatch = "watch"
)

// trackFailures wraps source so that state records its failures and successful watches.
func (o *Observer) trackFailures(state *watchState, source *cache.ListWatch) *cache.ListWatch {
	list, startWatch := source.ListWithContextFunc, source.WatchFuncWithContext
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			all, err := list(ctx, options)
			if err != nil && ctx.Err() == nil {
				o.counters.setFailed(state, verbList, err, o.opts.Clock.Now())
			}
			return all, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			events, err := startWatch(ctx, options)
			switch {
			case err != nil && ctx.Err() == nil:
				o.counters.setFailed(state, verbWatch, err, o.opts.Clock.Now())
			case err == nil && options.SendInitialEvents == nil:
				// This watch continues an earlier one. A watch with initial events is a new list: setSynced records its
				// success when Replace is called.
				o.counters.setWatching(state)
			}
			return events, err
		},
	}
}
