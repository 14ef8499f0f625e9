package render

import (
	"container/list"
	"sync"
)

// maxSharedSize and maxMemberSize limit the two caches of Charts, in bytes of rendered text and generated values. The
// first one has the releases that all members share, the second one the releases for one member each. maxManifestsSize
// limits the cache of Manifests, in bytes of text. Decoded objects need about six times as much memory.
const (
	maxSharedSize    = 64 << 20
	maxMemberSize    = 32 << 20
	maxManifestsSize = 16 << 20
)

// minCountedSize is the size in bytes that is counted for a release without objects.
const minCountedSize = 1 << 10

// sizedCache caches renderings by key. If their size exceeds the limit, it deletes the least recently used ones. It
// keeps a single rendering that is larger than the limit until another one is added.
type sizedCache[T any] struct {
	mu     sync.Mutex // guards the fields below
	limit  int
	size   int
	byKey  map[string]*list.Element
	recent *list.List // of cached[T], the least recently used one last
}

type cached[T any] struct {
	key   string
	value T
	size  int
}

func newSizedCache[T any](limit int) *sizedCache[T] {
	return &sizedCache[T]{limit: limit, byKey: map[string]*list.Element{}, recent: list.New()}
}

func (c *sizedCache[T]) get(key string) (value T, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	element, ok := c.byKey[key]
	if !ok {
		return value, false
	}
	c.recent.MoveToFront(element)
	return element.Value.(cached[T]).value, true
}

// getOrPut returns the cached value. If there is none, it caches and returns value, which has size bytes.
func (c *sizedCache[T]) getOrPut(key string, value T, size int) T {
	c.mu.Lock()
	defer c.mu.Unlock()
	if element, ok := c.byKey[key]; ok {
		c.recent.MoveToFront(element)
		return element.Value.(cached[T]).value
	}
	c.byKey[key] = c.recent.PushFront(cached[T]{key, value, size})
	c.size += size
	for c.size > c.limit && c.recent.Len() > 1 {
		oldest := c.recent.Remove(c.recent.Back()).(cached[T])
		delete(c.byKey, oldest.key)
		c.size -= oldest.size
	}
	return value
}
