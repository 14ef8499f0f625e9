package hub

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/utils/clock"
	testclock "k8s.io/utils/clock/testing"
)

// storedLock is a lock whose record the test changes.
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

// canWrite returns whether a write may be sent.
func canWrite(t *leaseTracker) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.canWrite()
}

// TestLostLeadershipIsNotAcquiredAgain makes another hub the leader for some time, while this hub cannot renew its
// Lease. The controllers of this process must not continue.
func TestLostLeadershipIsNotAcquiredAgain(t *testing.T) {
	t.Parallel()
	clock := testclock.NewFakeClock(time.Unix(1e9, 0))
	stored, tracker := &storedLock{}, newLeaseTracker(clock)
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
	if canWrite(tracker) {
		t.Error("a hub that has not renewed its Lease can write")
	}
	if err := acquire(); err != nil || !canWrite(tracker) {
		t.Errorf("renew the Lease, which no other hub has acquired: %v, can write: %t", err, canWrite(tracker))
	}
	stored.record.HolderIdentity = ""
	if err := acquire(); !errors.Is(err, errLeadershipLost) {
		t.Errorf("acquire the Lease that another hub had: got %v, want %v", err, errLeadershipLost)
	}
	if canWrite(tracker) {
		t.Error("a hub that has lost the lead can write")
	}
}

// TestReleasedLeaderWritesNothing releases the Lease of a hub: another hub can be the leader at once.
func TestReleasedLeaderWritesNothing(t *testing.T) {
	t.Parallel()
	clock := testclock.NewFakeClock(time.Unix(1e9, 0))
	tracker := newLeaseTracker(clock)
	lock := &trackedLock{Interface: &storedLock{}, leaseTracker: tracker}
	for _, holder := range []string{"me", ""} {
		if err := lock.Update(t.Context(), resourcelock.LeaderElectionRecord{HolderIdentity: holder}); err != nil {
			t.Fatal(err)
		}
		if got, want := canWrite(tracker), holder == "me"; got != want {
			t.Errorf("can write with holder %q: got %t, want %t", holder, got, want)
		}
	}
}

// dialer is a transport whose connections are never established.
type dialer struct{}

func (dialer) RoundTrip(request *http.Request) (*http.Response, error) {
	<-request.Context().Done()
	return nil, request.Context().Err()
}

// TestUnsentWritesAreCanceled sends requests that wait for a connection. A write must not be sent when another hub can
// be the leader.
func TestUnsentWritesAreCanceled(t *testing.T) {
	t.Parallel()
	mine := resourcelock.LeaderElectionRecord{HolderIdentity: "me"}
	for name, loseLead := range map[string]func(*leaseTracker){
		"not renewed":       func(*leaseTracker) { <-time.After(time.Second) },
		"another hub leads": func(tracker *leaseTracker) { tracker.recordLeaseRead("another one", "me") },
		"released": func(tracker *leaseTracker) {
			tracker.recordLeaseWrite(time.Now(), resourcelock.LeaderElectionRecord{}, "me")
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			tracker := newLeaseTracker(clock.RealClock{})
			tracker.recordLeaseWrite(time.Now(), mine, "me")
			write, read := dial(t, tracker, http.MethodPut), dial(t, tracker, http.MethodGet)
			<-time.After(writeDeadline / 2)
			tracker.recordLeaseWrite(time.Now(), mine, "me")
			<-time.After(writeDeadline - time.Second)
			synctest.Wait()
			if len(write) > 0 {
				t.Errorf("%s: a write is canceled although the Lease was renewed", name)
			}
			loseLead(tracker)
			synctest.Wait()
			if len(write) == 0 {
				t.Errorf("%s: the write is not canceled", name)
			} else if err := <-write; !errors.Is(err, errNotRenewed) {
				t.Errorf("%s: the error of the write is %v, want %v", name, err, errNotRenewed)
			}
			if len(read) > 0 {
				t.Errorf("%s: a read is canceled", name)
			}
		})
	}
}

// dial sends a request through a dialer, and returns a channel with its error.
func dial(t *testing.T, tracker *leaseTracker, method string) <-chan error {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, "https://hub", nil)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		_, err := tracker.fenceWrites(dialer{}).RoundTrip(request)
		ended <- err
	}()
	return ended
}
