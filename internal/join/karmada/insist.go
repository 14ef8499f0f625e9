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
	// writeTries bounds how often an object is written again that others change at the same time.
	writeTries = 20
	// writePause is the time between two tries.
	writePause = 20 * time.Millisecond
)

// insist repeats do while others change the same object at the same time, who may be as many as there are clusters that
// join.
func insist(ctx context.Context, do func() error) error {
	return kube.RetryOnWithBackoff(ctx, wait.Backoff{Steps: writeTries, Duration: writePause}, kube.IsStaleWrite, do)
}

// allowed leaves out of err that somebody may not do something: what he cannot take back is left, and keeps nobody from
// going on.
func allowed(err error) error {
	var several interface{ Unwrap() []error }
	if errors.As(err, &several) {
		rest := slices.Clone(several.Unwrap())
		for i := range rest {
			rest[i] = allowed(rest[i])
		}
		return errors.Join(rest...)
	}
	if apierrors.IsForbidden(err) {
		return nil
	}
	return err
}
