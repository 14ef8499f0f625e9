package agent

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	clocktesting "k8s.io/utils/clock/testing"
)

func TestServedAPIsAreReadLessOftenWhileDefinitionsChange(t *testing.T) {
	t.Parallel()
	var b kindsBackoff
	now := time.Now()
	next := func(quiet time.Duration) time.Duration {
		b.lastRead = now
		now = now.Add(quiet)
		delay := b.delay(now)
		now = now.Add(delay)
		return delay / time.Second
	}
	var got []time.Duration
	for range 7 {
		got = append(got, next(time.Second))
	}
	got = append(got, next(time.Minute), next(time.Second))
	if diff := cmp.Diff([]time.Duration{2, 4, 8, 16, 30, 30, 30, 2, 4}, got); diff != "" {
		t.Errorf("delays in seconds (-want +got):\n%s", diff)
	}
}

// TestForbiddenWatchOfDefinitionsIsLoggedOnce watches on a member that forbids all requests.
func TestForbiddenWatchOfDefinitionsIsLoggedOnce(t *testing.T) {
	t.Parallel()
	requests := make(chan struct{}, 100)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		_, _ = w.Write([]byte(`{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden", "code": 403}`))
		select {
		case requests <- struct{}{}:
		default:
		}
	}))
	t.Cleanup(server.Close)
	metadataClient, err := metadata.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	lines := make(chan string, 100)
	ctx := logr.NewContext(t.Context(), funcr.New(func(_, line string) { lines <- line }, funcr.Options{}))
	f := newClusterFacts(&rest.Config{}, metadataClient, clocktesting.NewFakeClock(time.Now()))
	go f.watchKinds(ctx)
	t.Log(<-lines, <-lines) // one for each resource
	for range len(requests) + 4 {
		<-requests
	}
	if len(lines) != 0 {
		t.Errorf("logged again: %s", <-lines)
	}
}
