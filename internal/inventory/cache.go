package inventory

import (
	"cmp"
	"hash/maphash"
	"iter"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

// recordCache has the records as they were last read or written, without inline values, to save memory: a hub has one
// Store for each push member. Its indexes make the work for one event or change independent of the number of records.
type recordCache struct {
	seed maphash.Seed

	// mu guards the fields below.
	mu   sync.Mutex
	byID map[bundle.ID]*cachedRecord
	// memory is the sum of Record.memory.
	memory int64
	// byObject finds records by the hash of a tracked object, byName by the hash of the name of the head Secret.
	byObject, byName hashIndex
	// kinds counts the tracked objects of the records for which NeedsWatch returns true.
	kinds map[schema.GroupVersionKind]int
	// changed has the records with the field isChanged.
	changed []*cachedRecord
	// isListed is the result of IsListed.
	isListed bool
	// deleted has the records that were deleted since the running list of records began, because its response can still
	// have them. It is nil while no list is running.
	deleted map[bundle.ID]bool
	// partitions has the partitions that are served. It is used only if the Store has partitions.
	partitions map[string]*servedPartition
}

// cachedRecord is an entry of the cache. Newer versions replace its Record.
type cachedRecord struct {
	*Record
	// isChanged is true from a change until TakeChanges returns the record. wasRead is true if the record was read from
	// the member since the last TakeChanges.
	isChanged, wasRead bool
}

func newRecordCache() *recordCache {
	return &recordCache{
		seed: maphash.MakeSeed(), byID: map[bundle.ID]*cachedRecord{}, byObject: newHashIndex(), byName: newHashIndex(),
		kinds: map[schema.GroupVersionKind]int{}, partitions: map[string]*servedPartition{},
	}
}

// hashIndex finds records by the hash of a key: a hash takes 8 bytes, less than the strings of a Ref. The caller must
// check the key, because two keys can have the same hash. Most keys have one record, so first has one record per hash,
// and more has any others.
type hashIndex struct {
	first map[uint64]*cachedRecord
	more  map[uint64][]*cachedRecord
}

func newHashIndex() hashIndex {
	return hashIndex{first: map[uint64]*cachedRecord{}, more: map[uint64][]*cachedRecord{}}
}

func (x hashIndex) add(hash uint64, rec *cachedRecord) {
	switch first := x.first[hash]; {
	case first == nil:
		x.first[hash] = rec
	case first != rec && !slices.Contains(x.more[hash], rec):
		x.more[hash] = append(x.more[hash], rec)
	}
}

func (x hashIndex) remove(hash uint64, rec *cachedRecord) {
	others := slices.DeleteFunc(x.more[hash], func(other *cachedRecord) bool { return other == rec })
	if x.first[hash] == rec {
		delete(x.first, hash)
		if len(others) > 0 {
			x.first[hash], others = others[0], others[1:]
		}
	}
	if len(others) == 0 {
		delete(x.more, hash)
		return
	}
	x.more[hash] = others
}

func (x hashIndex) find(hash uint64) iter.Seq[*cachedRecord] {
	return func(yield func(*cachedRecord) bool) {
		if first := x.first[hash]; first == nil || !yield(first) {
			return
		}
		for _, rec := range x.more[hash] {
			if !yield(rec) {
				return
			}
		}
	}
}

// set replaces the cached record of rec.ID. name is the name of its head Secret. The caller must hold mu.
func (c *recordCache) set(name string, rec *Record, wasRead bool) {
	cached := c.byID[rec.ID]
	var before *Record
	if cached == nil {
		cached = &cachedRecord{}
		c.byID[rec.ID] = cached
		c.byName.add(maphash.String(c.seed, name), cached)
	} else {
		before = cached.Record
		c.memory -= before.memory
	}
	c.memory += rec.memory
	cached.Record, cached.wasRead = rec, cached.wasRead || wasRead
	c.addObjects(cached, rec)
	if before != nil {
		c.removeObjects(cached, before, rec)
	}
	if !cached.isChanged {
		cached.isChanged = true
		c.changed = append(c.changed, cached)
	}
}

// remove removes the cached record of id, and returns whether there was one. The caller must hold mu.
func (c *recordCache) remove(name string, id bundle.ID) bool {
	cached := c.byID[id]
	if cached == nil {
		return false
	}
	delete(c.byID, id)
	c.memory -= cached.memory
	c.byName.remove(maphash.String(c.seed, name), cached)
	c.removeObjects(cached, cached.Record, nil)
	return true
}

// addObjects adds the tracked objects of rec to the indexes.
func (c *recordCache) addObjects(cached *cachedRecord, rec *Record) {
	for ref := range rec.tracked() {
		c.byObject.add(maphash.Comparable(c.seed, ref.Key()), cached)
		if rec.NeedsWatch() {
			c.kinds[ref.GVK()]++
		}
	}
}

// removeObjects removes the tracked objects of a former record from byObject, unless next tracks them too. The caller
// must have called addObjects for next: kinds is reduced for each object of former, also if next has the object.
func (c *recordCache) removeObjects(cached *cachedRecord, former, next *Record) {
	for ref := range former.tracked() {
		isTracked := false
		if next != nil {
			_, isTracked = next.FindTracked(ref.Key())
		}
		if !isTracked {
			c.byObject.remove(maphash.Comparable(c.seed, ref.Key()), cached)
		}
		if former.NeedsWatch() {
			if c.kinds[ref.GVK()]--; c.kinds[ref.GVK()] == 0 {
				delete(c.kinds, ref.GVK())
			}
		}
	}
}

// Change is a change of a cached record.
type Change struct {
	*Record
	// MayHaveDrifted is true if the record was read from the member: another process may have written it, so its objects
	// may have drifted unnoticed.
	MayHaveDrifted bool
}

// TakeChanges returns the records that were cached since the last call, except deleted records.
func (s *Store) TakeChanges() []Change {
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	var changes []Change
	for _, cached := range s.cache.changed {
		if s.cache.byID[cached.ID] == cached {
			changes = append(changes, Change{Record: cached.Record, MayHaveDrifted: cached.wasRead})
		}
		cached.isChanged, cached.wasRead = false, false
	}
	s.cache.changed = nil
	return changes
}

// WatchedKinds lists the kinds of the tracked objects of the cached records for which NeedsWatch returns true, in no
// order.
func (s *Store) WatchedKinds() []schema.GroupVersionKind {
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	kinds := make([]schema.GroupVersionKind, 0, len(s.cache.kinds))
	for kind := range s.cache.kinds {
		kinds = append(kinds, kind)
	}
	return kinds
}

// RecordsTracking returns the cached records in which FindTracked finds an object.
func (s *Store) RecordsTracking(key kube.Ref) []*Record {
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	var found []*Record
	for cached := range s.cache.byObject.find(maphash.Comparable(s.cache.seed, key)) {
		if _, ok := cached.FindTracked(key); ok {
			found = append(found, cached.Record)
		}
	}
	return found
}

// FindBySecret returns the cached record that is stored in a Secret, nil if there is none.
func (s *Store) FindBySecret(name string) *Record {
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	for cached := range s.cache.byName.find(maphash.String(s.cache.seed, headNameFrom(name))) {
		if slices.Contains(s.SecretNames(cached.Record), name) {
			return cached.Record
		}
	}
	return nil
}

// ListCached returns the records as they were last read or written, in no order. They lack inline values: do not pass
// them to Bundle or Save.
func (s *Store) ListCached() []*Record {
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	all := make([]*Record, 0, len(s.cache.byID))
	for _, cached := range s.cache.byID {
		all = append(all, cached.Record)
	}
	return all
}

// Cached returns the record of id as it was last read or written, nil if there is none. It lacks inline values:
// do not pass it to Bundle or Save.
func (s *Store) Cached(id bundle.ID) *Record {
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	if cached := s.cache.byID[id]; cached != nil {
		return cached.Record
	}
	return nil
}

// setListing is called when a list of records begins and ends. In between, deletions are recorded in deleted.
func (c *recordCache) setListing(isListing bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deleted = nil
	if isListing {
		c.deleted = map[bundle.ID]bool{}
	}
}

// isCached returns whether the cache has rec in this version.
func (s *Store) isCached(rec *Record) bool {
	known := s.Cached(rec.ID)
	return known != nil && known.version == rec.version && known.isIncomplete == rec.isIncomplete
}

// setCached caches rec, unless this process does not serve its partition.
func (s *Store) setCached(rec *Record, wasRead bool) {
	name := s.headName(rec.ID)
	s.cache.mu.Lock()
	if served, ok := s.partitionOf(rec.ID); ok {
		s.cache.set(name, rec, wasRead)
		served.add(rec.ID)
	}
	s.cache.mu.Unlock()
	s.notify()
}

// addListed is setCached for a record from a list. It does nothing if the record was saved or deleted since the list.
func (s *Store) addListed(rec *Record) {
	name := s.headName(rec.ID)
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	cached := s.cache.byID[rec.ID]
	served, ok := s.partitionOf(rec.ID)
	if !ok || s.cache.deleted[rec.ID] || cached != nil && !isNewer(rec.version, cached.version) {
		return
	}
	s.cache.set(name, rec, true)
	served.add(rec.ID)
	s.notify()
}

// isNewer returns whether a resourceVersion is newer than another one of the same resource. API servers with etcd
// return decimal numbers. A wrong result costs one more read.
func isNewer(version, than string) bool {
	return cmp.Or(cmp.Compare(len(version), len(than)), cmp.Compare(version, than)) > 0
}

func (s *Store) deleteCached(id bundle.ID) {
	name := s.headName(id)
	s.cache.mu.Lock()
	existed := s.cache.remove(name, id)
	s.memory.Shrink(s.cache.memory)
	if existed && s.cache.deleted != nil {
		s.cache.deleted[id] = true
	}
	if served, ok := s.partitionOf(id); ok {
		served.remove(id)
	}
	s.cache.mu.Unlock()
	if existed {
		s.notify()
	}
}

// IsListed returns whether List has succeeded once. From then on the cache has all records, also incomplete ones, or
// with Partitions all records of the listed partitions.
func (s *Store) IsListed() bool {
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	return s.cache.isListed
}

// IsPartitionListed returns whether the cache has all records of the partition of id. If true, an ID of the partition
// that is not cached has no record.
func (s *Store) IsPartitionListed(id bundle.ID) bool {
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	served, ok := s.partitionOf(id)
	return s.partitions == nil && s.cache.isListed || s.partitions != nil && ok && served.isListed
}
