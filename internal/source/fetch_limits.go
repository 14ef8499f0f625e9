package source

import (
	"context"
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
	// maxUnpacking is the number of archives that are unpacked at the same time. This takes no longer than the download.
	maxUnpacking = 2
	// remoteFileOverhead is the memory of a file in addition to its name and data.
	remoteFileOverhead = 64
)

// fetchLimits bounds the memory of a RemoteFetcher, or of the fetches of charts.
type fetchLimits struct {
	// what describes what is limited, for errors.
	what      string
	total     int64
	used      atomic.Int64
	unpacking chan struct{} // has an element for each archive that is being unpacked
	// maxBlocking is the time after which a fetch is ended when others have no room.
	maxBlocking time.Duration

	mu      sync.Mutex // guards the field below
	fetches []*endableFetch
}

// maxBlocking is the time for which a fetch can keep others from the memory that all have together: a repository that
// sends large charts slowly would otherwise stop all fetches.
const maxBlocking = 10 * time.Second

// endableFetch is a fetch that is ended if others have no room. ended is closed when its memory is free.
type endableFetch struct {
	start time.Time
	end   context.CancelCauseFunc
	ended chan struct{}
}

func newFetchLimits(what string, total int64) *fetchLimits {
	return &fetchLimits{what: what, total: total, unpacking: make(chan struct{}, maxUnpacking), maxBlocking: maxBlocking}
}

// endable returns a context for a fetch that ends when it has blocked others for too long. The caller calls release
// when the memory of the fetch is free.
func (l *fetchLimits) endable(ctx context.Context) (fetchContext context.Context, release func()) {
	fetchContext, end := context.WithCancelCause(ctx)
	fetch := &endableFetch{start: time.Now(), end: end, ended: make(chan struct{})}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fetches = append(l.fetches, fetch)
	return fetchContext, func() {
		end(nil)
		close(fetch.ended)
		l.mu.Lock()
		defer l.mu.Unlock()
		l.fetches = slices.DeleteFunc(l.fetches, func(other *endableFetch) bool { return other == fetch })
	}
}

// endOldest ends the oldest fetch if it has run for maxBlocking, and waits for that. It returns false if there is none.
func (l *fetchLimits) endOldest() bool {
	oldest := l.takeOldest()
	if oldest == nil {
		return false
	}
	oldest.end(&sizeError{"it is slow, and others wait for its memory"})
	select {
	case <-oldest.ended:
	case <-time.After(time.Second): // it can be the one that waits
	}
	return true
}

// takeOldest removes the oldest fetch from the list. It returns nil if none has run for maxBlocking.
func (l *fetchLimits) takeOldest() *endableFetch {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.fetches) == 0 || time.Since(l.fetches[0].start) < l.maxBlocking {
		return nil
	}
	oldest := l.fetches[0]
	l.fetches = l.fetches[1:]
	return oldest
}

// reserve returns an error if n more bytes exceed the limit. The caller must free them.
func (l *fetchLimits) reserve(n int64) error {
	for {
		if l.used.Add(n) <= l.total {
			return nil
		}
		l.free(n)
		if !l.endOldest() {
			return &sizeError{fmt.Sprintf("%s more than %d MiB", l.what, l.total>>20)}
		}
	}
}

func (l *fetchLimits) free(n int64) { l.used.Add(-n) }

// remoteDownload is the reader of everything that one fetch reads from the network and unpacks. Its bytes count until
// it is closed.
type remoteDownload struct {
	limits *fetchLimits
	// maxSize is the maximum of size.
	maxSize int64

	mu sync.Mutex // guards the fields below: an SSH connection reads in a goroutine of its own, also after close
	// size is the number of bytes from the network, and unpacked the number of unpacked bytes.
	size, unpacked int64
	closed         bool
}

// unpack returns the files of an archive.
func (d *remoteDownload) unpack(raw []byte) (map[string][]byte, error) {
	d.limits.unpacking <- struct{}{}
	defer func() { <-d.limits.unpacking }()
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
	if err := d.limits.reserve(n); err != nil {
		return err
	}
	d.size += n
	return nil
}

// addUnpacked counts bytes that are unpacked.
func (d *remoteDownload) addUnpacked(n int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.limits.reserve(n); err != nil {
		return err
	}
	d.unpacked += n
	return nil
}

// close frees the bytes, and ends all readers.
func (d *remoteDownload) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.limits.free(d.size + d.unpacked)
	d.closed, d.size, d.unpacked = true, 0, 0
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
