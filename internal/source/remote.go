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
	// remoteRetry is PendingError.After for a URL without a response. RemoteFetcher.Changes usually reports the response
	// earlier.
	remoteRetry = time.Minute
	// toleratedFailures is the number of successive failures for which Read still returns the former content, so that one
	// lost request does not change a status.
	toleratedFailures = 1
	// remoteBacklog is the buffer of the channel for changes. The fetches wait while it is full.
	remoteBacklog = 1024
)

// RemoteFetcher polls the content behind URLs, at the shortest interval of the users of a URL. Users with the same URL,
// Secret and options share the content. It stays in memory until the last user is removed.
//
// Each URL has a goroutine of its own, so that a server that does not respond delays nothing else.
type RemoteFetcher struct {
	// Egress limits the connections to the servers of URLs. It must not be changed after Start. Default: no limit.
	Egress *egress.Policy

	hub    client.Reader
	clock  clock.Clock
	limits *fetchLimits
	// timeout limits one request of a fetch.
	timeout time.Duration
	// toPoll sends new sources to Start, which polls them.
	toPoll  chan *remoteSource
	changes chan event.TypedGenericEvent[Reference]

	mu          sync.Mutex // guards the fields below, and those of the sources; no other lock is acquired while it is held
	byReference map[Reference]*remoteSource
	byUser      map[string][]RemoteUse // by the key of the ClusterSummary
	// shares has the share of each namespace that has used a URL. Entries are never deleted.
	shares map[string]*fetchShare
}

// remoteSource is a URL with users. One goroutine polls it.
type remoteSource struct {
	reference Reference
	stop      chan struct{} // closed after the last user is removed
	wake      chan struct{} // receives a value to fetch now; it has a buffer of one

	// The fields below are guarded by the mutex of the RemoteFetcher.
	users remoteUsers
	// content is the content of the last successful fetch, nil before the first one. Its size is reserved in share. The
	// server knows it as revision.
	content  *Content
	share    *fetchShare
	revision remoteRevision
	// failure is the pause after failed fetches. failures is the number of successive failed fetches.
	failure  backoff
	failures int
	// login is the digest of the login of the last fetch, "" before the first one.
	login string
}

// NewRemoteFetcher returns a RemoteFetcher that reads the Secrets of logins from hub. The caller must run Start.
func NewRemoteFetcher(hub client.Reader, clock clock.Clock) *RemoteFetcher {
	return &RemoteFetcher{
		hub: hub, clock: clock, limits: newFetchLimits("the content of all URLs has", maxRemoteTotal), timeout: requestTimeout, toPoll: make(chan *remoteSource),
		changes:     make(chan event.TypedGenericEvent[Reference], remoteBacklog),
		byReference: map[Reference]*remoteSource{}, byUser: map[string][]RemoteUse{}, shares: map[string]*fetchShare{},
	}
}

// Changes returns the channel that receives each URL with new content, another error or another login.
func (f *RemoteFetcher) Changes() <-chan event.TypedGenericEvent[Reference] { return f.changes }

// Start implements manager.Runnable. It polls all URLs until ctx ends, and returns after the last request has ended.
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

// SetUses replaces the URLs of a user. user is the key of a ClusterSummary, "<namespace>/<name>". A URL without users
// is no longer polled, and its content is freed. The caller must call SetUses before Read, so that it misses no change.
func (f *RemoteFetcher) SetUses(ctx context.Context, user string, uses []RemoteUse) error {
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

// replaceUses replaces the URLs of a user and returns the new sources, which the caller must send to toPoll.
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
			f.removeIfUnused(used)
		}
	}
	f.byUser[user] = slices.Clone(uses)
	if len(uses) == 0 {
		delete(f.byUser, user)
	}
	return added
}

// removeIfUnused stops a source and frees its content if it has no users. The caller must hold mu.
func (f *RemoteFetcher) removeIfUnused(unused *remoteSource) {
	if !unused.users.isEmpty() || f.byReference[unused.reference] != unused {
		return
	}
	delete(f.byReference, unused.reference)
	close(unused.stop)
	unused.replaceContent(nil, nil)
}

// forget removes a source that was not sent to toPoll, so that the next SetUses adds it again.
func (f *RemoteFetcher) forget(added *remoteSource) {
	f.mu.Lock()
	defer f.mu.Unlock()
	added.users.clear()
	f.removeIfUnused(added)
}

// fetchNow ends the pause before the next fetch of the source.
func (s *remoteSource) fetchNow() {
	select {
	case s.wake <- struct{}{}:
	default: // a fetch is already requested
	}
}

// Read returns the last content behind a URL. A user must have it, see SetUses. Read sends no request. It returns a
// PendingError until the first fetch ends, and the last error while fetches fail. The error wraps ErrNotFound if the
// server has no such content.
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
	pending := fmt.Errorf("%s: %w", reference, &PendingError{After: remoteRetry, awaited: redactedRemote(reference.URL)})
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

// visibleError returns the error that Read returns. The caller must hold the mutex of the RemoteFetcher.
func (s *remoteSource) visibleError() error {
	if s.content != nil && s.failures <= toleratedFailures {
		return nil
	}
	return s.failure.err
}

// poll fetches a source repeatedly until it is stopped or ctx ends.
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

// pause returns the pause before the next fetch. Content that is confirmed to be missing is requested at the interval,
// and without a growing pause, since the server works.
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

// intervalOf returns the shortest interval of the users of a source, or the default if its last user was just removed.
// The caller must hold mu.
func (f *RemoteFetcher) intervalOf(s *remoteSource) time.Duration {
	if s.users.isEmpty() {
		return defaultRemoteInterval
	}
	return s.users.shortestInterval()
}

// fetchAndReport fetches a source once, and sends it to changes if Read returns another result than before.
func (f *RemoteFetcher) fetchAndReport(ctx context.Context, s *remoteSource) {
	f.mu.Lock()
	known, share := s.revision, f.shareOf(s)
	f.mu.Unlock()
	fetched := remoteResult{}
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

// store keeps the result of a fetch, and returns whether Read returns another result than before. It also returns true
// when ErrNotFound is confirmed, since readRemote then returns another result.
func (f *RemoteFetcher) store(s *remoteSource, login remoteLogin, fetched remoteResult, err error) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.byReference[s.reference] != s {
		fetched.free()
		return false // the last user was removed meanwhile
	}
	errBefore, loginBefore, digestBefore := s.visibleError(), s.login, digestIn(s.content)
	s.login = login.digest()
	if fetched.content != nil && fetched.content.Digest == digestIn(s.content) {
		fetched.free()
	} else if fetched.content != nil {
		s.replaceContent(fetched.content, fetched.share)
	}
	if err != nil {
		s.failures++
		s.failure.recordError(err, f.clock.Now())
	} else {
		s.revision, s.failures, s.failure = fetched.revision, 0, backoff{}
		s.content.Sensitive = login.hasCredentials()
	}
	return loginBefore != s.login || digestBefore != digestIn(s.content) || errorText(errBefore) != errorText(s.visibleError()) ||
		s.content == nil && s.failures == toleratedFailures+1
}

// replaceContent replaces the content, and frees the former one. The caller must hold the mutex of the RemoteFetcher.
func (s *remoteSource) replaceContent(content *Content, share *fetchShare) {
	if s.content != nil {
		s.share.free(sizeOf(s.content))
	}
	s.content, s.share = content, share
}

// moveToShare moves the reserved size of s to the share of its present users. It may exceed the limit of the share. The
// caller must hold mu.
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

// shareOf returns the share of the users' namespace. If they are in several namespaces, or there are none, it returns
// the share without a limit. The caller must hold mu.
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

// isFailureConfirmed returns whether more than toleratedFailures successive fetches have failed.
func (f *RemoteFetcher) isFailureConfirmed(reference Reference) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	used, ok := f.byReference[reference]
	return ok && used.failures > toleratedFailures
}

// readRemote is Contents.read for a URL.
func (c *Contents) readRemote(ctx context.Context, ref Reference, isOptional bool) (Content, error) {
	content, err := c.Remote.Read(ctx, ref)
	if !errors.Is(err, ErrNotFound) || !isOptional {
		return content, err
	}
	if !c.Remote.isFailureConfirmed(ref) {
		return Content{}, &PendingError{After: minPause, awaited: ref.String()} // one failure must not delete deployed objects
	}
	return newContent(ref, nil), nil
}

// Size returns the size of all content and of all running fetches, in bytes.
func (f *RemoteFetcher) Size() int64 { return f.limits.used.Load() }
