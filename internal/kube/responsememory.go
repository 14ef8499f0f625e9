package kube

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"
)

// ResponseMemory limits the memory for the responses of clusters while they are read and decoded, and for what is kept
// of them: in total, and for the clusters of one namespace. A namespace may reserve as much as stays unreserved: at
// most half of the total, a third beside one other namespace, and so on. So no number of namespaces takes all. Create
// it with NewResponseMemory. It is safe for concurrent use.
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
	// maxWait is how long a Reservation waits for memory that others have.
	maxWait = 5 * time.Second
	// maxWatchBuffer is the length of an event, in bytes, after which a watch ends and must begin again: the decoder of a
	// watch keeps a buffer for the longest event.
	maxWatchBuffer = 256 << 10
)

// DecodedType selects the estimate for the Go types into which a response is decoded.
type DecodedType int

// The types.
const (
	// TypeMetadata is metav1.PartialObjectMetadata. Managed fields are not decoded.
	TypeMetadata DecodedType = iota
	// TypePodOrNode is corev1.Pod and corev1.Node, which have large structures even if they are empty.
	TypePodOrNode
	// TypeAny are all others. The worst case is unstructured objects with one field.
	TypeAny
)

// valueCosts is the memory for each character that can begin a value, in bytes. See jsonCounts.
type valueCosts struct {
	item, element, object int64
	// maxDepth is the deepest level whose values are counted; 0: all levels.
	maxDepth int
}

// costs returns the costs of a type: the highest that TestMemoryOfTypes measures, with the old and the new array of a
// slice that grows, rounded up.
func (t DecodedType) costs() valueCosts {
	switch t {
	case TypeMetadata:
		// Level 6 has the entries of metadata.managedFields in a list, and not what is in fieldsV1.
		return valueCosts{item: 640, element: 200, object: 640, maxDepth: 6}
	case TypePodOrNode:
		return valueCosts{item: 2560, element: 900, object: 640}
	case TypeAny:
	}
	return valueCosts{item: 720, element: 340, object: 640}
}

// These costs, in bytes, are the same for all types. A byte of text is in the buffer of the response, which grows, and
// in the decoded value.
const (
	arrayCost = 64
	fieldCost = 128
	byteCost  = 3
)

// MemoryOf returns the estimate for JSON of TypeAny, in bytes.
func MemoryOf(raw []byte) int64 {
	counted := countedBody{costs: TypeAny.costs(), bytes: int64(len(raw))}
	counted.scanner.scan(raw)
	return counted.needed()
}

// Limit returns a body of a response for a cluster in namespace. Reads fail if there is not enough memory for it, or if
// it is Protobuf, whose values cannot be counted.
func (m *ResponseMemory) Limit(body io.ReadCloser, namespace string, into DecodedType) io.ReadCloser {
	return m.limit(body, namespace, into, uncountedPerResponse)
}

// LimitEvents is Limit for a watch, in which each event counts like a response. The watch ends after a long event.
func (m *ResponseMemory) LimitEvents(body io.ReadCloser, namespace string, into DecodedType) io.ReadCloser {
	limited := m.limit(body, namespace, into, uncountedPerEvent)
	limited.isWatch = true
	return limited
}

func (m *ResponseMemory) limit(body io.ReadCloser, namespace string, into DecodedType, uncounted int64) *countedBody {
	costs := into.costs()
	return &countedBody{reservation: m.Reserve(namespace, uncounted), body: body, costs: costs, scanner: jsonScanner{maxDepth: costs.maxDepth}}
}

// Reserve returns a Reservation, of nothing yet, for a cluster in namespace. Its first bytes, uncounted, need no
// reservation. The caller must close it.
func (m *ResponseMemory) Reserve(namespace string, uncounted int64) *Reservation {
	return &Reservation{memory: m, namespace: namespace, uncounted: uncounted}
}

// tryAdd adds delta, which can be negative, to what is reserved for namespace. If there is not enough memory, ok is
// false, and released is closed when memory is released.
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

// Reservation is the memory for one response, or for what is kept of the responses of one cluster. It is safe for
// concurrent use. A nil Reservation has no limit.
type Reservation struct {
	memory    *ResponseMemory
	namespace string
	uncounted int64

	mu       sync.Mutex // guards the fields below
	reserved int64
	isClosed bool
}

// Resize changes the reservation to n bytes. It returns an error, and changes nothing, if the cluster can never have as
// much, or cannot have it within maxWait. After Close it does nothing.
func (r *Reservation) Resize(ctx context.Context, n int64) error {
	if r == nil {
		return nil
	}
	if limit := r.memory.total / 2; n-r.uncounted > limit {
		return fmt.Errorf("the cluster returned what needs more than %d MiB of memory", limit>>20)
	}
	ok, released := r.tryResize(n)
	if ok {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, maxWait)
	defer cancel()
	for !ok {
		select {
		case <-released:
			ok, released = r.tryResize(n)
		case <-ctx.Done():
			return fmt.Errorf("the hub has not enough memory for the responses of clusters in namespace %s, because others are being read; it tries again", r.namespace)
		}
	}
	return nil
}

// tryResize is Resize without a wait.
func (r *Reservation) tryResize(n int64) (ok bool, released <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delta := max(0, n-r.uncounted) - r.reserved
	if delta == 0 || r.isClosed {
		return true, nil
	}
	if ok, released = r.memory.tryAdd(r.namespace, delta); ok {
		r.reserved += delta
	}
	return ok, released
}

// ForSameNamespace returns another Reservation for a cluster in the same namespace, or nil if r is nil. The caller must
// close it.
func (r *Reservation) ForSameNamespace() *Reservation {
	if r == nil {
		return nil
	}
	return r.memory.Reserve(r.namespace, 0)
}

// Close releases the memory.
func (r *Reservation) Close() {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.memory.tryAdd(r.namespace, -r.reserved)
	r.reserved, r.isClosed = 0, true
}

// releaseWhenDecoded releases the memory when a response must have been decoded, and closes r if it was the last one.
func (r *Reservation) releaseWhenDecoded(isLast bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := r.reserved; n > 0 {
		time.AfterFunc(time.Duration(n)*decodeTime, func() { r.memory.tryAdd(r.namespace, -n) })
	}
	r.reserved, r.isClosed = 0, r.isClosed || isLast
}

// countedBody is a body that reserves the memory of a response, or of each event of a watch, while it is read.
type countedBody struct {
	reservation *Reservation
	body        io.ReadCloser
	costs       valueCosts
	isWatch     bool

	isStarted bool // after the first byte
	// isEnded is true after an event longer than maxWatchBuffer. The next read returns io.EOF.
	isEnded bool
	scanner jsonScanner
	bytes   int64 // of the response or the event
}

// Read implements io.Reader.
func (b *countedBody) Read(p []byte) (int, error) {
	if b.isEnded {
		return 0, io.EOF
	}
	n, err := b.body.Read(p)
	if n > 0 && !b.isStarted {
		b.isStarted = true
		if p[0] == protobufPrefix[0] {
			return 0, errProtobuf
		}
	}
	for part := p[:n]; len(part) > 0; {
		scanned := b.scanner.scanValue(part)
		b.bytes += int64(scanned)
		// A Reader has no context. maxWait limits the wait.
		if err := b.reservation.Resize(context.Background(), b.needed()); err != nil {
			return 0, err
		}
		if b.isWatch && b.scanner.isAtEnd(part[scanned-1]) {
			b.endEvent()
		}
		part = part[scanned:]
	}
	return n, err
}

// needed returns the memory that the response or the event needs.
func (b *countedBody) needed() int64 {
	counts, costs := &b.scanner.jsonCounts, b.costs
	return b.bytes*byteCost + counts.arrays*arrayCost + counts.fields*fieldCost +
		counts.items*costs.item + counts.elements*costs.element + counts.objects*costs.object
}

// endEvent ends an event of a watch.
func (b *countedBody) endEvent() {
	b.isEnded = b.isEnded || b.bytes > maxWatchBuffer
	b.bytes, b.scanner.jsonCounts = 0, jsonCounts{}
	b.reservation.releaseWhenDecoded(false)
}

// Close closes the body.
func (b *countedBody) Close() error {
	b.reservation.releaseWhenDecoded(true)
	return b.body.Close()
}
