package kube

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// ResponseMemory limits the memory of the responses of clusters, while they are read and decoded, and of what is kept
// of them: in total, and for the clusters of one namespace. A namespace can have as much as is free, so half of the
// total, or a third if another one takes as much as it can: no number of namespaces takes all. Create it with
// NewResponseMemory. It is safe for concurrent use.
//
// It estimates the memory from the bytes and the JSON values of the responses. The estimate is that of the worst JSON
// for each decoder, some times the memory that an ordinary response needs.
type ResponseMemory struct {
	total int64

	mu          sync.Mutex // guards the fields below
	used        int64
	byNamespace map[string]int64
	// freed is closed, and replaced, when memory is freed.
	freed chan struct{}
}

// NewResponseMemory returns a ResponseMemory with a total in bytes.
func NewResponseMemory(total int64) *ResponseMemory {
	return &ResponseMemory{total: total, byNamespace: map[string]int64{}, freed: make(chan struct{})}
}

const (
	// freeResponse and freeEvent are the bytes of memory of each response, and of each event of a watch, that are not
	// counted. An object, or the APIs of a cluster without many CustomResourceDefinitions, need less, so that they can
	// always be read.
	freeResponse = 512 << 10
	freeEvent    = 128 << 10
	// decodeTime is the time to decode a response per byte of memory, at least four times the measured one. The memory of
	// a response counts for so long after it was read: 4 s for 256 MiB.
	decodeTime = 15 * time.Nanosecond
	// maxWait is how long a response waits for memory that others have.
	maxWait = 5 * time.Second
	// maxWatchBuffer is the length of an event, in bytes, after which a watch ends and must begin again: the decoder of a
	// watch keeps a buffer for the longest event.
	maxWatchBuffer = 256 << 10
)

// Decoder is a decoder of responses.
type Decoder int

// The decoders.
const (
	// DecodeAny is for all other responses. Most memory need unstructured objects with one field each.
	DecodeAny Decoder = iota
	// DecodeMetadata is for metav1.PartialObjectMetadata. Managed fields are not decoded.
	DecodeMetadata
	// DecodeTyped is for objects like corev1.Pod, each of which has a large structure even if it is empty.
	DecodeTyped
)

// decoderMemory is the memory that a decoder needs, in bytes for each character that can begin a value.
type decoderMemory struct {
	item, element, object int64
	// maxDepth is the depth from which on values need no memory but their text; 0 is none.
	maxDepth int
}

// memory returns the memory for the worst JSON that was found, rounded up, while a slice grows: see
// TestMemoryOfDecoders.
func (d Decoder) memory() decoderMemory {
	switch d {
	case DecodeMetadata:
		return decoderMemory{item: 640, element: 200, object: 640, maxDepth: 6}
	case DecodeTyped:
		return decoderMemory{item: 2560, element: 900, object: 640}
	case DecodeAny:
	}
	return decoderMemory{item: 720, element: 340, object: 640}
}

// The memory of other characters, in bytes. A byte of text is in the buffer of the response, which grows, and in the
// decoded value.
const (
	arrayMemory = 64
	fieldMemory = 128
	byteMemory  = 3
)

// Limit returns a body that fails when the response needs more memory than namespace can have, or is Protobuf, whose
// values are not counted. The memory is that of decoder.
func (m *ResponseMemory) Limit(body io.ReadCloser, namespace string, decoder Decoder) io.ReadCloser {
	return m.limit(body, namespace, decoder, freeResponse)
}

// LimitEvents is Limit for a watch, in which each event is a response. The watch ends after a long event.
func (m *ResponseMemory) LimitEvents(body io.ReadCloser, namespace string, decoder Decoder) io.ReadCloser {
	limited := m.limit(body, namespace, decoder, freeEvent)
	limited.isWatch = true
	return limited
}

func (m *ResponseMemory) limit(body io.ReadCloser, namespace string, decoder Decoder, free int64) *countedBody {
	needs := decoder.memory()
	return &countedBody{Reservation: m.Reserve(namespace, free), body: body, decoder: needs, scanner: jsonScanner{maxDepth: needs.maxDepth}}
}

// Reserve returns a Reservation for a cluster in namespace, of which free bytes are not counted. The caller must close
// it.
func (m *ResponseMemory) Reserve(namespace string, free int64) *Reservation {
	return &Reservation{memory: m, namespace: namespace, free: free}
}

// add adds n bytes, which can be negative, to what the clusters of namespace have. If they cannot have as much, it
// returns a channel that is closed when memory is freed.
func (m *ResponseMemory) add(namespace string, n int64) (freed <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if free := m.total - m.used - n; n > 0 && m.byNamespace[namespace]+n > free {
		return m.freed
	}
	m.used += n
	if m.byNamespace[namespace] += n; m.byNamespace[namespace] == 0 {
		delete(m.byNamespace, namespace)
	}
	if n < 0 {
		close(m.freed)
		m.freed = make(chan struct{})
	}
	return nil
}

// Reservation is the memory for one response, or for what is kept of the responses of one cluster. It is safe for
// concurrent use. A nil Reservation has no limits.
type Reservation struct {
	memory    *ResponseMemory
	namespace string
	free      int64

	mu       sync.Mutex // guards the fields below
	reserved int64
	isClosed bool
}

// Resize changes the memory to n bytes. It returns an error, and changes nothing, if the cluster can never have as
// much, or cannot have it within maxWait. After Close it does nothing.
func (r *Reservation) Resize(n int64) error {
	if r == nil {
		return nil
	}
	if limit := r.memory.total / 2; n-r.free > limit {
		return fmt.Errorf("the cluster returned what needs more than %d MiB of memory", limit>>20)
	}
	freed := r.tryResize(n)
	if freed == nil {
		return nil
	}
	for timeout := time.After(maxWait); freed != nil; freed = r.tryResize(n) {
		select {
		case <-freed:
		case <-timeout:
			return fmt.Errorf("the hub has no memory for it while it holds other responses of clusters in namespace %s; it tries again", r.namespace)
		}
	}
	return nil
}

// tryResize is Resize without a wait. If there is not enough memory, it returns a channel that is closed when memory is
// freed.
func (r *Reservation) tryResize(n int64) (freed <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	more := max(0, n-r.free) - r.reserved
	if more == 0 || r.isClosed {
		return nil
	}
	if freed = r.memory.add(r.namespace, more); freed == nil {
		r.reserved += more
	}
	return freed
}

// New returns a Reservation for other memory of the same cluster, or nil if r is nil. The caller must close it.
func (r *Reservation) New() *Reservation {
	if r == nil {
		return nil
	}
	return r.memory.Reserve(r.namespace, 0)
}

// Close frees the memory.
func (r *Reservation) Close() {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.memory.add(r.namespace, -r.reserved)
	r.reserved, r.isClosed = 0, true
}

// countedBody is a body that reserves the memory of a response, or of each event of a watch, while it is read.
type countedBody struct {
	*Reservation

	body    io.ReadCloser
	decoder decoderMemory
	isWatch bool

	isStarted  bool // after the first byte
	isComplete bool // after a long event
	scanner    jsonScanner
	bytes      int64 // of the response or the event
}

// Read implements io.Reader.
func (b *countedBody) Read(p []byte) (int, error) {
	if b.isComplete {
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
		if err := b.Resize(b.needed()); err != nil {
			return 0, err
		}
		if b.isWatch && b.scanner.isAtEnd(part[scanned-1]) {
			b.endEvent()
		}
		part = part[scanned:]
	}
	return n, err
}

// needed returns the memory that the response needs.
func (b *countedBody) needed() int64 {
	counts, decoder := &b.scanner.jsonCounts, b.decoder
	return b.bytes*byteMemory + counts.arrays*arrayMemory + counts.fields*fieldMemory +
		counts.items*decoder.item + counts.elements*decoder.element + counts.objects*decoder.object
}

// MemoryOf returns the memory, in bytes, that DecodeAny needs for JSON.
func MemoryOf(raw []byte) int64 {
	counted := countedBody{decoder: DecodeAny.memory(), bytes: int64(len(raw))}
	counted.scanner.scan(raw)
	return counted.needed()
}

// endEvent ends an event of a watch.
func (b *countedBody) endEvent() {
	b.isComplete = b.isComplete || b.bytes > maxWatchBuffer
	b.bytes, b.scanner.jsonCounts = 0, jsonCounts{}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.freeLater()
}

// freeLater frees the memory when the response must have been decoded. The caller must hold mu.
func (b *countedBody) freeLater() {
	if n := b.reserved; n > 0 {
		time.AfterFunc(time.Duration(n)*decodeTime, func() { b.memory.add(b.namespace, -n) })
	}
	b.reserved = 0
}

// Close closes the body.
func (b *countedBody) Close() error {
	b.mu.Lock()
	b.freeLater()
	b.isClosed = true
	b.mu.Unlock()
	return b.body.Close()
}
