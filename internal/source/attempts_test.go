package source_test

import (
	"errors"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/source"
)

// awaitResult calls fetch until its error is no PendingError, and returns the result. On a busy machine, a single call
// may not wait long enough.
func awaitResult[V any](fetch func() (V, error)) (V, error) {
	for {
		result, err := fetch()
		if _, isPending := errors.AsType[*source.PendingError](err); !isPending {
			return result, err
		}
	}
}

func TestFailingRepositoryIsRetriedWithGrowingPauses(t *testing.T) {
	t.Parallel()
	unavailable := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
	server := newCountingServer(unavailable)
	address, clock := serve(t, server), clocktesting.NewFakePassiveClock(time.Unix(0, 0))
	charts, err := source.NewCharts(t.TempDir(), clock)
	if err != nil {
		t.Fatal(err)
	}
	secret := strings.Replace(address, "http://", "http://me:s%3Acret@", 1) + "?token=s3cret"
	want := "chart hello 0.1.0 in " + address + ": get " + address + "/index.yaml: the server returned 503 Service Unavailable"
	requests := 0
	fetch := func(step, address, name, revision string, isRequested bool) {
		t.Helper()
		_, err := charts.Fetch(t.Context(), helmChart(address, name, "0.1.0"), source.Login{}, source.Verification{}, func() string { return revision })
		if isRequested {
			requests++
		}
		if got := server.countRequests("/index.yaml"); err == nil || got != requests {
			t.Fatalf("%s: got %d requests, want %d; error %v", step, got, requests, err)
		}
		if name == "hello" && !strings.Contains(secret, address) && err.Error() != want {
			t.Errorf("%s: got %v, want %s", step, err, want)
		}
	}
	fetch("first", address, "hello", "one", true)
	fetch("at once", address, "hello", "one", false)
	fetch("another chart", address, "other", "one", false)
	fetch("a new spec", address, "hello", "two", true)
	fetch("the new spec again", address, "hello", "two", false)
	fetch("the old spec", address, "hello", "one", false)
	now := time.Unix(0, 0)
	for _, pause := range []int{20, 40, 80, 160, 300, 300} {
		now = now.Add(time.Duration(pause-1) * time.Second)
		clock.SetTime(now)
		fetch("before the pause ends", address, "hello", "two", false)
		now = now.Add(time.Second)
		clock.SetTime(now)
		fetch("after the pause", address, "hello", "two", true)
	}
	if _, err := charts.Fetch(t.Context(), helmChart(address, "hello", "0.1.0"), source.Login{Username: "other"}, source.Verification{}, nil); err == nil || server.countRequests("/index.yaml") != requests+1 {
		t.Errorf("with another login: got %d requests, want %d", server.countRequests("/index.yaml"), requests+1)
	}
	if _, err := charts.Fetch(t.Context(), helmChart(secret, "hello", "0.1.0"), source.Login{}, source.Verification{}, nil); err == nil || strings.Contains(err.Error(), "cret") {
		t.Errorf("got %v, want an error without credentials", err)
	}
	server.setHandler(exampleRepository(t))
	clock.SetTime(now.Add(5 * time.Minute))
	if _, err := charts.Fetch(t.Context(), helmChart(address, "hello", "0.1.0"), source.Login{}, source.Verification{}, nil); err != nil {
		t.Errorf("got %v from a repository that is available again", err)
	}
}

func TestOneFailingChartDoesNotFailItsRepository(t *testing.T) {
	t.Parallel()
	archive, err := examples.Chart{}.Archive()
	if err != nil {
		t.Fatal(err)
	}
	repository := at(map[string]string{"/hello.tgz": string(archive), "/index.yaml": "entries:\n" +
		"  hello:\n  - {version: 0.1.0, urls: [hello.tgz]}\n  broken:\n  - {version: 0.1.0, urls: [broken.tgz]}\n"})
	for name, test := range map[string]struct {
		status               int
		want                 string
		isRepositoryAffected bool
	}{
		"not an archive":    {http.StatusOK, "read the archive", false},
		"bad gateway":       {http.StatusBadGateway, "502 Bad Gateway", false},
		"too many requests": {http.StatusTooManyRequests, "429 Too Many Requests", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := newCountingServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/broken.tgz" {
					w.WriteHeader(test.status)
				} else {
					repository.ServeHTTP(w, r)
				}
			}))
			address, charts := serve(t, server), newCharts(t, t.TempDir())
			for range 2 {
				_, err := charts.Fetch(t.Context(), helmChart(address, "broken", "0.1.0"), source.Login{}, source.Verification{}, nil)
				wantTexts(t, err, test.want)
			}
			if got := server.countRequests("/broken.tgz"); got != 1 {
				t.Errorf("the broken archive was requested %d times, want once", got)
			}
			_, err := charts.Fetch(t.Context(), helmChart(address, "hello", "0.1.0"), source.Login{}, source.Verification{}, nil)
			if (err != nil) != test.isRepositoryAffected {
				t.Errorf("another chart: got error %v, want an error: %t", err, test.isRepositoryAffected)
			}
		})
	}
}

// TestArchiveOnUnresponsiveHostFailsOneChart uses an index that names an archive on a host that does not respond.
func TestArchiveOnUnresponsiveHostFailsOneChart(t *testing.T) {
	t.Parallel()
	archive, err := examples.Chart{}.Archive()
	if err != nil {
		t.Fatal(err)
	}
	server := newCountingServer(at(map[string]string{"/hello.tgz": string(archive), "/index.yaml": "entries:\n" +
		"  hello:\n  - {version: 0.1.0, urls: [hello.tgz]}\n  broken:\n  - {version: 0.1.0, urls: ['http://127.0.0.1:1/broken.tgz']}\n"}))
	address, charts := serve(t, server), newCharts(t, t.TempDir())
	_, err = charts.Fetch(t.Context(), helmChart(address, "broken", "0.1.0"), source.Login{}, source.Verification{}, nil)
	wantTexts(t, err, "connection refused")
	if _, err := charts.Fetch(t.Context(), helmChart(address, "hello", "0.1.0"), source.Login{}, source.Verification{}, nil); err != nil {
		t.Errorf("another chart of the repository: %v", err)
	}
}

func TestCallersDoNotWaitForHangingRepository(t *testing.T) {
	t.Parallel()
	answer := make(chan struct{})
	var answerOnce sync.Once
	t.Cleanup(func() { answerOnce.Do(func() { close(answer) }) })
	example := exampleRepository(t)
	address := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		<-answer
		example.ServeHTTP(w, r)
	}))
	clock := clocktesting.NewFakePassiveClock(time.Unix(0, 0))
	charts, err := source.NewCharts(t.TempDir(), clock)
	if err != nil {
		t.Fatal(err)
	}
	fetch := func(name string) (*source.PendingError, error) {
		_, err := charts.Fetch(t.Context(), helmChart(address, name, "0.1.0"), source.Login{}, source.Verification{}, nil)
		pending, _ := errors.AsType[*source.PendingError](err)
		return pending, err
	}
	if pending, err := fetch("hello"); pending == nil || pending.After <= 0 {
		t.Fatalf("got %v, want a PendingError", err)
	}
	clock.SetTime(time.Unix(7, 0))
	began := time.Now()
	for range 100 {
		if pending, err := fetch("other"); pending == nil || pending.After != 7*time.Second {
			t.Fatalf("got %v, want a PendingError for 7 s", err)
		}
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("100 callers waited %s in total", took)
	}
	answerOnce.Do(func() { close(answer) })
	for pending, err := fetch("hello"); err != nil; pending, err = fetch("hello") {
		if pending == nil {
			t.Fatal(err)
		}
	}
}
