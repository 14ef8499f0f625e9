package source

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/towline/towline/internal/egress"
)

const (
	// remoteRetry is the time after which the reader of a URL that has not responded yet tries again, if no change is
	// reported before.
	remoteRetry = time.Minute
	// toleratedFailures is the number of successive failures for which the content of the last success is still read: one
	// lost request changes no status.
	toleratedFailures = 1
	// remoteBacklog is the size of the channel for changes.
	remoteBacklog = 1024
)

// RemoteFetcher fetches the content behind URLs: once for all users of the same URL with the same Secret and options,
// and again after the shortest interval of its users. It keeps the content in memory until there are no more users.
//
// Each URL has a goroutine of its own, so that a server that does not respond delays nothing else.
type RemoteFetcher struct {
	// Egress limits the connections to the servers of URLs. It must not be changed after Start. Default: no limit.
	Egress *egress.Policy

	hub    client.Reader
	clock  clock.Clock
	limits *fetchLimits
	// timeout limits one request.
	timeout time.Duration
	// toPoll sends new sources to Start, which polls them.
	toPoll  chan *remoteSource
	changes chan event.TypedGenericEvent[Reference]

	mu          sync.Mutex // guards the fields below, and those of the sources; no other lock is acquired while it is held
	byReference map[Reference]*remoteSource
	byUser      map[string][]RemoteUse
	// shares are by namespace. Entries are never deleted: there is one for each namespace that has used a URL.
	shares map[string]*fetchShare
}

// remoteSource is a URL with users.
type remoteSource struct {
	reference Reference
	stop      chan struct{} // closed after the last user is removed
	wake      chan struct{} // receives a value to fetch now; it has a buffer of one

	// The fields below are guarded by the mutex of the RemoteFetcher.
	users remoteUsers
	// content is the content of the last successful fetch, nil before the first. Its size is reserved in share. revision
	// identifies it on the server.
	content  *Content
	share    *fetchShare
	revision remoteRevision
	// failure is the pause after failed fetches, and failures the number of successive ones.
	failure  backoff
	failures int
	// login is the digest of the login of the last fetch.
	login string
}

// NewRemoteFetcher returns a RemoteFetcher that reads the Secrets of logins from hub. Start must be called.
func NewRemoteFetcher(hub client.Reader, clock clock.Clock) *RemoteFetcher {
	return &RemoteFetcher{
		hub: hub, clock: clock, limits: newFetchLimits("the content of all URLs has", maxRemoteTotal), timeout: requestTimeout, toPoll: make(chan *remoteSource),
		changes:     make(chan event.TypedGenericEvent[Reference], remoteBacklog),
		byReference: map[Reference]*remoteSource{}, byUser: map[string][]RemoteUse{}, shares: map[string]*fetchShare{},
	}
}

// Changes returns the channel of URLs with new content, with another error, or with another login.
func (f *RemoteFetcher) Changes() <-chan event.TypedGenericEvent[Reference] { return f.changes }

// Start implements manager.Runnable. It polls until ctx ends, and waits for requests that are under way.
func (f *RemoteFetcher) Start(ctx context.Context) error {
	var all sync.WaitGroup
	defer all.Wait()
	for {
		select {
		case <-ctx.Done():
			return nil
		case added := <-f.toPoll:
			all.Go(func() { f.poll(ctx, added) })
		}
	}
}

// Use replaces the URLs of a user, which is the key of a ClusterSummary, "<namespace>/<name>". A URL without users is
// no longer polled, and its content is freed. Use must be called before the content is read, so that no change is
// missed.
func (f *RemoteFetcher) Use(ctx context.Context, user string, uses []RemoteUse) error {
	all := f.replaceUses(user, uses)
	for i, added := range all {
		select {
		case f.toPoll <- added:
		case <-ctx.Done():
			for _, unpolled := range all[i:] {
				f.forget(unpolled)
			}
			return fmt.Errorf("poll %s: %w", added.reference, ctx.Err())
		}
	}
	return nil
}

// replaceUses returns the new sources.
func (f *RemoteFetcher) replaceUses(user string, uses []RemoteUse) []*remoteSource {
	f.mu.Lock()
	defer f.mu.Unlock()
	var added []*remoteSource
	intervals := map[Reference]time.Duration{}
	for _, use := range uses {
		if shorter, ok := intervals[use.Reference]; !ok || use.Interval < shorter {
			intervals[use.Reference] = use.Interval
		}
	}
	for reference, interval := range intervals {
		used, ok := f.byReference[reference]
		if !ok {
			used = &remoteSource{reference: reference, stop: make(chan struct{}), wake: make(chan struct{}, 1), users: newRemoteUsers()}
			f.byReference[reference] = used
			added = append(added, used)
		}
		if ok && interval < used.users.shortestInterval() {
			used.fetchNow()
		}
		used.users.set(user, interval)
		f.moveToShare(used)
	}
	for _, former := range f.byUser[user] {
		if used := f.byReference[former.Reference]; used != nil && intervals[former.Reference] == 0 {
			used.users.remove(user)
			f.moveToShare(used)
			f.remove(used)
		}
	}
	f.byUser[user] = slices.Clone(uses)
	if len(uses) == 0 {
		delete(f.byUser, user)
	}
	return added
}

// remove stops a source without users. The caller must hold mu.
func (f *RemoteFetcher) remove(unused *remoteSource) {
	if !unused.users.isEmpty() || f.byReference[unused.reference] != unused {
		return
	}
	delete(f.byReference, unused.reference)
	close(unused.stop)
	unused.replaceContent(nil, nil)
}

// forget removes a source that is not polled, so that the next Use adds it again.
func (f *RemoteFetcher) forget(added *remoteSource) {
	f.mu.Lock()
	defer f.mu.Unlock()
	added.users.clear()
	f.remove(added)
}

// fetchNow ends the pause before the next fetch.
func (s *remoteSource) fetchNow() {
	select {
	case s.wake <- struct{}{}:
	default: // it is already ended
	}
}

// Read returns the content behind a URL that is in use. It sends no request: it returns a PendingError until the first
// fetch ends, and the error of a URL whose fetches fail. The error wraps ErrNotFound if nothing is at the URL.
func (f *RemoteFetcher) Read(ctx context.Context, reference Reference) (Content, error) {
	login, err := f.readLogin(ctx, reference)
	if err != nil {
		return Content{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	used, ok := f.byReference[reference]
	if !ok {
		return Content{}, fmt.Errorf("%s has no user", reference)
	}
	pending := fmt.Errorf("%s: %w", reference, &PendingError{After: remoteRetry, repository: redactedRemote(reference.URL)})
	if used.login == "" {
		return Content{}, pending
	}
	if used.login != login.digest() {
		used.fetchNow() // the Secret has changed
		return Content{}, pending
	}
	if err := used.visibleError(); err != nil {
		return Content{}, fmt.Errorf("%s: %w", reference, err)
	}
	content := *used.content
	content.Version = fmt.Sprintf("%s %t", content.Digest, content.Sensitive)
	return content, nil
}

// visibleError returns the error that readers get. The caller must hold the mutex of the RemoteFetcher.
func (s *remoteSource) visibleError() error {
	if s.content != nil && s.failures <= toleratedFailures {
		return nil
	}
	return s.failure.err
}

// poll fetches a source again and again until it is stopped or ctx ends.
func (f *RemoteFetcher) poll(ctx context.Context, s *remoteSource) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-s.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	for {
		f.fetchAndReport(ctx, s)
		timer := f.clock.NewTimer(f.pause(s))
		select {
		case <-ctx.Done():
		case <-s.wake:
		case <-timer.C():
		}
		timer.Stop()
		if ctx.Err() != nil {
			return
		}
	}
}

// pause returns the pause before the next fetch. A missing file is no failure of the server: it is looked for at the
// interval.
func (f *RemoteFetcher) pause(s *remoteSource) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s.failures == 0 || s.users.isEmpty() {
		return max(minRemoteInterval, f.intervalOf(s))
	}
	if s.failures > toleratedFailures && errors.Is(s.failure.err, ErrNotFound) {
		return s.users.shortestInterval()
	}
	return s.failure.pause
}

// intervalOf returns the interval of a source, also if its last user was just removed. The caller must hold mu.
func (f *RemoteFetcher) intervalOf(s *remoteSource) time.Duration {
	if s.users.isEmpty() {
		return defaultRemoteInterval
	}
	return s.users.shortestInterval()
}

// fetchAndReport fetches a source once, and reports a change.
func (f *RemoteFetcher) fetchAndReport(ctx context.Context, s *remoteSource) {
	f.mu.Lock()
	known, share := s.revision, f.shareOf(s)
	f.mu.Unlock()
	fetched := remoteFetch{}
	login, err := f.readLogin(ctx, s.reference)
	if err == nil {
		fetched, err = f.fetch(ctx, share, s.reference, login, known)
	}
	if ctx.Err() != nil {
		fetched.free()
		return
	}
	if !f.store(s, login, fetched, err) {
		return
	}
	select {
	case f.changes <- event.TypedGenericEvent[Reference]{Object: s.reference}:
	case <-ctx.Done():
	}
}

// store keeps the result of a fetch, and returns whether readers get another result than before.
func (f *RemoteFetcher) store(s *remoteSource, login remoteLogin, fetched remoteFetch, err error) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.byReference[s.reference] != s {
		fetched.free()
		return false // the last user was removed meanwhile
	}
	before, hadLogin, hadDigest := s.visibleError(), s.login, digestIn(s.content)
	s.login = login.digest()
	if fetched.content != nil && fetched.content.Digest == digestIn(s.content) {
		fetched.free()
	} else if fetched.content != nil {
		s.replaceContent(fetched.content, fetched.share)
	}
	if err != nil {
		s.failures++
		s.failure.fail(err, f.clock.Now())
	} else {
		s.revision, s.failures, s.failure = fetched.revision, 0, backoff{}
		s.content.Sensitive = login.hasCredentials()
	}
	after := s.visibleError()
	return hadLogin != s.login || hadDigest != digestIn(s.content) || errorText(before) != errorText(after) ||
		s.content == nil && s.failures == toleratedFailures+1
}

// replaceContent replaces the content, and frees the former one. The caller must hold the mutex of the RemoteFetcher.
func (s *remoteSource) replaceContent(content *Content, share *fetchShare) {
	if s.content != nil {
		s.share.free(sizeOf(s.content))
	}
	s.content, s.share = content, share
}

// moveToShare moves the content of s to the share of its present users, which may exceed its limit then. The caller
// must hold mu.
func (f *RemoteFetcher) moveToShare(s *remoteSource) {
	share := f.shareOf(s)
	if s.content == nil || s.share == share {
		return
	}
	size := sizeOf(s.content)
	s.share.used.Add(-size)
	share.used.Add(size)
	s.share = share
}

// shareOf returns the share of the namespace of all users of s, or the share without a limit if they are in several
// namespaces or there are none. The caller must hold mu.
func (f *RemoteFetcher) shareOf(s *remoteSource) *fetchShare {
	namespace := s.users.namespace()
	if f.shares[namespace] == nil {
		f.shares[namespace] = &fetchShare{limits: f.limits, namespace: namespace}
	}
	return f.shares[namespace]
}

func digestIn(content *Content) string {
	if content == nil {
		return ""
	}
	return content.Digest
}

// sizeOf returns the size of the files of content in memory, 0 for nil.
func sizeOf(content *Content) int64 {
	if content == nil {
		return 0
	}
	var size int64
	for _, file := range content.Files {
		size += int64(len(file.Name) + len(file.Data) + remoteFileOverhead)
	}
	return size
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// isConfirmed returns whether more fetches in succession have failed than readers tolerate.
func (f *RemoteFetcher) isConfirmed(reference Reference) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	used, ok := f.byReference[reference]
	return ok && used.failures > toleratedFailures
}

// readRemote is read for a URL.
func (c *Contents) readRemote(ctx context.Context, ref Reference, isOptional bool) (Content, error) {
	content, err := c.Remote.Read(ctx, ref)
	if !errors.Is(err, ErrNotFound) || !isOptional {
		return content, err
	}
	if !c.Remote.isConfirmed(ref) {
		return Content{}, &PendingError{After: minPause, repository: ref.String()} // one failure must not delete what was delivered
	}
	return newContent(ref, nil), nil
}

// Size returns the size of all content and of what is being fetched, in bytes.
func (f *RemoteFetcher) Size() int64 { return f.limits.used.Load() }
