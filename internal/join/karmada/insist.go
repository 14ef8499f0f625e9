package karmada

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

const (
	// writeTries bounds how often an object is written again that others change at the same time.
	writeTries = 20
	// writePause is the time between two tries.
	writePause = 20 * time.Millisecond
)

// insist repeats do while others change the same object at the same time. The helper of client-go that does the like takes a request that
// was cut off for one that succeeded.
func insist(ctx context.Context, do func() error) error {
	var err error
	for range writeTries {
		if err = do(); !changedMeanwhile(err) {
			return err
		}
		pause := time.NewTimer(writePause)
		select {
		case <-ctx.Done():
			pause.Stop()
			return ctx.Err()
		case <-pause.C:
		}
	}
	return err
}

// changedMeanwhile says whether someone else was faster, so that looking again helps.
func changedMeanwhile(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err)
}
