package engine

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// ErrTimeUp is the cause of a context whose patience has run out.
var ErrTimeUp = errors.New("not everything was done in time; the next attempt goes on from there")

// patience is how long the caller of an Engine waits for the cluster, without the time in which others hold what it asks for.
type patience struct {
	answered atomic.Bool

	// mu guards what follows.
	mu      sync.Mutex
	timer   *time.Timer
	left    time.Duration // when the timer was started last
	since   time.Time     // when that was
	waiting int           // for what others hold
}

type patienceKey struct{}

// WithPatience returns a context for what an Engine is asked for, which ends with ErrTimeUp as its cause when the Engine has worked on it for
// limit. Waiting until another pass has ended does not count. The caller calls cancel when it is done.
func WithPatience(ctx context.Context, limit time.Duration) (patient context.Context, cancel context.CancelFunc) {
	patient, end := context.WithCancelCause(ctx)
	p := &patience{left: limit, since: time.Now()}
	p.timer = time.AfterFunc(limit, func() { end(ErrTimeUp) })
	return context.WithValue(patient, patienceKey{}, p), func() {
		p.timer.Stop()
		end(nil)
	}
}

// Answered says whether the cluster has answered any request that was made under a context of WithPatience.
func Answered(ctx context.Context) bool {
	p, ok := ctx.Value(patienceKey{}).(*patience)
	return ok && p.answered.Load()
}

// pause stops the clock of ctx until the function that it returns is called.
func pause(ctx context.Context) (resume func()) {
	p, ok := ctx.Value(patienceKey{}).(*patience)
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

// notingAnswers makes requests tell the patience that they are made under of their answers.
func notingAnswers(next http.RoundTripper) http.RoundTripper {
	return noting{next}
}

type noting struct{ next http.RoundTripper }

// RoundTrip makes noting an http.RoundTripper.
func (n noting) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := n.next.RoundTrip(r)
	if p, ok := r.Context().Value(patienceKey{}).(*patience); ok && err == nil {
		p.answered.Store(true)
	}
	return answer, err
}

// WrappedRoundTripper lets client-go find the transport below.
func (n noting) WrappedRoundTripper() http.RoundTripper { return n.next }
