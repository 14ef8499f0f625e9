package source

import (
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
	// maxWait is the time for which callers of Charts.Fetch wait for a request. Then they get a PendingError.
	maxWait = 2 * time.Second
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

// attempts remembers requests to repositories: which ones are under way, and which ones failed.
type attempts struct {
	clock clock.PassiveClock

	mu    sync.Mutex // guards byKey; no other lock is acquired while it is held
	byKey map[string]*attempt
}

// attempt is the state of the requests to one repository with one login, or for one chart in it.
type attempt struct {
	// running has the start of each request that is under way.
	running map[string]time.Time
	backoff
	// revisions identify the specs that have been tried since the first failure, see Charts.Fetch.
	revisions map[string]bool
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

func newAttempts(clock clock.PassiveClock) *attempts {
	return &attempts{clock: clock, byKey: map[string]*attempt{}}
}

// check returns an error if a chart must not be requested now: the last error of the repository or of the chart, or a
// PendingError. A spec that has not been tried since the first failure is tried at once.
func (a *attempts) check(request chartRequest, revision func() string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
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
			return &PendingError{After: age, repository: redacted(request.repositoryURL)}
		}
	}
	return nil
}

// age returns the age of the oldest request that is under way. The caller must hold mu.
func (a *attempts) age(known *attempt) time.Duration {
	var oldest time.Duration
	for _, start := range known.running {
		oldest = max(oldest, a.clock.Since(start))
	}
	return oldest
}

// begin records that a request is under way.
func (a *attempts) begin(request chartRequest) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.get(request.repositoryKey()).running[request.key()] = a.clock.Now()
}

// end records the result of a request. After an error of the whole repository, no chart in it is requested for a while.
// After any other error, only the same chart is not requested.
func (a *attempts) end(request chartRequest, err error, revision func() string) {
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
	maps.DeleteFunc(a.byKey, func(_ string, known *attempt) bool {
		return len(known.running) == 0 && (known.err == nil || a.clock.Since(known.retryAt) > 2*maxPause)
	})
}

// fail records an error. The caller must hold mu.
func (a *attempts) fail(known *attempt, err error, revision func() string) {
	known.fail(err, a.clock.Now())
	if revision != nil {
		known.revisions[revision()] = true
	}
}

func (a *attempts) get(key string) *attempt {
	known, ok := a.byKey[key]
	if !ok {
		known = &attempt{running: map[string]time.Time{}, revisions: map[string]bool{}}
		a.byKey[key] = known
	}
	return known
}

// reset removes the failures. Requests that are running stay.
func (k *attempt) reset() {
	k.backoff = backoff{}
	clear(k.revisions)
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
