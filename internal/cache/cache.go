package cache

import (
	"container/list"
	"sync"

	"golang.org/x/sync/singleflight"
)

// MinSize is the size in bytes to count for a small value.
const MinSize = 1 << 10

// Cache caches values by key. If their size exceeds the limit, it deletes the least recently used ones. It keeps a
// single value that is larger than the limit until another one is added. It is safe for concurrent use.
type Cache[V any] struct {
	inFlight singleflight.Group

	mu     sync.Mutex // guards the fields below
	limit  int
	size   int
	byKey  map[string]*list.Element
	recent *list.List // of entry[V], the least recently used one last
}

type entry[V any] struct {
	key   string
	value V
	size  int
}

// New returns an empty Cache for limit bytes.
func New[V any](limit int) *Cache[V] {
	return &Cache[V]{limit: limit, byKey: map[string]*list.Element{}, recent: list.New()}
}

// Get returns the cached value.
func (c *Cache[V]) Get(key string) (value V, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	element, ok := c.byKey[key]
	if !ok {
		return value, false
	}
	c.recent.MoveToFront(element)
	return element.Value.(entry[V]).value, true
}

// GetOrPut returns the cached value. If there is none, it caches and returns value, which counts as size bytes.
func (c *Cache[V]) GetOrPut(key string, value V, size int) V {
	c.mu.Lock()
	defer c.mu.Unlock()
	if element, ok := c.byKey[key]; ok {
		c.recent.MoveToFront(element)
		return element.Value.(entry[V]).value
	}
	c.add(key, value, size)
	return value
}

// Put caches value, which counts as size bytes, in place of a cached one.
func (c *Cache[V]) Put(key string, value V, size int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if element, ok := c.byKey[key]; ok {
		c.size -= c.recent.Remove(element).(entry[V]).size
	}
	c.add(key, value, size)
}

// add adds a value, and deletes the least recently used ones while the limit is exceeded. The caller must hold mu.
func (c *Cache[V]) add(key string, value V, size int) {
	c.byKey[key] = c.recent.PushFront(entry[V]{key, value, size})
	c.size += size
	for c.size > c.limit && c.recent.Len() > 1 {
		oldest := c.recent.Remove(c.recent.Back()).(entry[V])
		delete(c.byKey, oldest.key)
		c.size -= oldest.size
	}
}

// GetOrCompute returns the cached value. If there is none, it calls compute, which returns the value and its size, and
// caches the value. Concurrent callers with the same key wait for one call of compute and get its result. Errors are
// not cached.
func (c *Cache[V]) GetOrCompute(key string, compute func() (V, int, error)) (V, error) {
	if value, ok := c.Get(key); ok {
		return value, nil
	}
	computed, err, _ := c.inFlight.Do(key, func() (any, error) {
		if value, ok := c.Get(key); ok {
			return value, nil // another caller has computed it meanwhile
		}
		value, size, err := compute()
		if err != nil {
			return value, err
		}
		return c.GetOrPut(key, value, size), nil
	})
	value, _ := computed.(V) // nil if V is an interface
	return value, err
}
