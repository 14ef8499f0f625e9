package kube

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
)

// OnConflict is Insist for conflicts: do reads an object, changes it and writes it, and does so again if others wrote it meanwhile.
func OnConflict(ctx context.Context, do func() error) error {
	return Insist(ctx, apierrors.IsConflict, do)
}

// Insist is InsistAt at a pace that suits an object that few write at the same time: 5 tries, with 0.4 s between the first and the last.
func Insist(ctx context.Context, again func(error) bool, do func() error) error {
	return InsistAt(ctx, wait.Backoff{Steps: 5, Duration: 10 * time.Millisecond, Factor: 3, Jitter: 0.1}, again, do)
}

// InsistAt calls do until it succeeds, until it fails with an error for which again is false, until the tries of pace are used up, or until ctx
// ends. It returns nil only if do did; if ctx ended between two tries, or before the first, its error; and else the error of the last try.
//
// The package retry of client-go is not for us: it takes an error of do that is, or wraps, context.Canceled or context.DeadlineExceeded, as that
// of a request that was cut off or whose time was up is, for the end of its own waiting. It answers with the conflict before it, and if there
// was none with nil, which passes off as written what was not. And it goes on waiting when ctx has ended.
func InsistAt(ctx context.Context, pace wait.Backoff, again func(error) bool, do func() error) error {
	var last error
	err := wait.ExponentialBackoffWithContext(ctx, pace, func(context.Context) (bool, error) {
		last = do()
		// What do returns is kept apart from what the waiting returns, which may be the very same error.
		return last == nil || !again(last), nil
	})
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	return last
}

// ChangedMeanwhile says whether someone else was faster to create, change or delete an object, so that looking again helps.
func ChangedMeanwhile(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err)
}
