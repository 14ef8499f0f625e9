package karmada

import (
	"context"
	"errors"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/towline/towline/internal/kube"
)

const (
	// writeAttempts limits the attempts to write an object that other clients write concurrently.
	writeAttempts = 20
	// writeInterval is the interval between two attempts.
	writeInterval = 20 * time.Millisecond
)

// retryStale calls do again after a conflict (kube.IsStaleWrite): other clusters that join may write the same object
// concurrently.
func retryStale(ctx context.Context, do func() error) error {
	return kube.RetryOnWithBackoff(ctx, wait.Backoff{Steps: writeAttempts, Duration: writeInterval}, kube.IsStaleWrite, do)
}

// ignoreForbidden removes the errors for missing permissions from err. Objects that the user may not delete stay.
func ignoreForbidden(err error) error {
	var joined interface{ Unwrap() []error }
	if errors.As(err, &joined) {
		rest := slices.Clone(joined.Unwrap())
		for i := range rest {
			rest[i] = ignoreForbidden(rest[i])
		}
		return errors.Join(rest...)
	}
	if apierrors.IsForbidden(err) {
		return nil
	}
	return err
}
