package engine

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/transport"
)

// ErrTimeUp is the cause of a context whose limit of WithWorkLimit has expired.
var ErrTimeUp = errors.New("the time limit was reached; the next attempt continues from there")

// workTimer limits the time that an Engine works on a cluster for one caller. The timer is paused while the Engine
// waits for locks.
type workTimer struct {
	answered atomic.Bool

	// mu guards the fields below.
	mu      sync.Mutex
	timer   *time.Timer
	left    time.Duration // the remaining time when the timer was last started
	since   time.Time     // when the timer was last started
	waiting int           // number of waits for locks
}

type workTimerKey struct{}

// WithWorkLimit returns a context for a call of an Engine. It ends with the cause ErrTimeUp when the Engine has worked
// for limit. Waiting for locks does not count. The caller must call cancel.
func WithWorkLimit(ctx context.Context, limit time.Duration) (limited context.Context, cancel context.CancelFunc) {
	limited, end := context.WithCancelCause(ctx)
	t := &workTimer{left: limit, since: time.Now()}
	t.timer = time.AfterFunc(limit, func() { end(ErrTimeUp) })
	return context.WithValue(limited, workTimerKey{}, t), func() {
		t.timer.Stop()
		end(nil)
	}
}

// Answered returns whether the cluster has responded to a request with this context of WithWorkLimit.
func Answered(ctx context.Context) bool {
	t, ok := ctx.Value(workTimerKey{}).(*workTimer)
	return ok && t.answered.Load()
}

// pauseWorkTimer stops the timer of ctx until resume is called.
func pauseWorkTimer(ctx context.Context) (resume func()) {
	t, ok := ctx.Value(workTimerKey{}).(*workTimer)
	if !ok {
		return func() {}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.waiting++; t.waiting == 1 {
		t.timer.Stop()
		t.left -= time.Since(t.since)
	}
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.waiting--; t.waiting == 0 && ctx.Err() == nil {
			t.since = time.Now()
			t.timer.Reset(t.left)
		}
	}
}

// defaultRequestTimeout is the default of Options.RequestTimeout. It is the default limit of the API server.
const defaultRequestTimeout = time.Minute

// limitRequests wraps a transport. It ends each request after limit, its response included, except watches. It records
// in the work timer of a request's context that the cluster responds.
func limitRequests(limit time.Duration) transport.WrapperFunc {
	return func(next http.RoundTripper) http.RoundTripper { return requestLimiter{next, limit} }
}

type requestLimiter struct {
	next  http.RoundTripper
	limit time.Duration
}

// RoundTrip implements http.RoundTripper.
func (l requestLimiter) RoundTrip(r *http.Request) (*http.Response, error) {
	ctx, cancel := r.Context(), func() {}
	if watch := r.URL.Query().Get("watch"); watch == "" || watch == "false" {
		ctx, cancel = context.WithTimeout(ctx, l.limit)
	}
	response, err := l.next.RoundTrip(r.WithContext(ctx))
	if err != nil {
		cancel()
		return nil, err
	}
	response.Body = &limitedBody{response.Body, cancel}
	if t, ok := ctx.Value(workTimerKey{}).(*workTimer); ok {
		t.answered.Store(true)
	}
	return response, nil
}

// WrappedRoundTripper lets client-go find the transport below.
func (l requestLimiter) WrappedRoundTripper() http.RoundTripper { return l.next }

// limitedBody is the body of a response. The limit ends when it is closed.
type limitedBody struct {
	io.ReadCloser
	cancel func()
}

// Close implements io.Closer.
func (b *limitedBody) Close() error {
	defer b.cancel()
	return b.ReadCloser.Close()
}
