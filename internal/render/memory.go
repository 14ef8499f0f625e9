package render

import (
	"container/list"
	"sync"
)

// maxShared and maxOwn limit the bytes of rendered text and generated values of the releases in memory: those of all
// members and those of one. As objects, the text takes about five times as much.
const (
	maxShared = 64 << 20
	maxOwn    = 32 << 20
)

// minSize is what a release without objects counts for.
const minSize = 1 << 10

// memory keeps renderings, and forgets those that were not asked for the longest when they take too much room. One that is larger than
// all the room is kept until the next one comes.
type memory struct {
	mu     sync.Mutex // guards what follows
	room   int
	taken  int
	byKey  map[string]*list.Element
	recent *list.List // of remembered; the last one was asked for the longest ago
}

type remembered struct {
	key     string
	release Release
}

func newMemory(room int) *memory {
	return &memory{room: room, byKey: map[string]*list.Element{}, recent: list.New()}
}

func (m *memory) get(key string) (Release, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	element, ok := m.byKey[key]
	if !ok {
		return Release{}, false
	}
	m.recent.MoveToFront(element)
	return element.Value.(remembered).release, true
}

func (m *memory) put(key string, release Release) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.byKey[key]; ok {
		return
	}
	m.byKey[key] = m.recent.PushFront(remembered{key: key, release: release})
	m.taken += release.size
	for m.taken > m.room && m.recent.Len() > 1 {
		oldest := m.recent.Remove(m.recent.Back()).(remembered)
		delete(m.byKey, oldest.key)
		m.taken -= oldest.release.size
	}
}
