package karmada

import (
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"k8s.io/client-go/rest"
)

// requestRecorder records the agent's requests to the hub.
type requestRecorder struct {
	// mu guards the fields below.
	mu   sync.Mutex
	seen []string
	// failed are the requests that failed.
	failed []string
	// isAway makes all requests fail.
	isAway bool
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (q *requestRecorder) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		q.mu.Lock()
		away := q.isAway
		q.seen = append(q.seen, r.Method+" "+r.URL.Path)
		q.mu.Unlock()
		if away {
			return nil, errors.New("the hub is away")
		}
		response, err := next.RoundTrip(r)
		q.mu.Lock()
		defer q.mu.Unlock()
		switch {
		case err != nil && r.Context().Err() == nil:
			q.failed = append(q.failed, r.Method+" "+r.URL.Path+": "+err.Error())
		case err == nil && response.StatusCode >= http.StatusBadRequest:
			q.failed = append(q.failed, r.Method+" "+r.URL.Path+": "+response.Status)
		}
		return response, err
	})
}

func (q *requestRecorder) setAway(away bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.isAway = away
}

// takeRequests returns the requests since the previous call.
func (q *requestRecorder) takeRequests() (seen, failed []string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	seen, failed = q.seen, q.failed
	q.seen, q.failed = nil, nil
	return seen, failed
}

// writeLimiter allows a number of writes to the member, and then refuses all requests.
type writeLimiter struct {
	// mu guards the fields below.
	mu       sync.Mutex
	isActive bool
	left     int
	// refused is closed when the first request is refused.
	refused chan struct{}
}

func newWriteLimiter(writes int) *writeLimiter {
	return &writeLimiter{left: writes, refused: make(chan struct{})}
}

func (b *writeLimiter) activate() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.isActive = true
}

func (b *writeLimiter) allow(method string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.isActive || method == http.MethodGet && b.left >= 0 {
		return true
	}
	if b.left == 0 {
		close(b.refused)
	}
	b.left--
	return b.left >= 0
}

func (b *writeLimiter) wrap(member *rest.Config) *rest.Config {
	config := rest.CopyConfig(member)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if !b.allow(r.Method) {
				return nil, errors.New("cut off")
			}
			return next.RoundTrip(r)
		})
	})
	return config
}

// logRecorder records a log.
type logRecorder struct {
	// mu guards lines.
	mu    sync.Mutex
	lines []string
}

func (j *logRecorder) logger() logr.Logger {
	return funcr.New(func(_, line string) {
		j.mu.Lock()
		defer j.mu.Unlock()
		j.lines = append(j.lines, time.Now().Format("05.000 ")+line)
	}, funcr.Options{})
}

// linesWith returns the lines that contain text.
func (j *logRecorder) linesWith(text string) []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(j.lines), func(line string) bool { return !strings.Contains(line, text) })
}

// unhealthyMember makes the health checks of a member fail while it is active.
type unhealthyMember struct{ isActive atomic.Bool }

func (a *unhealthyMember) wrap(member *rest.Config) *rest.Config {
	config := rest.CopyConfig(member)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if a.isActive.Load() && strings.HasSuffix(r.URL.Path, "z") {
				return &http.Response{StatusCode: http.StatusInternalServerError, Body: http.NoBody, Request: r}, nil
			}
			return next.RoundTrip(r)
		})
	})
	return config
}
