package hub

import (
	"context"
	"errors"
	"testing"
	"time"

	"k8s.io/client-go/tools/leaderelection/resourcelock"
	testclock "k8s.io/utils/clock/testing"
)

// storedLock is a lock whose record others change.
type storedLock struct {
	resourcelock.Interface
	record resourcelock.LeaderElectionRecord
}

func (l *storedLock) Identity() string { return "me" }

func (l *storedLock) Get(context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	return &l.record, nil, nil
}

func (l *storedLock) Update(_ context.Context, record resourcelock.LeaderElectionRecord) error {
	l.record = record
	return nil
}

// TestLeadIsNotAcquiredAgain lets another hub become the leader and end, while this one cannot renew its Lease. The
// controllers of this process must not continue.
func TestLeadIsNotAcquiredAgain(t *testing.T) {
	t.Parallel()
	clock := testclock.NewFakeClock(time.Unix(1e9, 0))
	stored, tracker := &storedLock{}, &leaseTracker{clock: clock}
	lock := &trackedLock{Interface: stored, leaseTracker: tracker}
	mine := resourcelock.LeaderElectionRecord{HolderIdentity: "me", LeaseDurationSeconds: int(electorDuration.Seconds())}
	acquire := func() error {
		if _, _, err := lock.Get(t.Context()); err != nil {
			return err
		}
		return lock.Update(t.Context(), mine)
	}
	stored.record.HolderIdentity = "another one"
	if err := acquire(); err != nil {
		t.Fatalf("acquire the lead after another hub: %v", err)
	}
	if got := time.Duration(stored.record.LeaseDurationSeconds) * time.Second; got != leaseDuration {
		t.Errorf("other hubs acquire the Lease after %s, want %s", got, leaseDuration)
	}
	clock.Step(writeDeadline + time.Second)
	if tracker.canWrite() {
		t.Error("a hub that has not renewed its Lease can write")
	}
	if err := acquire(); err != nil || !tracker.canWrite() {
		t.Errorf("renew the Lease, which nobody else has acquired: %v, can write: %t", err, tracker.canWrite())
	}
	stored.record.HolderIdentity = ""
	if err := acquire(); !errors.Is(err, errLeadershipLost) {
		t.Errorf("acquire the Lease that another hub had: got %v, want %v", err, errLeadershipLost)
	}
	if tracker.canWrite() {
		t.Error("a hub that has lost the lead can write")
	}
}

// TestReleasedLeadWritesNothing lets a hub release its Lease: another one is the leader at once.
func TestReleasedLeadWritesNothing(t *testing.T) {
	t.Parallel()
	clock := testclock.NewFakeClock(time.Unix(1e9, 0))
	tracker := &leaseTracker{clock: clock}
	lock := &trackedLock{Interface: &storedLock{}, leaseTracker: tracker}
	for _, holder := range []string{"me", ""} {
		if err := lock.Update(t.Context(), resourcelock.LeaderElectionRecord{HolderIdentity: holder}); err != nil {
			t.Fatal(err)
		}
		if got, want := tracker.canWrite(), holder == "me"; got != want {
			t.Errorf("can write with holder %q: got %t, want %t", holder, got, want)
		}
	}
}
