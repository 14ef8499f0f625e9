package kube

import (
	"errors"
	"fmt"
	"slices"
	"sync"
)

// ContentMemory limits the memory of the content that all reconciles of a hub render and deliver at the same time: the
// results of child processes, values, and objects, which can need a hundred times as much memory as their text. A
// scope, for example the Profiles of one namespace, can have at most a half. Create it with NewContentMemory. It is
// safe for concurrent use. A nil ContentMemory has no limit.
type ContentMemory struct {
	memory *ResponseMemory

	mu sync.Mutex // guards the fields below
	// documents has the Documents for which memory is reserved. Reconciles share them.
	documents map[*Documents]*heldDocuments
}

// heldDocuments is the memory of Documents, and the number of HeldContents that have them.
type heldDocuments struct {
	reservation *Reservation
	holders     int
}

// uncountedContent is the memory of each HeldContent that needs no reservation, for Documents and for all else, in
// bytes. A ConfigMap of 60 KB with manifests needs about as much.
const uncountedContent = 512 << 10

// ErrContentTooLarge is wrapped by the error for content that needs more memory than a scope can ever have, and
// ErrMemoryInUse by that for content that can have it later. Who waits for content that another one renders gets the
// errors of that one, which can have more content. So both are to be retried.
var (
	ErrContentTooLarge = errors.New("its objects, texts and values need too much memory")
	ErrMemoryInUse     = errors.New("the hub has no memory left for it, and tries again")
)

// IsMissingMemory returns whether err wraps ErrContentTooLarge or ErrMemoryInUse.
func IsMissingMemory(err error) bool {
	return errors.Is(err, ErrContentTooLarge) || errors.Is(err, ErrMemoryInUse)
}

// NewContentMemory returns a ContentMemory with a total in bytes.
func NewContentMemory(total int64) *ContentMemory {
	return &ContentMemory{memory: NewResponseMemory(total), documents: map[*Documents]*heldDocuments{}}
}

// Hold returns a HeldContent, of nothing yet, for a scope. The caller must release it.
func (m *ContentMemory) Hold(scope string) *HeldContent {
	if m == nil {
		return nil
	}
	return &HeldContent{memory: m, scope: scope, reservation: m.memory.Reserve(scope, uncountedContent)}
}

// HeldContent is the memory of the content of one reconcile. It is safe for concurrent use. A nil HeldContent has no
// limit.
type HeldContent struct {
	memory *ContentMemory
	scope  string
	// reservation is the memory of all but Documents.
	reservation *Reservation

	mu sync.Mutex // guards the fields below; it is locked after memory.mu
	// documents have memory in memory.documents, shared bytes in total. uncounted is the memory of those that are too
	// small for that.
	documents         []*Documents
	shared, uncounted int64
	isReleased        bool
}

// Add reserves n more bytes. It waits some seconds for memory that others have. Its error wraps ErrContentTooLarge or
// ErrMemoryInUse, and then nothing is added.
func (h *HeldContent) Add(n int64) error {
	if h == nil {
		return nil
	}
	if err := h.checkSize(n); err != nil {
		return err
	}
	return h.explain(h.reservation.resize(nil, func(size int64) int64 { return size + n }))
}

// checkSize returns an error if h can never have n more bytes, even if all others are released, or is released.
func (h *HeldContent) checkSize(n int64) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.isReleased { // a rendering continues after the end of its reconcile
		return ErrMemoryInUse
	}
	if limit := h.memory.memory.total / 2; h.shared+h.reservation.currentSize()+n-uncountedContent > limit {
		return h.explain(ErrTooMuchMemory)
	}
	return nil
}

// AddYAML is Add for the memory to decode YAML. It returns the result of CountNodes, and how many bytes are added. It
// returns an error if text is too expensive to parse as one document, and then nothing is added.
func (h *HeldContent) AddYAML(text []byte) (nodes int, added int64, err error) {
	withoutAliases := MemoryOfManifest(len(text), countIndicators(text))
	if err := h.Add(withoutAliases); err != nil {
		return 0, 0, err
	}
	nodes, err = checkNodes(text) // it parses a text with aliases
	added = MemoryOfManifest(len(text), nodes)
	if err == nil {
		err = h.Add(added - withoutAliases)
	}
	if err != nil {
		h.Subtract(withoutAliases)
		return 0, 0, err
	}
	return nodes, added, nil
}

// Subtract releases n bytes of Add.
func (h *HeldContent) Subtract(n int64) {
	if h != nil {
		h.reservation.Subtract(n)
	}
}

// AddDocuments reserves the memory of d, with the errors of Add. Several HeldContents with the same Documents share the
// memory, which is reserved for the scope of the first one.
func (h *HeldContent) AddDocuments(d *Documents) error { return h.AddDecoded(d, 0) }

// AddDecoded is AddDocuments for objects for which n bytes were added with Add. These are released, or are those of d.
func (h *HeldContent) AddDecoded(d *Documents, n int64) error {
	if h == nil || d == nil {
		return nil
	}
	size := d.Memory()
	if h.isUncounted(size) || h.shareDocuments(d, nil) {
		h.Subtract(n)
		return nil
	}
	reservation := h.reservation.split(min(n, size))
	h.Subtract(n - min(n, size))
	err := h.checkSize(size)
	if err == nil {
		err = h.explain(reservation.resize(nil, func(int64) int64 { return size }))
	}
	if err != nil {
		reservation.Close()
		return err
	}
	h.shareDocuments(d, reservation)
	return nil
}

// isUncounted returns whether Documents of this size need no reservation.
func (h *HeldContent) isUncounted(size int64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.uncounted+size > uncountedContent {
		return false
	}
	h.uncounted += size
	return true
}

// shareDocuments makes h one of the holders of d, if it is not yet. If there are no others, reservation is the memory
// of d; without it, ok is false. It closes a reservation that is not needed.
func (h *HeldContent) shareDocuments(d *Documents, reservation *Reservation) (ok bool) {
	m := h.memory
	m.mu.Lock()
	defer m.mu.Unlock()
	h.mu.Lock()
	defer h.mu.Unlock()
	held := m.documents[d]
	switch {
	case h.isReleased, slices.Contains(h.documents, d):
		reservation.Close()
		return true
	case held == nil && reservation == nil:
		return false
	case held == nil:
		held = &heldDocuments{reservation: reservation}
		m.documents[d] = held
	default:
		reservation.Close()
	}
	held.holders++
	h.documents, h.shared = append(h.documents, d), h.shared+d.Memory()
	return true
}

// Release releases the memory. The content must not be used after it.
func (h *HeldContent) Release() {
	if h == nil {
		return
	}
	h.reservation.Close()
	m := h.memory
	m.mu.Lock()
	defer m.mu.Unlock()
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, d := range h.documents {
		held := m.documents[d]
		if held.holders--; held.holders == 0 {
			held.reservation.Close()
			delete(m.documents, d)
		}
	}
	h.documents, h.shared, h.isReleased = nil, 0, true
}

// explain returns the error of a reservation as one of content.
func (h *HeldContent) explain(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrTooMuchMemory):
		return fmt.Errorf("%w: more than %d MiB, the limit of this hub", ErrContentTooLarge, h.memory.memory.total>>21)
	case h.scope == "":
		return fmt.Errorf("%w: content of ClusterProfiles needs it", ErrMemoryInUse)
	}
	return fmt.Errorf("%w: content of Profiles in namespace %s needs it", ErrMemoryInUse, h.scope)
}
