package session_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/agent/session"
)

// TestBackoffLoopRetriesSoonAfterALongOutage fails a task for an hour.
func TestBackoffLoopRetriesSoonAfterALongOutage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var last time.Time
		longest, done := time.Duration(0), errors.New("done")
		loop := session.BackoffLoop{
			Clock: clock.RealClock{}, BeforeAttempt: func() {}, IsFinal: func(err error) bool { return errors.Is(err, done) },
			LogError: func(context.Context, error) bool { return true },
		}
		err := loop.Run(t.Context(), "connect", func(context.Context) error {
			if !last.IsZero() {
				longest = max(longest, time.Since(last))
			}
			last = time.Now()
			if time.Since(began) > time.Hour {
				return done
			}
			return errors.New("connection refused")
		})
		if !errors.Is(err, done) || longest > 10*time.Second || longest < time.Second {
			t.Errorf("error %v, the longest delay was %s", err, longest)
		}
	})
}
