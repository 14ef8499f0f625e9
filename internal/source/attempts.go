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
	// sharedWait is the time after the start of a request for which further callers wait for it, see attempts.join.
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
	// awaited names the repository or source, without credentials.
	awaited string
}

// Error names the repository or source.
func (e *PendingError) Error() string { return "waiting for " + e.awaited }

// attempts sends each request to a repository once for all concurrent callers, and delays requests after failures. V is
// the type of the results.
type attempts[V any] struct {
	clock clock.PassiveClock

	mu    sync.Mutex // guards byKey; no other lock is acquired while it is held
	byKey map[string]*requestState[V]
}

// requestState is the state of the requests to one repository with one login, or for one chart in it.
type requestState[V any] struct {
	// running has the unfinished requests, by chartRequest.key.
	running map[string]*flight[V]
	backoff
	// revisions are the revisions of the specs that have been tried since the first failure, see Charts.Fetch.
	revisions map[string]bool
}

// flight is a request that is running or has ended. Its callers share the result.
type flight[V any] struct {
	start time.Time
	// done is closed when result and err are set.
	done   chan struct{}
	result V
	err    error
}

// backoff is the pause after failed requests. It grows with each failure.
type backoff struct {
	// err is the last error, nil after a success. The next request is at retryAt or later.
	err     error
	pause   time.Duration
	retryAt time.Time
}

// recordError begins a pause at now, because of err.
func (b *backoff) recordError(err error, now time.Time) {
	b.err = err
	b.pause = min(max(2*b.pause, minPause), maxPause)
	b.retryAt = now.Add(b.pause)
}

func newAttempts[V any](clock clock.PassiveClock) *attempts[V] {
	return &attempts[V]{clock: clock, byKey: map[string]*requestState[V]{}}
}

// fetch returns the result of send. Callers with the same request share one call of send, which continues after fetch
// has returned. fetch returns a PendingError if the result takes too long, and the last error during the pause after
// it. revision returns the revision of the caller's spec: each new revision is tried once during a pause. It may be
// nil.
func (a *attempts[V]) fetch(
	ctx context.Context, request chartRequest, revision func() string, send func(ctx context.Context) (V, error),
) (result V, err error) {
	current, wait, err := a.join(request, revision, func() (V, error) {
		// Other callers may wait for the same result, so the request continues if the first caller's context ends.
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

// join returns the flight of a request, and the time for which the caller may wait for it. It starts the flight if
// there is none.
//
// The caller that starts the only running request to a repository waits for maxWait, so a repository that hangs blocks
// one worker. All other callers wait until the flight is sharedWait old. That is enough for a fast repository, and for
// a range of versions with a cached index. For a longer request, they get a PendingError and try again.
func (a *attempts[V]) join(request chartRequest, revision func() string, send func() (V, error)) (current *flight[V], wait time.Duration, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.checkAllowed(request, revision); err != nil {
		return nil, 0, err
	}
	repository := a.ensureState(request.repositoryKey())
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
		a.recordResult(request, current.err, revision)
	}()
	return current, wait, nil
}

// pendingError returns the PendingError for a request that has run for age. Until maxWait, After is half the age, so
// that the callers get the result soon after the end of the request. Later, After is the age: each try is a reconcile
// of a summary.
func pendingError(request chartRequest, age time.Duration) error {
	after := max(age/2, minRetry)
	if age >= maxWait {
		after = age
	}
	return &PendingError{After: after, awaited: redacted(request.repositoryURL)}
}

// checkAllowed returns an error if a chart must not be requested now: the last error of the repository or of the chart,
// or a PendingError if the repository hangs. It allows, and records, one attempt of each revision during a pause. The
// caller must hold mu.
func (a *attempts[V]) checkAllowed(request chartRequest, revision func() string) error {
	for _, key := range []string{request.repositoryKey(), request.key()} {
		state, ok := a.byKey[key]
		if !ok || state.err == nil {
			continue
		}
		if revision != nil && !state.revisions[revision()] {
			state.revisions[revision()] = true
			return nil
		}
		if len(state.running) > 0 || a.clock.Now().Before(state.retryAt) {
			return state.err
		}
	}
	if state, ok := a.byKey[request.repositoryKey()]; ok {
		if age := a.oldestAge(state); age >= maxWait {
			return pendingError(request, age)
		}
	}
	return nil
}

// oldestAge returns the age of the oldest running request. The caller must hold mu.
func (a *attempts[V]) oldestAge(state *requestState[V]) time.Duration {
	var oldest time.Duration
	for _, current := range state.running {
		oldest = max(oldest, a.clock.Since(current.start))
	}
	return oldest
}

// recordResult records the end of a request, with its error or nil. A repository error begins a pause for all charts in
// the repository, and any other retriable error for this chart only.
func (a *attempts[V]) recordResult(request chartRequest, err error, revision func() string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	repository := a.ensureState(request.repositoryKey())
	delete(repository.running, request.key())
	switch {
	case isRepositoryError(err):
		a.recordError(repository, err, revision)
	case isRetriable(err):
		repository.reset()
		a.recordError(a.ensureState(request.key()), err, revision)
	default:
		repository.reset()
		delete(a.byKey, request.key())
	}
	maps.DeleteFunc(a.byKey, func(_ string, state *requestState[V]) bool {
		return len(state.running) == 0 && (state.err == nil || a.clock.Since(state.retryAt) > 2*maxPause)
	})
}

// recordError begins a pause, in which revision is not tried again. The caller must hold mu.
func (a *attempts[V]) recordError(state *requestState[V], err error, revision func() string) {
	state.recordError(err, a.clock.Now())
	if revision != nil {
		state.revisions[revision()] = true
	}
}

func (a *attempts[V]) ensureState(key string) *requestState[V] {
	state, ok := a.byKey[key]
	if !ok {
		state = &requestState[V]{running: map[string]*flight[V]{}, revisions: map[string]bool{}}
		a.byKey[key] = state
	}
	return state
}

// reset ends the pause. Running requests continue.
func (s *requestState[V]) reset() {
	s.backoff = backoff{}
	clear(s.revisions)
}

// archiveError is an error of the download of an archive, which can be on another host than the index.
type archiveError struct{ error }

// Unwrap returns the wrapped error.
func (e *archiveError) Unwrap() error { return e.error }

// isRepositoryError returns whether an error concerns all charts of a repository: the status Too Many Requests, or,
// except for an archive, no response or a server error for the index.
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

// isRetriable returns whether a later request can succeed without a change of the profile or of the repository.
// ErrNotFound and ErrUnverified are not retriable here: Charts.failures caches them.
func isRetriable(err error) bool {
	_, isInvalid := errors.AsType[phase.TerminalError](err)
	return err != nil && !isInvalid && !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrUnverified)
}
