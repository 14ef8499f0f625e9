package inventory

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/towline/towline/internal/bundle"
)

// ErrNotServed is in the error for a partition that another process serves.
var ErrNotServed = errors.New("another process serves it")

// Partitions divide the records of a scope among processes. Each process serves the partitions that are assigned to it:
// it reads and caches all their records, and caches no others. If a partition moves, both processes can serve it for a
// moment. Then the resourceVersion of a record prevents that one process overwrites a change of the other one.
type Partitions struct {
	// Of returns the partition of a record.
	Of func(bundle.ID) string
	// ListAssigned lists the known partitions that are assigned to this process. IsAssigned returns whether a partition
	// is, also for a partition that ListAssigned does not know. Both must read from a cache, since List calls IsAssigned
	// for each partition.
	ListAssigned func(ctx context.Context) ([]string, error)
	IsAssigned   func(ctx context.Context, partition string) (bool, error)
}

// servedPartition is a partition that this process serves.
type servedPartition struct {
	// ended is closed when the process no longer serves the partition.
	ended chan struct{}
	// isListed is true if the cache has all records of the partition.
	isListed bool
	ids      map[bundle.ID]bool // the cached records
}

func (p *servedPartition) add(id bundle.ID) {
	if p != nil {
		p.ids[id] = true
	}
}

func (p *servedPartition) remove(id bundle.ID) {
	if p != nil {
		delete(p.ids, id)
	}
}

// partitionOf returns the partition of id; ok is false if it is not served. Without Partitions it returns nil and true.
// The caller must hold cache.mu.
func (s *Store) partitionOf(id bundle.ID) (served *servedPartition, ok bool) {
	if s.partitions == nil {
		return nil, true
	}
	served, ok = s.cache.partitions[s.partitions.Of(id)]
	return served, ok
}

// Serve begins to serve a partition, unless it is served already. It sends no request. ended is closed when StopServing
// is called. The error wraps ErrNotServed if the partition is not assigned to this process.
func (s *Store) Serve(ctx context.Context, partition string) (ended <-chan struct{}, err error) {
	served, isNew := s.addPartition(partition)
	// The partition is added before the check, so that a call of StopServing after the check finds it: the partition may
	// move to another shard then.
	isAssigned, err := s.partitions.IsAssigned(ctx, partition)
	if err != nil {
		if isNew {
			s.StopServing(partition)
		}
		return nil, fmt.Errorf("serve %s: %w", partition, err)
	}
	if !isAssigned {
		s.StopServing(partition)
		return nil, fmt.Errorf("serve %s: %w", partition, ErrNotServed)
	}
	return served.ended, nil
}

func (s *Store) addPartition(partition string) (served *servedPartition, isNew bool) {
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	served = s.cache.partitions[partition]
	if served != nil {
		return served, false
	}
	served = &servedPartition{ended: make(chan struct{}), ids: map[bundle.ID]bool{}}
	s.cache.partitions[partition] = served
	return served, true
}

// StopServing stops serving a partition, and removes its records from the cache. It does nothing for a partition that
// is not served. It need not shrink the Reservation: the memory of a Store with Partitions is not limited.
func (s *Store) StopServing(partition string) {
	s.cache.mu.Lock()
	served := s.cache.partitions[partition]
	if served != nil {
		delete(s.cache.partitions, partition)
		close(served.ended)
		for id := range served.ids {
			s.cache.remove(s.headName(id), id)
		}
	}
	s.cache.mu.Unlock()
	if served != nil {
		s.notify()
	}
}

// ServingEnded returns the channel that is closed when the partition of id is no longer served. It is nil, which is
// never closed, for a Store without Partitions.
func (s *Store) ServingEnded(id bundle.ID) <-chan struct{} {
	if s.partitions == nil {
		return nil
	}
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	if served, ok := s.partitionOf(id); ok {
		return served.ended
	}
	ended := make(chan struct{})
	close(ended)
	return ended
}

// ListPartition returns the records of a served partition, sorted by ID, without content: see ListCached. It reads the
// partition if it has not been listed since Serve.
func (s *Store) ListPartition(ctx context.Context, partition string) ([]*Record, error) {
	if records, ok := s.cachedPartition(partition); ok {
		return records, nil
	}
	unlock, err := s.lockListing(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if records, ok := s.cachedPartition(partition); ok {
		return records, nil // another caller has listed it meanwhile
	}
	served := s.findPartition(partition)
	if served == nil {
		return nil, fmt.Errorf("list the records of %s: %w", partition, ErrNotServed)
	}
	selector := labelRecordPartition + "=" + shortHash([]byte(partition))
	if err := s.readPages(ctx, selector, func(context.Context, bundle.ID) (bool, error) { return true, nil }); err != nil {
		return nil, err
	}
	s.setPartitionsListed(map[string]*servedPartition{partition: served})
	records, ok := s.cachedPartition(partition)
	if !ok {
		return nil, fmt.Errorf("list the records of %s: %w", partition, ErrNotServed)
	}
	return records, nil
}

func (s *Store) findPartition(partition string) *servedPartition {
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	return s.cache.partitions[partition]
}

// cachedPartition returns the records of a partition, sorted by ID; ok is false if the cache does not have all.
func (s *Store) cachedPartition(partition string) (records []*Record, ok bool) {
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	served := s.cache.partitions[partition]
	if served == nil || !served.isListed {
		return nil, false
	}
	for id := range served.ids {
		records = append(records, s.cache.byID[id].Record)
	}
	slices.SortFunc(records, compareIDs)
	return records, true
}

// servePartitions begins to serve the partitions that ListAssigned returns, and returns all served partitions.
func (s *Store) servePartitions(ctx context.Context) (map[string]*servedPartition, error) {
	if s.partitions == nil {
		return nil, nil //nolint:nilnil // there are none
	}
	names, err := s.partitions.ListAssigned(ctx)
	if err != nil {
		return nil, fmt.Errorf("list partitions: %w", err)
	}
	for _, name := range names {
		if _, err := s.Serve(ctx, name); err != nil && !errors.Is(err, ErrNotServed) {
			return nil, err
		}
	}
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	return maps.Clone(s.cache.partitions), nil
}

// setPartitionsListed marks partitions as listed. listed are the partitions that were served before the list was read.
// A partition that was stopped and served again since is not marked, because another process may have written its
// records.
func (s *Store) setPartitionsListed(listed map[string]*servedPartition) {
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	for name, served := range listed {
		if s.cache.partitions[name] == served {
			served.isListed = true
		}
	}
}

// serveAssigned returns a function that returns whether the partition of an ID is served. The function first begins to
// serve the partition if it is assigned to this process.
func (s *Store) serveAssigned() func(context.Context, bundle.ID) (bool, error) {
	if s.partitions == nil {
		return func(context.Context, bundle.ID) (bool, error) { return true, nil }
	}
	notServed := map[string]bool{}
	return func(ctx context.Context, id bundle.ID) (bool, error) {
		partition := s.partitions.Of(id)
		if notServed[partition] {
			return false, nil
		}
		if s.findPartition(partition) != nil {
			return true, nil
		}
		_, err := s.Serve(ctx, partition)
		if errors.Is(err, ErrNotServed) {
			notServed[partition] = true
			return false, nil
		}
		return err == nil, err
	}
}
