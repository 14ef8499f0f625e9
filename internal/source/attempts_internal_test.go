package source

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/clock"
)

// TestOneCallerWaitsForARepository runs 20 concurrent callers, for the same chart or for 20 charts of one repository.
func TestOneCallerWaitsForARepository(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		latency    time.Duration // 0: the repository never responds
		hasOneSpec bool
		// want has the number of callers that have returned by each time. A negative number is of callers without a result.
		want map[time.Duration]int
		// wantRetry is the PendingError.After of the callers that waited for a short time.
		wantRetry time.Duration
	}{
		"it never answers":                  {0, true, map[time.Duration]int{sharedWait: -19, maxWait: -1}, minRetry},
		"20 charts, it never answers":       {0, false, map[time.Duration]int{sharedWait: -19, maxWait: -1}, minRetry},
		"it answers at once":                {50 * time.Millisecond, true, map[time.Duration]int{50 * time.Millisecond: 20}, 0},
		"20 charts, it answers at once":     {50 * time.Millisecond, false, map[time.Duration]int{50 * time.Millisecond: 20}, 0},
		"it answers while one caller waits": {300 * time.Millisecond, true, map[time.Duration]int{sharedWait: -19, 300 * time.Millisecond: 1}, minRetry},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				requests, end := newAttempts[string](clock.RealClock{}), make(chan struct{})
				send := func(context.Context) (string, error) {
					if test.latency == 0 {
						<-end
					} else {
						<-time.After(test.latency)
					}
					return "chart", nil
				}
				began := time.Now()
				var mu sync.Mutex // guards got
				got := map[time.Duration]int{}
				var callers sync.WaitGroup
				for i := range 20 {
					request := chartRequest{repositoryURL: "https://charts.example.com", name: "a"}
					if !test.hasOneSpec {
						request.name = string(rune('a' + i))
					}
					callers.Go(func() {
						result, err := requests.fetch(t.Context(), request, nil, send)
						waited := time.Since(began)
						mu.Lock()
						defer mu.Unlock()
						if err == nil && result == "chart" {
							got[waited]++
							return
						}
						got[waited]--
						pending, isPending := errors.AsType[*PendingError](err)
						if !isPending || waited == sharedWait && pending.After != test.wantRetry {
							t.Errorf("after %s: got %v, want a PendingError for %s", waited, err, test.wantRetry)
						}
					})
				}
				callers.Wait()
				close(end)
				if diff := cmp.Diff(test.want, got); diff != "" {
					t.Errorf("callers by the time that they waited (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// TestCallersWaitShortlyForARunningRequest starts callers while a request is running.
func TestCallersWaitShortlyForARunningRequest(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		requests, end := newAttempts[string](clock.RealClock{}), make(chan struct{})
		fetch := func(name string, answer <-chan struct{}) (waited time.Duration, err error) {
			began := time.Now()
			_, err = requests.fetch(t.Context(), chartRequest{repositoryURL: "https://charts.example.com", name: name}, nil, func(context.Context) (string, error) {
				<-answer
				return "", nil
			})
			return time.Since(began), err
		}
		go func() { _, _ = fetch("slow", end) }()
		<-time.After(time.Second)
		waited, err := fetch("slow", end)
		if pending, ok := errors.AsType[*PendingError](err); !ok || waited != 0 || pending.After != time.Second/2 {
			t.Errorf("the same chart: got %v after %s, want a PendingError for half the age of the request at once", err, waited)
		}
		answered := make(chan struct{})
		close(answered)
		if waited, err := fetch("known", answered); err != nil || waited != 0 {
			t.Errorf("a cached chart of the same repository: got %v after %s", err, waited)
		}
		close(end)
	})
}
