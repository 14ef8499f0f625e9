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

// stallTimer limits the time that an Engine works on a cluster for one caller. It stops while the Engine waits for
// locks.
type stallTimer struct {
	answered atomic.Bool

	// mu guards the fields below.
	mu      sync.Mutex
	timer   *time.Timer
	left    time.Duration // when the timer was last started
	since   time.Time     // the time of that start
	waiting int           // number of waits for locks
}

type stallTimerKey struct{}

// WithWorkLimit returns a context for a call of an Engine. It ends with the cause ErrTimeUp when the Engine has worked
// for limit. Waiting for locks does not count. The caller must call cancel.
func WithWorkLimit(ctx context.Context, limit time.Duration) (limited context.Context, cancel context.CancelFunc) {
	limited, end := context.WithCancelCause(ctx)
	p := &stallTimer{left: limit, since: time.Now()}
	p.timer = time.AfterFunc(limit, func() { end(ErrTimeUp) })
	return context.WithValue(limited, stallTimerKey{}, p), func() {
		p.timer.Stop()
		end(nil)
	}
}

// Answered returns whether the cluster has responded to a request with this context of WithWorkLimit.
func Answered(ctx context.Context) bool {
	p, ok := ctx.Value(stallTimerKey{}).(*stallTimer)
	return ok && p.answered.Load()
}

// pauseStallTimer stops the timer of ctx until resume is called.
func pauseStallTimer(ctx context.Context) (resume func()) {
	p, ok := ctx.Value(stallTimerKey{}).(*stallTimer)
	if !ok {
		return func() {}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.waiting++; p.waiting == 1 {
		p.timer.Stop()
		p.left -= time.Since(p.since)
	}
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.waiting--; p.waiting == 0 && ctx.Err() == nil {
			p.since = time.Now()
			p.timer.Reset(p.left)
		}
	}
}

// requestLimit is the default of Options.RequestLimit. It is the default limit of the API server.
const requestLimit = time.Minute

// limitRequests wraps a transport. It ends each request after limit, its response included, except watches. It records
// in the stall timer of a request's context that the cluster responds.
func limitRequests(limit time.Duration) transport.WrapperFunc {
	return func(next http.RoundTripper) http.RoundTripper { return requestLimiter{next, limit} }
}

type requestLimiter struct {
	next  http.RoundTripper
	limit time.Duration
}

// RoundTrip implements http.RoundTripper.
func (n requestLimiter) RoundTrip(r *http.Request) (*http.Response, error) {
	ctx, cancel := r.Context(), func() {}
	if watch := r.URL.Query().Get("watch"); watch == "" || watch == "false" {
		ctx, cancel = context.WithTimeout(ctx, n.limit)
	}
	response, err := n.next.RoundTrip(r.WithContext(ctx))
	if err != nil {
		cancel()
		return nil, err
	}
	response.Body = &limitedBody{response.Body, cancel}
	if p, ok := ctx.Value(stallTimerKey{}).(*stallTimer); ok {
		p.answered.Store(true)
	}
	return response, nil
}

// WrappedRoundTripper lets client-go find the transport below.
func (n requestLimiter) WrappedRoundTripper() http.RoundTripper { return n.next }

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
