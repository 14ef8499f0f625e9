package inventory

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/towline/towline/internal/kube"
)

// A hub reads records of members that it must not trust: a member could return records without end, or records that
// need gigabytes of memory. maxRecords does not apply to the cluster of the hub, which has the records of all clusters
// for deploymentType Local.
const (
	// maxRecords is the maximum number of records on a member. A member with 1,000 profiles has at most 3,000.
	maxRecords = 20_000
	// maxHeadMemory limits the memory of one head.
	maxHeadMemory = 16 << 20
	// entryMemory is the memory for an object of a record: its Entry in a map, and the state and the backoff that package
	// drift has for it. The texts of the Entry are counted separately.
	entryMemory = 1200
	// maxID limits the text of an ID, in bytes. The names in it have at most 253 bytes.
	maxID = 1 << 10
	// maxIdentifier limits a UID and a resourceVersion, in bytes. A UID of Kubernetes has 36. A longer resourceVersion is
	// cut, so that each write with it is a conflict.
	maxIdentifier = 64
)

// LimitMemory limits the memory of the cached records, and of records while they are decoded. It must be called before
// all other methods.
func (s *Store) LimitMemory(memory *kube.Reservation) { s.memory = memory }

// ReserveLists returns a new Reservation for lists of objects of the member, nil if the memory is not limited. The
// caller must share it between all concurrent lists, and close it after the last list.
func (s *Store) ReserveLists() *kube.Reservation { return s.memory.ForLists() }

// memoryOfEntries returns the memory of the entries of rec without their texts.
func memoryOfEntries(rec *Record) int64 { return entryMemory * int64(len(rec.Entries)) }

// reserveMemory reserves the memory of the cached records and of rec. Concurrent reads are
// undercounted: each sets the total to the memory of the cache and of its own record.
func (s *Store) reserveMemory(ctx context.Context, rec *Record) error {
	s.cache.mu.Lock()
	memory := s.cache.memory + rec.memory
	if cached := s.cache.byID[rec.ID]; cached != nil {
		memory -= cached.memory
	}
	s.cache.mu.Unlock()
	return s.memory.Resize(ctx, memory)
}

// checkNumber returns an error if a member has too many records.
func (s *Store) checkNumber(records int) error {
	if records > maxRecords && !s.IsHubCluster() {
		return fmt.Errorf("list records: the cluster has more than %d", maxRecords)
	}
	return nil
}

// versionOf returns the resourceVersion of an object. One that is too long is cut.
func versionOf(obj metav1.Object) string {
	return kube.Truncate(obj.GetResourceVersion(), maxIdentifier)
}
