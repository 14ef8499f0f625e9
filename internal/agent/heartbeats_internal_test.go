package agent

import (
	"slices"
	"testing"
	"time"

	"github.com/towline/towline/internal/fleet/heartbeats"
)

func TestFailedHeartbeatIsSentAgainSoon(t *testing.T) {
	t.Parallel()
	for interval, want := range map[time.Duration][]time.Duration{
		defaultHeartbeat: {5 * time.Second, 10 * time.Second, 10 * time.Second, 10 * time.Second},
		time.Second:      {time.Second, time.Second, time.Second, time.Second},
	} {
		var got []time.Duration
		for retry := time.Duration(0); len(got) < len(want); got = append(got, retry) {
			retry = nextHeartbeatRetry(retry, interval)
		}
		if !slices.Equal(got, want) {
			t.Errorf("retries with interval %s: got %v, want %v", interval, got, want)
		}
	}
}

func TestTwoMissedHeartbeatsFitIntoTheLeaseDuration(t *testing.T) {
	t.Parallel()
	if 2*defaultHeartbeat >= heartbeats.LeaseDuration || heartbeats.LeaseDuration >= 45*time.Second {
		t.Errorf("interval %s with a Lease duration of %s", defaultHeartbeat, heartbeats.LeaseDuration)
	}
}
