package drift_test

import (
	"testing"
	"time"

	"github.com/towline/towline/internal/drift"
)

func TestBackoffDoublesUpToFiveMinutes(t *testing.T) {
	t.Parallel()
	for failures, want := range map[int]time.Duration{
		0: time.Second, 1: 2 * time.Second, 8: 256 * time.Second, 9: 5 * time.Minute, 10: 5 * time.Minute, 1_000_000: 5 * time.Minute,
	} {
		if got := drift.Backoff(failures); got != want {
			t.Errorf("after %d failures: got %s, want %s", failures, got, want)
		}
	}
}
