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
	// maxRemoteTotal limits the content of all URLs, with what is being read from the network and unpacked.
	maxRemoteTotal = 256 << 20
	// maxUnpacking is the number of archives that are unpacked at the same time. To unpack an archive takes no longer than
	// its download.
	maxUnpacking = 2
	// remoteFileOverhead is the memory of a file in addition to its name and data.
	remoteFileOverhead = 64
)

// fetchLimits bounds the memory of a RemoteFetcher, or of the fetches of charts.
type fetchLimits struct {
	// subject is the subject of the error, with its verb, such as "the content of all URLs has".
	subject   string
	total     int64
	used      atomic.Int64
	unpacking chan struct{} // has an element for each archive that is being unpacked
	// maxBlocking is the time after which a fetch is canceled if others need memory.
	maxBlocking time.Duration

	mu      sync.Mutex // guards the field below, and isCanceled of its elements
	fetches []*cancelableFetch
}

// maxBlocking is the time for which a fetch can keep others from the memory that all have together: a repository that
// sends large charts slowly would otherwise stop all fetches.
const maxBlocking = 10 * time.Second

// errSlowFetch is the cause of a fetch that was canceled because others need memory.
var errSlowFetch = &sizeError{"it is slow, and others need its memory"}

// cancelableFetch is a fetch that is canceled if others need its memory. done is closed when its memory is free.
type cancelableFetch struct {
	download   *remoteDownload
	start      time.Time
	cancel     context.CancelCauseFunc
	isCanceled bool
	done       chan struct{}
}

func newFetchLimits(subject string, total int64) *fetchLimits {
	return &fetchLimits{subject: subject, total: total, unpacking: make(chan struct{}, maxUnpacking), maxBlocking: maxBlocking}
}

// cancelable returns a context for a fetch that is canceled when it has kept others from memory for too long. The
// caller calls release when the memory of the fetch is free.
func (l *fetchLimits) cancelable(ctx context.Context, download *remoteDownload) (fetchContext context.Context, release func()) {
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

// fetchError returns errSlowFetch instead of err if that was the reason: HTTP/2 returns only that ctx was canceled.
func fetchError(ctx context.Context, err error) error {
	if err != nil && errors.Is(context.Cause(ctx), errSlowFetch) {
		return errSlowFetch
	}
	return err
}

// endLargest cancels the slow fetch with the most memory, and waits until it has ended. It returns false if there is
// none, or if it does not end within a second. See cancelLargest for the parameters.
func (l *fetchLimits) endLargest(download *remoteDownload, namespace string) bool {
	canceled := l.cancelLargest(download, namespace)
	if canceled == nil {
		return false
	}
	select {
	case <-canceled.done:
		return true
	case <-time.After(time.Second): // it is unpacking, or parses what it has fetched
		return false
	}
}

// cancelLargest cancels the fetch with the most memory of those that have run for maxBlocking, and returns it. It
// returns nil if there is none. It never cancels the fetch of download, which needs the memory. If that one is itself
// canceled, it cancels none: otherwise two slow fetches would cancel each other. With a namespace it cancels only
// fetches of that namespace.
func (l *fetchLimits) cancelLargest(download *remoteDownload, namespace string) *cancelableFetch {
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

// reserve returns an error if n more bytes exceed the limit. The caller must free them. download, if it is not nil, is
// the fetch that needs them: others may be canceled for it, those for its own namespace first.
func (l *fetchLimits) reserve(n int64, download *remoteDownload) error {
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
	// namespace is the namespace of all ClusterSummaries that use the URLs of the share. It is "", and there is no such
	// limit, for URLs that are used in several namespaces, and for charts.
	namespace string
	used      atomic.Int64
}

// reserve reserves n bytes in the share and in the limits. It fails if one of them would be exceeded. download is that
// of fetchLimits.reserve.
func (s *fetchShare) reserve(n int64, download *remoteDownload) error {
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

// remoteDownload is the reader of everything that one fetch reads from the network and unpacks. Its bytes count until
// it is closed.
type remoteDownload struct {
	share *fetchShare
	// maxSize is the maximum of size.
	maxSize int64

	mu sync.Mutex // guards the fields below: an SSH connection reads in a goroutine of its own, also after close
	// size is the number of bytes from the network, and unpacked the number of unpacked bytes.
	size, unpacked int64
	closed         bool

	held atomic.Int64 // the sum of size and unpacked, which other fetches read
}

// startUnpacking waits while maxUnpacking archives are being unpacked. Unless it returns an error, the caller must call
// end.
func (d *remoteDownload) startUnpacking(ctx context.Context) (end func(), err error) {
	unpacking := d.share.limits.unpacking
	select {
	case unpacking <- struct{}{}:
		return func() { <-unpacking }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for other archives to be unpacked: %w", ctx.Err())
	}
}

// unpack returns the files of an archive.
func (d *remoteDownload) unpack(ctx context.Context, raw []byte) (map[string][]byte, error) {
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
func (d *remoteDownload) reader(r io.Reader) io.Reader { return &countedReader{download: d, reader: r} }

// readAll reads all of r.
func (d *remoteDownload) readAll(r io.Reader) ([]byte, error) {
	raw, err := io.ReadAll(d.reader(r))
	if err != nil {
		return nil, stableError(err)
	}
	return raw, nil
}

func (d *remoteDownload) add(n int64) error {
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

// addUnpacked counts bytes that are unpacked.
func (d *remoteDownload) addUnpacked(n int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.share.reserve(n, d); err != nil {
		return err
	}
	d.unpacked += n
	d.held.Add(n)
	return nil
}

// close frees the bytes, and ends all readers.
func (d *remoteDownload) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.share.free(d.size + d.unpacked)
	d.closed, d.size, d.unpacked = true, 0, 0
	d.held.Store(0)
}

type countedReader struct {
	download *remoteDownload
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
