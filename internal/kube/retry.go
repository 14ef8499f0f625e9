package kube

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
)

// RetryOnConflict calls RetryOn with conflicts as retriable errors. do must read an object, change it and write it.
func RetryOnConflict(ctx context.Context, do func() error) error {
	return RetryOn(ctx, apierrors.IsConflict, do)
}

// RetryOn is RetryOnWithBackoff with a back-off for objects with few concurrent writers: 5 attempts within 0.4 s.
func RetryOn(ctx context.Context, isRetriable func(error) bool, do func() error) error {
	return RetryOnWithBackoff(ctx, wait.Backoff{Steps: 5, Duration: 10 * time.Millisecond, Factor: 3, Jitter: 0.1}, isRetriable, do)
}

// RetryOnWithBackoff calls do until it succeeds, fails with an error for which isRetriable returns false, has used all
// attempts of backoff, or ctx ends. It returns nil only if do succeeded, the error of ctx if it ended between two
// attempts, and otherwise the error of the last attempt.
//
// client-go's package retry is not suitable. If do returns an error that wraps context.Canceled or
// context.DeadlineExceeded, for example of an aborted request, retry returns the error of the attempt before, or nil if
// there was none. It also continues after ctx has ended.
func RetryOnWithBackoff(ctx context.Context, backoff wait.Backoff, isRetriable func(error) bool, do func() error) error {
	var last error
	err := wait.ExponentialBackoffWithContext(ctx, backoff, func(context.Context) (bool, error) {
		last = do()
		// The error of do is kept separately, since the back-off may return an equal one.
		return last == nil || !isRetriable(last), nil
	})
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	return last
}

// IsStaleWrite returns whether a write request failed because another client has created, changed or deleted the
// object, so that it can succeed after another read.
func IsStaleWrite(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err)
}
