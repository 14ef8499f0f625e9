package source

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/towline/towline/internal/archive"
)

const (
	// maxRemoteDownload limits the bytes that one fetch of a URL reads from the network.
	maxRemoteDownload = 64 << 20
	// maxRemoteTotal limits the content of all URLs, including the bytes of running fetches, in bytes.
	maxRemoteTotal = 256 << 20
	// maxUnpacking is the maximum number of archives that are unpacked at the same time. More is not needed: unpacking is
	// faster than the download.
	maxUnpacking = 2
	// remoteFileOverhead is the memory of a file in addition to its name and data, in bytes.
	remoteFileOverhead = 64
)

// fetchLimits bounds the memory of a RemoteFetcher, or of all fetches of a Charts.
type fetchLimits struct {
	// subject is the beginning of the error, for example "the content of all URLs has".
	subject   string
	total     int64
	used      atomic.Int64
	unpacking chan struct{} // has an element for each archive that is being unpacked
	// maxBlocking is the constant maxBlocking, except in tests.
	maxBlocking time.Duration

	mu      sync.Mutex // guards the field below, and isCanceled of its elements
	fetches []*cancelableFetch
}

// maxBlocking is the time after which a fetch can be canceled if other fetches need memory. Otherwise, a repository
// that sends large charts slowly would block all fetches.
const maxBlocking = 10 * time.Second

// errSlowFetch is the cause of a fetch that was canceled because others need memory.
var errSlowFetch = &sizeError{"it is slow, and others need its memory"}

// cancelableFetch is a fetch that can be canceled if others need its memory. done is closed when its memory is free.
type cancelableFetch struct {
	download   *meteredDownload
	start      time.Time
	cancel     context.CancelCauseFunc
	isCanceled bool
	done       chan struct{}
}

func newFetchLimits(subject string, total int64) *fetchLimits {
	return &fetchLimits{subject: subject, total: total, unpacking: make(chan struct{}, maxUnpacking), maxBlocking: maxBlocking}
}

// register registers a fetch and returns its context, which is canceled if the fetch is slow and others need memory.
// The caller must close download and then call release.
func (l *fetchLimits) register(ctx context.Context, download *meteredDownload) (fetchContext context.Context, release func()) {
	fetchContext, cancel := context.WithCancelCause(ctx)
	fetch := &cancelableFetch{download: download, start: time.Now(), cancel: cancel, done: make(chan struct{})}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fetches = append(l.fetches, fetch)
	return fetchContext, func() {
		cancel(nil)
		close(fetch.done)
		l.mu.Lock()
		defer l.mu.Unlock()
		l.fetches = slices.DeleteFunc(l.fetches, func(other *cancelableFetch) bool { return other == fetch })
	}
}

// cancelCause returns errSlowFetch instead of err if it is the cause of ctx. The error of HTTP/2 is only
// context.Canceled.
func cancelCause(ctx context.Context, err error) error {
	if err != nil && errors.Is(context.Cause(ctx), errSlowFetch) {
		return errSlowFetch
	}
	return err
}

// endLargest calls cancelLargest and waits until the canceled fetch has ended. It returns false if there is no slow
// fetch, or if the fetch does not end within a second.
func (l *fetchLimits) endLargest(download *meteredDownload, namespace string) bool {
	canceled := l.cancelLargest(download, namespace)
	if canceled == nil {
		return false
	}
	select {
	case <-canceled.done:
		return true
	case <-time.After(time.Second): // it is unpacking or parsing
		return false
	}
}

// cancelLargest cancels a slow fetch, which has run for maxBlocking, and returns it, or nil if there is none. It
// chooses the fetch with the most memory in a namespace, or in all if namespace is "". download is the fetch that needs
// memory. It is never canceled here. If it was canceled before, no fetch is: otherwise two slow fetches would cancel
// each other.
func (l *fetchLimits) cancelLargest(download *meteredDownload, namespace string) *cancelableFetch {
	l.mu.Lock()
	defer l.mu.Unlock()
	var largest *cancelableFetch
	var most int64
	for _, fetch := range l.fetches {
		if fetch.download == download {
			if fetch.isCanceled {
				return nil
			}
			continue
		}
		if namespace != "" && fetch.download.share.namespace != namespace || time.Since(fetch.start) < l.maxBlocking {
			continue
		}
		if held := fetch.download.held.Load(); held > most {
			largest, most = fetch, held
		}
	}
	if largest != nil {
		largest.isCanceled = true
		largest.cancel(errSlowFetch)
	}
	return largest
}

// reserve reserves n bytes, which the caller must free. It returns an error, and reserves nothing, if they exceed the
// limit. download is the fetch that needs the bytes: slow fetches are canceled for it, in its own namespace first. If
// download is nil, none is canceled.
func (l *fetchLimits) reserve(n int64, download *meteredDownload) error {
	for {
		if l.used.Add(n) <= l.total {
			return nil
		}
		l.free(n)
		if download == nil || !l.endLargest(download, download.share.namespace) && !l.endLargest(download, "") {
			return &sizeError{fmt.Sprintf("%s more than %d MiB", l.subject, l.total>>20)}
		}
	}
}

func (l *fetchLimits) free(n int64) { l.used.Add(-n) }

// fetchShare counts the memory of the fetches for one namespace. It is limited to three quarters of fetchLimits.total,
// so that one namespace cannot use all of it.
type fetchShare struct {
	limits *fetchLimits
	// namespace is the namespace of all ClusterSummaries that use the URLs of the share. It is "", and the share has no
	// limit, for URLs with users in several namespaces and for charts.
	namespace string
	used      atomic.Int64
}

// reserve reserves n bytes in the share and in s.limits, or returns an error and reserves nothing. See
// fetchLimits.reserve for download.
func (s *fetchShare) reserve(n int64, download *meteredDownload) error {
	maximum := s.limits.total / 4 * 3
	for s.used.Add(n) > maximum && s.namespace != "" {
		s.used.Add(-n)
		if download == nil || !s.limits.endLargest(download, s.namespace) {
			return &sizeError{fmt.Sprintf("the URLs of namespace %s need more than the %d MiB that one namespace may use", s.namespace, maximum>>20)}
		}
	}
	if err := s.limits.reserve(n, download); err != nil {
		s.used.Add(-n)
		return err
	}
	return nil
}

func (s *fetchShare) free(n int64) {
	s.used.Add(-n)
	s.limits.free(n)
}

// meteredDownload reads and unpacks all data of one fetch. Its bytes count in share until it is closed.
type meteredDownload struct {
	share *fetchShare
	// maxSize is the maximum of size.
	maxSize int64

	mu sync.Mutex // guards the fields below: an SSH connection reads in a goroutine of its own, also after close
	// size is the number of bytes from the network. unpacked is the number of unpacked bytes.
	size, unpacked int64
	closed         bool

	held atomic.Int64 // the sum of size and unpacked, which other fetches read
}

// startUnpacking waits while maxUnpacking archives are being unpacked. If it returns no error, the caller must call
// end.
func (d *meteredDownload) startUnpacking(ctx context.Context) (end func(), err error) {
	unpacking := d.share.limits.unpacking
	select {
	case unpacking <- struct{}{}:
		return func() { <-unpacking }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for other archives to be unpacked: %w", ctx.Err())
	}
}

// unpack returns the files of an archive, whose size it counts.
func (d *meteredDownload) unpack(ctx context.Context, raw []byte) (map[string][]byte, error) {
	end, err := d.startUnpacking(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	limits := archive.DefaultLimits()
	limits.Reserve = d.addUnpacked
	return archive.Read(raw, limits)
}

// reader returns a reader that counts the bytes of r.
func (d *meteredDownload) reader(r io.Reader) io.Reader {
	return &countedReader{download: d, reader: r}
}

// readAll reads all of r.
func (d *meteredDownload) readAll(r io.Reader) ([]byte, error) {
	raw, err := io.ReadAll(d.reader(r))
	if err != nil {
		return nil, stableError(err)
	}
	return raw, nil
}

func (d *meteredDownload) add(n int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return io.ErrClosedPipe
	}
	if d.size+n > d.maxSize {
		return &sizeError{fmt.Sprintf("it has more than %d MiB", d.maxSize>>20)}
	}
	if err := d.share.reserve(n, d); err != nil {
		return err
	}
	d.size += n
	d.held.Add(n)
	return nil
}

// addUnpacked counts n bytes before they are unpacked.
func (d *meteredDownload) addUnpacked(n int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.share.reserve(n, d); err != nil {
		return err
	}
	d.unpacked += n
	d.held.Add(n)
	return nil
}

// close frees the bytes. Later reads fail. It can be called more than once.
func (d *meteredDownload) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.share.free(d.size + d.unpacked)
	d.closed, d.size, d.unpacked = true, 0, 0
	d.held.Store(0)
}

type countedReader struct {
	download *meteredDownload
	reader   io.Reader
}

// Read implements io.Reader.
func (r *countedReader) Read(buffer []byte) (int, error) {
	n, err := r.reader.Read(buffer)
	if limitErr := r.download.add(int64(n)); limitErr != nil {
		return 0, limitErr
	}
	return n, err
}

// sizeError is the error of a limit.
type sizeError struct{ message string }

func (e *sizeError) Error() string { return e.message }
