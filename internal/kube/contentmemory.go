package kube

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// ContentMemory limits the memory of the content that all reconciles of a hub render and deliver at the same time: the
// inputs and results of child processes, values, and objects, which can need a hundred times as much memory as their
// text. The clusters of one namespace can have at most a half. Create it with NewContentMemory. It is safe for
// concurrent use. A nil ContentMemory has no limit.
type ContentMemory struct {
	memory *ResponseMemory

	mu sync.Mutex // guards the field below
	// documents has the Documents for which memory is reserved. Reconciles share them.
	documents map[*Documents]*sharedDocuments
}

// sharedDocuments is the memory of Documents that several ContentReservations share. It counts for one namespace.
type sharedDocuments struct {
	reservation *Reservation
	namespace   string         // the namespace of reservation
	users       map[string]int // the number of ContentReservations by namespace
}

const (
	// retryTime is the time after which ContentReservation.Retry makes no further call. It is short, because one call can
	// take as long as a rendering.
	retryTime = 4 * time.Second
	// retryPause is the first pause of retryAttempts calls. Each further one is twice as long.
	retryPause    = 250 * time.Millisecond
	retryAttempts = 5
)

// uncountedContent is the number of uncounted bytes of each ContentReservation: once for Documents, and once for all
// other content. A ConfigMap of 45 KB with manifests needs about as much.
const uncountedContent = 512 << 10

// ErrContentTooLarge is wrapped by the error for content that needs more memory than a namespace can ever have.
// ErrMemoryInUse is wrapped if memory can become available later: see ContentReservation.Retry. Callers that wait for
// the same rendering share its error, see ContentReservation.IsErrorOfOther.
var (
	ErrContentTooLarge = errors.New("its objects, texts and values need too much memory")
	ErrMemoryInUse     = errors.New("the hub has not enough memory for it at the moment, and tries again")
)

// errAllInUse names no namespace: callers with clusters in other namespaces share it.
var errAllInUse = fmt.Errorf("%w: the content for all clusters in a namespace has a common limit", ErrMemoryInUse)

// IsMemoryError returns whether err wraps ErrContentTooLarge or ErrMemoryInUse.
func IsMemoryError(err error) bool {
	return errors.Is(err, ErrContentTooLarge) || errors.Is(err, ErrMemoryInUse)
}

// memoryError is the error of a ContentReservation.
type memoryError struct {
	error
	reservation *ContentReservation
}

// Unwrap returns an error that wraps ErrContentTooLarge or ErrMemoryInUse.
func (e memoryError) Unwrap() error { return e.error }

// NewContentMemory returns a ContentMemory with a total in bytes.
func NewContentMemory(total int64) *ContentMemory {
	return &ContentMemory{memory: NewResponseMemory(total), documents: map[*Documents]*sharedDocuments{}}
}

// maxPerNamespace returns the maximum for one namespace in bytes.
func (m *ContentMemory) maxPerNamespace() int64 { return m.memory.total / 2 }

// Reserve returns an empty ContentReservation for a cluster in namespace. The caller must release it.
func (m *ContentMemory) Reserve(namespace string) *ContentReservation {
	if m == nil {
		return nil
	}
	return &ContentReservation{memory: m, namespace: namespace, otherContent: m.memory.Reserve(namespace, uncountedContent), documents: map[*Documents]bool{}}
}

// ContentReservation is the memory of the content of one reconcile. It is safe for concurrent use. A nil
// ContentReservation has no limit. After Release it can have no more memory.
type ContentReservation struct {
	memory    *ContentMemory
	namespace string
	// otherContent is the memory of all content but Documents.
	otherContent *Reservation

	mu sync.Mutex // guards the fields below; it is locked after memory.mu
	// documents has the Documents of the reconcile. The value is true if memory.documents has them; the others are small.
	documents map[*Documents]bool
	// sharedBytes is the memory of the shared Documents, smallBytes of the small ones.
	sharedBytes, smallBytes int64
	isReleased              bool
	// hasFailed is true if a call has failed with ErrMemoryInUse since the last call of TakeFailure.
	hasFailed bool
}

// Add reserves n more bytes. Its error wraps ErrContentTooLarge or ErrMemoryInUse, and then nothing is added. It does
// not wait for memory that others have, since its caller can have a resource for which others wait, such as a child
// process.
func (r *ContentReservation) Add(n int64) error {
	if r == nil {
		return nil
	}
	if err := r.checkLimit(n); err != nil {
		return err
	}
	return r.resize(r.otherContent, func(size int64) int64 { return size + n })
}

// resize changes a Reservation without a wait.
func (r *ContentReservation) resize(reservation *Reservation, newSize func(size int64) int64) error {
	ok, _, err := reservation.tryResize(newSize)
	if err == nil && !ok {
		err = ErrMemoryInUse
		r.mu.Lock()
		r.hasFailed = true
		r.mu.Unlock()
	}
	return r.toContentError(err)
}

// TakeFailure returns an error that wraps ErrMemoryInUse if a call of r has failed with it since the last TakeFailure.
// It is for callers of functions that continue after such an error.
func (r *ContentReservation) TakeFailure() error {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	hasFailed := r.hasFailed
	if r.hasFailed = false; hasFailed {
		return r.toContentError(ErrMemoryInUse)
	}
	return nil
}

// checkLimit returns an error if r is released, or if n more bytes exceed the limit of a namespace.
func (r *ContentReservation) checkLimit(n int64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.isReleased { // a rendering continues after the end of its reconcile
		return r.toContentError(ErrMemoryInUse)
	}
	if r.sharedBytes+r.otherContent.currentSize()+n-uncountedContent > r.memory.maxPerNamespace() {
		return r.toContentError(ErrTooMuchMemory)
	}
	return nil
}

// HasReserved returns whether r has more than its uncounted bytes. Then Add can fail although it adds less than the
// limit of a namespace.
func (r *ContentReservation) HasReserved() bool {
	if r == nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sharedBytes > 0 || r.otherContent.currentSize() > uncountedContent
}

// IsErrorOfOther returns whether err is the memory error of another ContentReservation, for example in another
// namespace: the caller has waited for the rendering of another reconcile, and may succeed if it repeats the call.
func (r *ContentReservation) IsErrorOfOther(err error) bool {
	failed, ok := errors.AsType[memoryError](err)
	return ok && r != nil && failed.reservation != r
}

// ErrorForAll returns the memory error in err without its ContentReservation, so that IsErrorOfOther returns false. It
// is for errors that every ContentReservation would get. It returns other errors as they are.
func ErrorForAll(err error) error {
	if failed, ok := errors.AsType[memoryError](err); ok {
		return failed.error
	}
	return err
}

// AddForYAML is Add for the memory to decode YAML. It returns the result of CountValues, and how many bytes it has
// added. It returns an error if text is too expensive to parse as one document, and then nothing is added.
func (r *ContentReservation) AddForYAML(text []byte) (values int, added int64, err error) {
	withoutAliases := MemoryOfManifest(len(text), countIndicators(text))
	if err := r.Add(withoutAliases); err != nil {
		return 0, 0, err
	}
	values, err = checkValueCount(text) // to count what aliases add, it parses the text
	added = MemoryOfManifest(len(text), values)
	if err == nil {
		err = r.Add(added - withoutAliases)
	}
	if err != nil {
		r.Subtract(withoutAliases)
		return 0, 0, err
	}
	return values, added, nil
}

// Subtract releases n bytes of Add.
func (r *ContentReservation) Subtract(n int64) {
	if r != nil {
		r.otherContent.Subtract(n)
	}
}

// AddDocuments reserves the memory of d, with the errors of Add. Several ContentReservations with the same Documents
// share the memory, which counts for the namespace of one of them.
func (r *ContentReservation) AddDocuments(d *Documents) error { return r.MoveToDocuments(d, 0) }

// MoveToDocuments is AddDocuments for objects for which the caller has added n bytes with Add. It uses them for d, or
// releases them, also if it returns an error.
func (r *ContentReservation) MoveToDocuments(d *Documents, n int64) error {
	if r == nil || d == nil {
		return nil
	}
	size := d.Memory()
	if r.addSmallDocuments(d, size) || r.addSharedDocuments(d, nil) {
		r.Subtract(n)
		return nil
	}
	reservation := r.otherContent.split(min(n, size))
	r.Subtract(n - min(n, size))
	err := r.checkLimit(size)
	if err == nil {
		err = r.resize(reservation, func(int64) int64 { return size })
	}
	if err != nil {
		reservation.Close()
		return err
	}
	r.addSharedDocuments(d, reservation)
	return nil
}

// addSmallDocuments adds d if it is small enough to need no reservation. It returns whether r needs no more memory for
// d: r has d already or now, or is released.
func (r *ContentReservation) addSmallDocuments(d *Documents, size int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.documents[d]; ok || r.isReleased {
		return true
	}
	if r.smallBytes+size > uncountedContent {
		return false
	}
	r.documents[d] = false
	r.smallBytes += size
	return true
}

// addSharedDocuments adds d with the memory that other ContentReservations have reserved for it. If there are none, it
// uses reservation, and without a reservation it returns false. It closes a reservation that it does not use.
func (r *ContentReservation) addSharedDocuments(d *Documents, reservation *Reservation) bool {
	m := r.memory
	m.mu.Lock()
	defer m.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.documents[d]; ok || r.isReleased {
		reservation.Close()
		return true
	}
	shared := m.documents[d]
	switch {
	case shared != nil:
		reservation.Close()
	case reservation == nil:
		return false
	default:
		shared = &sharedDocuments{reservation: reservation, namespace: r.namespace, users: map[string]int{}}
		m.documents[d] = shared
	}
	shared.users[r.namespace]++
	r.documents[d] = true
	r.sharedBytes += d.Memory()
	return true
}

// reservationSnapshot is the state of a ContentReservation at one time.
type reservationSnapshot struct {
	added     int64
	documents map[*Documents]bool
}

// snapshot returns the present state.
func (r *ContentReservation) snapshot() reservationSnapshot {
	if r == nil {
		return reservationSnapshot{}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return reservationSnapshot{added: r.otherContent.currentSize(), documents: maps.Clone(r.documents)}
}

// releaseAfter releases the memory that was added after snapshot. The caller must no longer use its content.
func (r *ContentReservation) releaseAfter(snapshot reservationSnapshot) {
	if r == nil {
		return
	}
	r.otherContent.Shrink(snapshot.added)
	r.releaseDocuments(snapshot.documents)
}

// Retry calls do, which reserves memory in r. It calls do again after a pause if others have the memory, or if do has
// waited for the rendering of another reconcile, which got no memory. After an error it releases the memory that do has
// added. After retryTime it returns the error.
func (r *ContentReservation) Retry(ctx context.Context, do func() error) error {
	before, began := r.snapshot(), time.Now()
	isTemporary := func(err error) bool {
		return (errors.Is(err, ErrMemoryInUse) || r.IsErrorOfOther(err)) && time.Since(began) < retryTime
	}
	backoff := wait.Backoff{Duration: retryPause, Factor: 2, Steps: retryAttempts}
	return RetryOnWithBackoff(ctx, backoff, isTemporary, func() error {
		err := do()
		if err != nil {
			r.releaseAfter(before)
		}
		return err
	})
}

// Release releases the memory. The content must not be used after it.
func (r *ContentReservation) Release() {
	if r == nil {
		return
	}
	r.mu.Lock()
	r.isReleased = true
	r.mu.Unlock()
	r.otherContent.Close()
	r.releaseDocuments(nil)
}

// releaseDocuments releases the memory of all Documents but those in kept.
func (r *ContentReservation) releaseDocuments(kept map[*Documents]bool) {
	m := r.memory
	m.mu.Lock()
	defer m.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	for d, isShared := range r.documents {
		if _, isKept := kept[d]; isKept {
			continue
		}
		delete(r.documents, d)
		if !isShared {
			r.smallBytes -= d.Memory()
			continue
		}
		r.sharedBytes -= d.Memory()
		if shared := m.documents[d]; !shared.removeUser(r.namespace) {
			shared.reservation.Close()
			delete(m.documents, d)
		}
	}
}

// removeUser removes a ContentReservation of a namespace, and returns whether another one is left. If the namespace has
// none left, the memory counts for another namespace.
func (s *sharedDocuments) removeUser(namespace string) (isUsed bool) {
	if s.users[namespace]--; s.users[namespace] > 0 {
		return true
	}
	delete(s.users, namespace)
	for other := range s.users {
		if s.namespace == namespace {
			s.namespace = other
			s.reservation.moveTo(other)
		}
		return true
	}
	return false
}

// toContentError converts the error of a Reservation to an error of r, which wraps ErrContentTooLarge or
// ErrMemoryInUse.
func (r *ContentReservation) toContentError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrTooMuchMemory):
		err = fmt.Errorf("%w: more than %d MiB, the limit of this hub", ErrContentTooLarge, r.memory.maxPerNamespace()>>20)
	default:
		err = errAllInUse
	}
	return memoryError{err, r}
}
