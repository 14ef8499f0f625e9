package source

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/http"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/phase"
)

const (
	// maxWait is the time for which the first caller waits for a request to a repository. Then it gets a PendingError.
	maxWait = 2 * time.Second
	// sharedWait is the age of a request up to which further callers wait for it, see attempts.join.
	sharedWait = 100 * time.Millisecond
	// minRetry is the shortest PendingError.After of a request.
	minRetry = 250 * time.Millisecond
	// A repository or a URL is not requested for minPause after a failure, and for twice the former pause after each
	// further one, up to maxPause.
	minPause = 10 * time.Second
	maxPause = 5 * time.Minute
)

// PendingError is returned while a repository or a URL has not responded yet. The request continues, and the caller
// must try again after After.
type PendingError struct {
	After time.Duration
	// repository is the URL without credentials.
	repository string
}

// Error names the repository.
func (e *PendingError) Error() string { return "waiting for " + e.repository }

// attempts sends requests to repositories, whose results are of type V. It remembers which ones are under way, and
// which ones failed.
type attempts[V any] struct {
	clock clock.PassiveClock

	mu    sync.Mutex // guards byKey; no other lock is acquired while it is held
	byKey map[string]*requestState[V]
}

// requestState is the state of the requests to one repository with one login, or for one chart in it.
type requestState[V any] struct {
	// running has the requests that are under way, by the key of the chart.
	running map[string]*flight[V]
	backoff
	// revisions identify the specs that have been tried since the first failure, see Charts.Fetch.
	revisions map[string]bool
}

// flight is a request that is under way, or has ended. Its callers share the result.
type flight[V any] struct {
	start time.Time
	// done is closed when result and err are set.
	done   chan struct{}
	result V
	err    error
}

// backoff is the pause after failed requests, which grows with each failure.
type backoff struct {
	// err is the last error, nil after a success. Nothing is requested before retryAt.
	err     error
	pause   time.Duration
	retryAt time.Time
}

// fail records an error at now.
func (b *backoff) fail(err error, now time.Time) {
	b.err = err
	b.pause = min(max(2*b.pause, minPause), maxPause)
	b.retryAt = now.Add(b.pause)
}

func newAttempts[V any](clock clock.PassiveClock) *attempts[V] {
	return &attempts[V]{clock: clock, byKey: map[string]*requestState[V]{}}
}

// fetch returns the result of send, which sends a request. Callers with the same request share one call of send. It
// returns a PendingError if the caller must not wait for the result any longer, and the errors of check.
func (a *attempts[V]) fetch(
	ctx context.Context, request chartRequest, revision func() string, send func(ctx context.Context) (V, error),
) (result V, err error) {
	current, wait, err := a.join(request, revision, func() (V, error) {
		// Other callers may wait for the same result: the request continues even if the first caller's context ends.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), fetchTimeout)
		defer cancel()
		return send(ctx)
	})
	if err != nil {
		return result, err
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return result, ctx.Err()
	case <-current.done:
		return current.result, current.err
	case <-timer.C:
		return result, pendingError(request, a.clock.Since(current.start))
	}
}

// join returns the flight of a request, and the time for which the caller waits for it. It begins the flight if there
// is none.
//
// The caller that sends the only request to a repository waits for maxWait: a repository that hangs occupies its worker
// and no other one. All other callers wait only until their flight is sharedWait old. That is enough for a fast
// repository, and for a cached index, with which charts with a range of versions are found. If the request takes
// longer, they try again, see pendingError.
func (a *attempts[V]) join(request chartRequest, revision func() string, send func() (V, error)) (current *flight[V], wait time.Duration, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.check(request, revision); err != nil {
		return nil, 0, err
	}
	repository := a.get(request.repositoryKey())
	if current, ok := repository.running[request.key()]; ok {
		return current, sharedWait - a.clock.Since(current.start), nil
	}
	wait = sharedWait
	if len(repository.running) == 0 {
		wait = maxWait
	}
	current = &flight[V]{start: a.clock.Now(), done: make(chan struct{})}
	repository.running[request.key()] = current
	go func() {
		defer close(current.done)
		current.result, current.err = send()
		a.end(request, current.err, revision)
	}()
	return current, wait, nil
}

// pendingError returns the error for a request of that age. Until maxWait the callers try again after half the age. So
// they get the result at most minRetry, or half the time of the request, after the caller that waits. A slower request
// is checked less often, since each check is a reconcile of a summary.
func pendingError(request chartRequest, age time.Duration) error {
	after := max(age/2, minRetry)
	if age >= maxWait {
		after = age
	}
	return &PendingError{After: after, repository: redacted(request.repositoryURL)}
}

// check returns an error if a chart must not be requested now: the last error of the repository or of the chart, or a
// PendingError. A spec that has not been tried since the first failure is tried at once. The caller must hold mu.
func (a *attempts[V]) check(request chartRequest, revision func() string) error {
	for _, key := range []string{request.repositoryKey(), request.key()} {
		known, ok := a.byKey[key]
		if !ok || known.err == nil {
			continue
		}
		if revision != nil && !known.revisions[revision()] {
			known.revisions[revision()] = true
			return nil
		}
		if len(known.running) > 0 || a.clock.Now().Before(known.retryAt) {
			return known.err
		}
	}
	if known, ok := a.byKey[request.repositoryKey()]; ok {
		if age := a.age(known); age >= maxWait {
			return pendingError(request, age)
		}
	}
	return nil
}

// age returns the age of the oldest request that is under way. The caller must hold mu.
func (a *attempts[V]) age(known *requestState[V]) time.Duration {
	var oldest time.Duration
	for _, current := range known.running {
		oldest = max(oldest, a.clock.Since(current.start))
	}
	return oldest
}

// end records the result of a request. After an error of the whole repository, no chart in it is requested for a while.
// After any other error, only the same chart is not requested.
func (a *attempts[V]) end(request chartRequest, err error, revision func() string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	repository := a.get(request.repositoryKey())
	delete(repository.running, request.key())
	switch {
	case isRepositoryError(err):
		a.fail(repository, err, revision)
	case isRetriable(err):
		repository.reset()
		a.fail(a.get(request.key()), err, revision)
	default:
		repository.reset()
		delete(a.byKey, request.key())
	}
	maps.DeleteFunc(a.byKey, func(_ string, known *requestState[V]) bool {
		return len(known.running) == 0 && (known.err == nil || a.clock.Since(known.retryAt) > 2*maxPause)
	})
}

// fail records an error. The caller must hold mu.
func (a *attempts[V]) fail(known *requestState[V], err error, revision func() string) {
	known.fail(err, a.clock.Now())
	if revision != nil {
		known.revisions[revision()] = true
	}
}

func (a *attempts[V]) get(key string) *requestState[V] {
	known, ok := a.byKey[key]
	if !ok {
		known = &requestState[V]{running: map[string]*flight[V]{}, revisions: map[string]bool{}}
		a.byKey[key] = known
	}
	return known
}

// reset removes the failures. Requests that are running stay.
func (s *requestState[V]) reset() {
	s.backoff = backoff{}
	clear(s.revisions)
}

// archiveError is an error of the download of a chart. The archive can be on another host than the index.
type archiveError struct{ error }

// Unwrap returns the wrapped error.
func (e *archiveError) Unwrap() error { return e.error }

// isRepositoryError returns whether an error concerns all charts of a repository: no response, too many requests, or a
// server error for its index. Any other error for an archive concerns one chart.
func isRepositoryError(err error) bool {
	_, isArchive := errors.AsType[*archiveError](err)
	if _, isNetwork := errors.AsType[net.Error](err); isNetwork {
		return !isArchive
	}
	if response, ok := errors.AsType[*responseError](err); ok {
		return response.code == http.StatusTooManyRequests || response.isIndex && response.code >= http.StatusInternalServerError
	}
	return false
}

// isRetriable returns whether a later request can succeed although neither the profile nor the repository is changed. A
// failed verification has a cache of its own.
func isRetriable(err error) bool {
	_, isInvalid := errors.AsType[phase.Invalid](err)
	return err != nil && !isInvalid && !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrUnverified)
}
