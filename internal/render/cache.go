package render

import (
	"container/list"
	"sync"
)

// maxSharedSize and maxMemberSize limit the two caches of Charts, in bytes of rendered text and generated values. The
// first one has the releases that all members share, the second one the releases for one member each. Decoded objects
// need about five times as much memory.
const (
	maxSharedSize = 64 << 20
	maxMemberSize = 32 << 20
)

// minCountedSize is the size in bytes that is counted for a release without objects.
const minCountedSize = 1 << 10

// releaseCache caches renderings. If their size exceeds the limit, it deletes the least recently used ones. It keeps a
// single rendering that is larger than the limit until another one is added.
type releaseCache struct {
	mu     sync.Mutex // guards the fields below
	limit  int
	size   int
	byKey  map[string]*list.Element
	recent *list.List // of cachedRelease, the least recently used one last
}

type cachedRelease struct {
	key     string
	release Release
}

func newReleaseCache(limit int) *releaseCache {
	return &releaseCache{limit: limit, byKey: map[string]*list.Element{}, recent: list.New()}
}

func (m *releaseCache) get(key string) (Release, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	element, ok := m.byKey[key]
	if !ok {
		return Release{}, false
	}
	m.recent.MoveToFront(element)
	return element.Value.(cachedRelease).release, true
}

func (m *releaseCache) put(key string, release Release) {
	m.getOrPut(key, release)
}

// getOrPut returns the cached rendering. If there is none, it caches and returns release.
func (m *releaseCache) getOrPut(key string, release Release) Release {
	m.mu.Lock()
	defer m.mu.Unlock()
	if element, ok := m.byKey[key]; ok {
		m.recent.MoveToFront(element)
		return element.Value.(cachedRelease).release
	}
	m.byKey[key] = m.recent.PushFront(cachedRelease{key: key, release: release})
	m.size += release.size
	for m.size > m.limit && m.recent.Len() > 1 {
		oldest := m.recent.Remove(m.recent.Back()).(cachedRelease)
		delete(m.byKey, oldest.key)
		m.size -= oldest.release.size
	}
	return release
}
