package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/kubernetes/scheme"
)

// ResponseMemory limits the memory for the responses of clusters while they are read and decoded, and for the kept
// parts of them: in total, and for the clusters of one namespace. A namespace can reserve at most as much as it leaves
// for all others: half of the total, or a quarter if another namespace has a half. So all namespaces together never
// reserve the total. Create it with NewResponseMemory. It is safe for concurrent use.
//
// It estimates the memory from the bytes and the JSON values of the responses. The estimate is for the worst JSON,
// several times the need of an ordinary response.
type ResponseMemory struct {
	total int64

	mu          sync.Mutex // guards the fields below
	reserved    int64
	byNamespace map[string]int64
	// released is closed, and replaced, when memory is released.
	released chan struct{}
}

// NewResponseMemory returns a ResponseMemory with a total in bytes.
func NewResponseMemory(total int64) *ResponseMemory {
	return &ResponseMemory{total: total, byNamespace: map[string]int64{}, released: make(chan struct{})}
}

const (
	// uncountedPerResponse and uncountedPerEvent are the bytes of each response, and of each event of a watch, that
	// need no reservation. An ordinary object, or the APIs of a cluster with few CustomResourceDefinitions, need less,
	// so that they can be read even if no memory is available.
	uncountedPerResponse = 512 << 10
	uncountedPerEvent    = 128 << 10
	// decodeTime is the time to decode a response per byte of memory, several times the measured one. The memory of a
	// response stays reserved for so long after it was read: 4 s for 256 MiB.
	decodeTime = 15 * time.Nanosecond
	// maxWait is the maximum time for which a Reservation waits for memory that others have.
	maxWait = 5 * time.Second
	// maxWatchBuffer is the length of an event, in bytes, after which a watch ends and must begin again: the decoder of a
	// watch keeps a buffer for the longest event.
	maxWatchBuffer = 64 << 10
	// maxEvent limits an event of a watch, in bytes. API servers store objects of at most 1.5 MiB.
	maxEvent = 4 << 20
	// maxHold is the maximum time for which a response has a reservation while it is read: a cluster could stop sending.
	maxHold = time.Minute
)

// Content is the kind of content that a body must have.
type Content int

// The contents.
const (
	// ContentObjects is JSON that begins with an object.
	ContentObjects Content = iota
	// ContentMetadata is the JSON that a client of metav1.PartialObjectMetadata has requested.
	ContentMetadata
	// ContentText is any text.
	ContentText
)

// ErrTooMuchMemory is the error for a response that needs more memory than can ever be reserved.
var ErrTooMuchMemory = errors.New("the cluster returned data that needs too much memory")

// errNotJSON is the error for responses that are no JSON: values of other formats cannot be counted.
var errNotJSON = errors.New("the cluster returned something other than JSON objects")

// errLongEvent ends the list at the start of a watch: the reflector then lists in pages.
var errLongEvent = fmt.Errorf("an event has more than %d KiB", maxWatchBuffer>>10)

// DecodedType selects the estimate for the Go types into which JSON is decoded.
type DecodedType int

// The types.
const (
	// TypeMetadata is metav1.PartialObjectMetadata. Managed fields are not decoded.
	TypeMetadata DecodedType = iota
	// TypeUnstructured are unstructured objects that are not decoded from a response. The worst case is objects with one
	// field.
	TypeUnstructured
	// TypeAny are unstructured objects, and the types of discovery and of package metav1.
	TypeAny
	// TypeBuiltin are the types of client-go, some of which have large structures even if they are empty.
	TypeBuiltin
)

// valueCosts is the memory for each of jsonCounts, in bytes.
type valueCosts struct{ object, field, item, element int64 }

// These costs, in bytes, are the same for all types. A byte of text is in the buffer of the response, which grows, and
// in the decoded value.
const (
	arrayCost = 64
	byteCost  = 3
)

// costs returns the costs of a type: the highest that TestMemoryOfTypes measures, with the old and the new array of a
// slice that grows, rounded up.
func (t DecodedType) costs() valueCosts {
	switch t {
	case TypeMetadata:
		return valueCosts{object: 640, field: 128, item: 640, element: 200}
	case TypeUnstructured:
		return valueCosts{object: 384, field: 76, item: 48, element: 48}
	case TypeBuiltin:
		return valueCosts{object: 640, field: 128, item: 4096, element: 1100}
	case TypeAny:
	}
	return valueCosts{object: 640, field: 128, item: 720, element: 340}
}

// memoryOf returns the estimate for JSON.
func (s *jsonScanner) memoryOf(bytes int64, decoded DecodedType) int64 {
	counts, costs := s.all, decoded.costs()
	if decoded == TypeMetadata {
		counts = s.shallow
	}
	return bytes*byteCost + counts.arrays*arrayCost + counts.objects*costs.object + counts.fields*costs.field +
		counts.items*costs.item + counts.elements*costs.element
}

// MemoryOf returns the estimate for JSON that is decoded into a type, in bytes.
func MemoryOf(raw []byte, decoded DecodedType) int64 {
	var scanner jsonScanner
	scanner.scan(raw)
	return scanner.memoryOf(int64(len(raw)), decoded)
}

// builtinKinds returns the kinds whose types client-go has.
//
//nolint:gochecknoglobals // it never changes
var builtinKinds = sync.OnceValue(func() map[string]bool {
	kinds := map[string]bool{}
	for gvk, goType := range scheme.Scheme.AllKnownTypes() {
		if !strings.HasPrefix(goType.PkgPath(), "k8s.io/apimachinery/") && !strings.HasPrefix(goType.PkgPath(), "k8s.io/api/apidiscovery/") {
			kinds[gvk.Kind] = true
		}
	}
	return kinds
})

// Limit returns a body of a response for a cluster in namespace. Reads fail if there is not enough memory for it, or if
// it does not have the content.
func (m *ResponseMemory) Limit(body io.ReadCloser, namespace string, content Content) io.ReadCloser {
	return &reservingBody{reservation: m.Reserve(namespace, uncountedPerResponse), body: body, content: content}
}

// LimitEvents is Limit for a watch, in which each event counts like a response. The watch ends after a long event; if
// it begins with a list, it ends with an error.
func (m *ResponseMemory) LimitEvents(body io.ReadCloser, namespace string, content Content, beginsWithList bool) io.ReadCloser {
	limited := &reservingBody{reservation: m.Reserve(namespace, uncountedPerEvent), body: body, content: content}
	limited.scanner.isEvent, limited.endOfLongEvent = true, io.EOF
	if beginsWithList {
		limited.endOfLongEvent = errLongEvent
	}
	return limited
}

// Reserve returns an empty Reservation for a cluster in namespace. uncounted is the number of its first bytes that need
// no memory of the total. The caller must close it.
func (m *ResponseMemory) Reserve(namespace string, uncounted int64) *Reservation {
	return &Reservation{memory: m, namespace: namespace, uncounted: uncounted}
}

// tryAdd adds delta, which can be negative, to the memory that is reserved for namespace. If there is not enough
// memory, ok is false, and released is closed when memory is released.
func (m *ResponseMemory) tryAdd(namespace string, delta int64) (ok bool, released <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	// Afterwards a namespace has at most as much as is left for all others.
	if available := m.total - m.reserved - delta; delta > 0 && m.byNamespace[namespace]+delta > available {
		return false, m.released
	}
	m.reserved += delta
	if m.byNamespace[namespace] += delta; m.byNamespace[namespace] == 0 {
		delete(m.byNamespace, namespace)
	}
	if delta < 0 {
		close(m.released)
		m.released = make(chan struct{})
	}
	return true, nil
}

// move makes n reserved bytes count for another namespace, even beyond its limit.
func (m *ResponseMemory) move(from, to string, n int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.byNamespace[to] += n
	if m.byNamespace[from] -= n; m.byNamespace[from] == 0 {
		delete(m.byNamespace, from)
	}
	close(m.released)
	m.released = make(chan struct{})
}

// Reservation is the memory for one response, or for the kept parts of the responses of one cluster. It is safe for
// concurrent use. A nil Reservation has no limit.
type Reservation struct {
	memory    *ResponseMemory
	uncounted int64

	mu        sync.Mutex // guards the fields below
	namespace string
	size      int64 // with the uncounted bytes
	reserved  int64
	isClosed  bool
}

// Resize changes the reservation to n bytes. On an error it changes nothing. It returns ErrTooMuchMemory if the cluster
// can never have n bytes, and another error if they do not become available within maxWait. After Close it reserves
// nothing.
func (r *Reservation) Resize(ctx context.Context, n int64) error {
	return r.resize(ctx, func(int64) int64 { return n })
}

// Add is Resize by n more bytes. Several callers can share r with Add and Subtract.
func (r *Reservation) Add(ctx context.Context, n int64) error {
	return r.resize(ctx, func(size int64) int64 { return size + n })
}

// resize is Resize to the size that newSize returns for the present size.
func (r *Reservation) resize(ctx context.Context, newSize func(size int64) int64) error {
	if r == nil {
		return nil
	}
	ok, released, err := r.tryResize(newSize)
	if ok || err != nil {
		return err
	}
	timer := time.NewTimer(maxWait)
	defer timer.Stop()
	noMemory := fmt.Errorf("the hub has not enough memory for the responses of clusters in namespace %s at the moment; it tries again", r.namespace)
	for !ok && err == nil {
		select {
		case <-released:
			ok, released, err = r.tryResize(newSize)
		case <-timer.C:
			return noMemory
		case <-ctx.Done():
			return noMemory
		}
	}
	return err
}

// Shrink changes the reservation to n bytes if it is larger.
func (r *Reservation) Shrink(n int64) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.shrink(n)
}

// Subtract is Shrink by n bytes.
func (r *Reservation) Subtract(n int64) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.shrink(max(0, r.size-n)) // it is 0 after Close
}

// shrink is Shrink for a caller that holds mu.
func (r *Reservation) shrink(n int64) {
	r.size = min(r.size, n)
	if delta := max(0, n-r.uncounted) - r.reserved; delta < 0 {
		r.memory.tryAdd(r.namespace, delta)
		r.reserved += delta
	}
}

// currentSize returns the size with the uncounted bytes.
func (r *Reservation) currentSize() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.size
}

// split moves n bytes of r, at most all, to a new Reservation, which the caller must close.
func (r *Reservation) split(n int64) *Reservation {
	r.mu.Lock()
	defer r.mu.Unlock()
	n = min(n, r.size) // it is 0 after Close
	r.size -= n
	rest := min(r.reserved, max(0, r.size-r.uncounted))
	other := &Reservation{memory: r.memory, namespace: r.namespace, size: n, reserved: r.reserved - rest}
	r.reserved = rest
	return other
}

// tryResize is resize without a wait: if ok is false, released is closed when memory is released.
func (r *Reservation) tryResize(newSize func(size int64) int64) (ok bool, released <-chan struct{}, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := newSize(r.size)
	if limit := r.memory.total / 2; n-r.uncounted > limit {
		return false, nil, fmt.Errorf("%w: more than %d MiB", ErrTooMuchMemory, limit>>20)
	}
	if r.isClosed {
		return true, nil, nil
	}
	delta := max(0, n-r.uncounted) - r.reserved
	if delta != 0 {
		if ok, released := r.memory.tryAdd(r.namespace, delta); !ok {
			return false, released, nil
		}
	}
	r.size, r.reserved = n, r.reserved+delta
	return true, nil, nil
}

// moveTo makes the reservation count for another namespace, even beyond its limit.
func (r *Reservation) moveTo(namespace string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.reserved > 0 {
		r.memory.move(r.namespace, namespace, r.reserved)
	}
	r.namespace = namespace
}

// ForSameNamespace returns another Reservation for a cluster in the same namespace, as for a response, or nil if r is
// nil. The caller must close it.
func (r *Reservation) ForSameNamespace() *Reservation {
	if r == nil {
		return nil
	}
	return r.memory.Reserve(r.namespace, uncountedPerResponse)
}

// ForLists is ForSameNamespace for lists of one cluster. All LimitedStores that read lists of the cluster at the same
// time share the result.
func (r *Reservation) ForLists() *Reservation {
	if r == nil {
		return nil
	}
	return r.memory.Reserve(r.namespace, uncountedOfLists)
}

// Close releases the memory.
func (r *Reservation) Close() {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.memory.tryAdd(r.namespace, -r.reserved)
	r.size, r.reserved, r.isClosed = 0, 0, true
}

// releaseWhenDecoded empties r, and releases its memory after the time to decode a response of this size. It closes r
// if the response was the last one.
func (r *Reservation) releaseWhenDecoded(isLast bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := r.reserved; n > 0 {
		time.AfterFunc(time.Duration(n)*decodeTime, func() { r.memory.tryAdd(r.namespace, -n) })
	}
	r.size, r.reserved, r.isClosed = 0, 0, r.isClosed || isLast
}

// reservingBody is a body that reserves the memory of a response, or of each event of a watch, while it is read.
type reservingBody struct {
	reservation *Reservation
	body        io.ReadCloser
	content     Content
	// endOfLongEvent is the result of the read after an event longer than maxWatchBuffer.
	endOfLongEvent error

	isStarted bool // after the first character that is no space
	isEnded   bool // after a long event
	scanner   jsonScanner
	bytes     int64 // of the response or the event

	mu sync.Mutex // guards the field below: a watch is closed while it is read
	// expiry closes the body after maxHold; nil if nothing is reserved.
	expiry *time.Timer
}

// Read implements io.Reader.
func (b *reservingBody) Read(p []byte) (int, error) {
	if b.isEnded {
		return 0, b.endOfLongEvent
	}
	n, err := b.body.Read(p)
	if !b.isStarted && b.content != ContentText {
		if start := bytes.TrimLeft(p[:n], " \t\r\n"); len(start) > 0 {
			b.isStarted = true
			if start[0] != '{' {
				return 0, errNotJSON
			}
		}
	}
	for part := p[:n]; len(part) > 0; {
		scanned := b.scanner.scanValue(part)
		b.bytes += int64(scanned)
		if b.scanner.isEvent && b.bytes > maxEvent {
			return 0, fmt.Errorf("the cluster returned an event of more than %d MiB", maxEvent>>20)
		}
		if err := b.reserve(); err != nil {
			return 0, err
		}
		if b.scanner.isEvent && b.scanner.isAtEnd(part[scanned-1]) {
			b.endEvent()
		}
		part = part[scanned:]
	}
	return n, err
}

// reserve reserves the memory that the response or the event needs by now.
func (b *reservingBody) reserve() error {
	needed := b.scanner.memoryOf(b.bytes, b.decodedType())
	// A Reader has no context. maxWait limits the wait.
	if err := b.reservation.Resize(context.Background(), needed); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.expiry == nil && needed > b.reservation.uncounted {
		b.expiry = time.AfterFunc(maxHold, func() { _ = b.body.Close() }) // the read fails
	}
	return nil
}

// decodedType returns the type into which the response or the event is decoded, as far as it was read.
func (b *reservingBody) decodedType() DecodedType {
	switch {
	case b.scanner.hasBuiltinKind || b.scanner.hasAmbiguousField:
		return TypeBuiltin
	case b.content == ContentMetadata && !b.scanner.hasOtherKind:
		return TypeMetadata
	}
	return TypeAny
}

// endEvent ends an event of a watch.
func (b *reservingBody) endEvent() {
	b.isEnded = b.isEnded || b.bytes > maxWatchBuffer
	b.bytes, b.scanner = 0, jsonScanner{isEvent: true}
	b.release(false)
}

// Close closes the body.
func (b *reservingBody) Close() error {
	b.release(true)
	return b.body.Close()
}

func (b *reservingBody) release(isLast bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.expiry != nil {
		b.expiry.Stop()
		b.expiry = nil
	}
	b.reservation.releaseWhenDecoded(isLast)
}
