package inventory

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/towline/towline/internal/kube"
)

// A hub reads records of members that it must not trust: a member could return records without end, or records that
// need gigabytes of memory. The cluster of the hub, which has records of all clusters for deploymentType Local, has no
// maxRecords. Only a Store with LimitMemory limits the memory of all records together.
const (
	// maxRecords is the maximum number of records on a member. A member with 1,000 profiles has at most 3,000.
	maxRecords = 20_000
	// maxHead limits the memory of one head, and maxHeads that of the heads that ListHeads returns.
	maxHead  = 16 << 20
	maxHeads = 256 << 20
	// entryMemory is the memory of an Entry in a map, without its texts.
	entryMemory = 512
	// maxID limits the text of an ID, in bytes. The names in it have at most 253 bytes.
	maxID = 1 << 10
	// maxIdentifier limits a UID and a resourceVersion, in bytes. A UID of Kubernetes has 36.
	maxIdentifier = 128
)

// LimitMemory limits the memory of the cached records, and of records while they are decoded. It must be called before
// all other methods.
func (s *Store) LimitMemory(memory *kube.Reservation) { s.memory = memory }

// reserveMemory returns an error if there is not enough memory for rec and the other cached records.
func (s *Store) reserveMemory(rec *Record) error {
	s.cache.mu.Lock()
	memory := s.cache.memory + rec.memory
	if cached := s.cache.byID[rec.ID]; cached != nil {
		memory -= cached.memory
	}
	s.cache.mu.Unlock()
	return s.memory.Resize(memory)
}

// checkNumber returns an error if a member has too many records.
func (s *Store) checkNumber(records int) error {
	if records > maxRecords && s.partitions == nil {
		return fmt.Errorf("list records: the cluster has more than %d", maxRecords)
	}
	return nil
}

// versionOf returns the resourceVersion of an object. One that is too long is cut.
func versionOf(obj metav1.Object) string {
	return kube.Truncate(obj.GetResourceVersion(), maxIdentifier)
}
