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

// requests sees the agent's requests to the hub.
type requests struct {
	// mu guards what follows.
	mu   sync.Mutex
	seen []string
	// failed are those that were not answered as they should be.
	failed []string
	// away lets all requests fail.
	away bool
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (q *requests) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		q.mu.Lock()
		away := q.away
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

func (q *requests) setAway(away bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.away = away
}

// take returns what was seen since it was called last.
func (q *requests) take() (seen, failed []string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	seen, failed = q.seen, q.failed
	q.seen, q.failed = nil, nil
	return seen, failed
}

// breaker lets some writes to the member through, and then nothing.
type breaker struct {
	// mu guards the fields below.
	mu    sync.Mutex
	armed bool
	left  int
	// broken is closed when the first request is refused.
	broken chan struct{}
}

func newBreaker(writes int) *breaker { return &breaker{left: writes, broken: make(chan struct{})} }

func (b *breaker) arm() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.armed = true
}

func (b *breaker) allow(method string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.armed || method == http.MethodGet && b.left >= 0 {
		return true
	}
	if b.left == 0 {
		close(b.broken)
	}
	b.left--
	return b.left >= 0
}

func (b *breaker) wrap(member *rest.Config) *rest.Config {
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

// journal keeps a log.
type journal struct {
	// mu guards lines.
	mu    sync.Mutex
	lines []string
}

func (j *journal) logger() logr.Logger {
	return funcr.New(func(_, line string) {
		j.mu.Lock()
		defer j.mu.Unlock()
		j.lines = append(j.lines, time.Now().Format("05.000 ")+line)
	}, funcr.Options{})
}

// with returns the lines that hold text.
func (j *journal) with(text string) []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(j.lines), func(line string) bool { return !strings.Contains(line, text) })
}

// ailment makes a member say of itself that it is not well, while it lasts.
type ailment struct{ lasts atomic.Bool }

func (a *ailment) wrap(member *rest.Config) *rest.Config {
	config := rest.CopyConfig(member)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if a.lasts.Load() && strings.HasSuffix(r.URL.Path, "z") {
				return &http.Response{StatusCode: http.StatusInternalServerError, Body: http.NoBody, Request: r}, nil
			}
			return next.RoundTrip(r)
		})
	})
	return config
}
