package summaries

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
)

// maxCacheLag is the maximum time after a write for which isBehind can return true.
const maxCacheLag = 10 * time.Second

// ownWrites filters out the watch events of this process's own status writes. It is only an optimization: a lost entry
// costs one reconcile. The zero value is ready to use.
type ownWrites struct {
	// mu guards byName.
	mu     sync.Mutex
	byName map[types.NamespacedName]*statusWrite
}

// statusWrite is the last status write to one summary.
type statusWrite struct {
	// version is the resourceVersion that the last successful write returned, "" before the first one.
	version string
	// at is the time of that write.
	at time.Time
	// inProgress is true during a write. lastEvent is the resourceVersion of the last event during the write.
	inProgress bool
	lastEvent  string
}

// begin records that a write begins. Writes to one summary do not overlap.
func (f *ownWrites) begin(name types.NamespacedName) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.byName == nil {
		f.byName = map[types.NamespacedName]*statusWrite{}
	}
	if f.byName[name] == nil {
		f.byName[name] = &statusWrite{}
	}
	f.byName[name].inProgress, f.byName[name].lastEvent = true, ""
}

// end records the result of a write; version is "" if it failed. missed is true if an event of another writer arrived
// during the write: observeEvent has dropped it, so the caller must reconcile again.
func (f *ownWrites) end(name types.NamespacedName, version string, now time.Time) (missed bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	write := f.byName[name]
	if write == nil {
		return false
	}
	write.inProgress = false
	if version != "" {
		write.version, write.at = version, now
	}
	return write.lastEvent != "" && !isSameOrOlder(write.lastEvent, write.version)
}

// observeEvent returns whether an event is of the last write of this process, or older. During a write it returns true
// for every event, and records the event for end.
func (f *ownWrites) observeEvent(name types.NamespacedName, version string) (isOwn bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	write := f.byName[name]
	if write == nil {
		return false
	}
	if write.inProgress {
		write.lastEvent = version
		return true
	}
	return isSameOrOlder(version, write.version)
}

// isBehind returns whether a cached version is older than the last write. A reconcile of such a version would cause a
// conflict or skip a report. After maxCacheLag it returns false, since a restored API server has lower versions.
func (f *ownWrites) isBehind(name types.NamespacedName, version string, now time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	write := f.byName[name]
	return write != nil && write.version != "" && now.Sub(write.at) < maxCacheLag && !isSameOrOlder(write.version, version)
}

// forget deletes the entry of a deleted summary.
func (f *ownWrites) forget(name types.NamespacedName) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.byName, name)
}

// isSameOrOlder returns whether version is last or older, false if they cannot be compared.
func isSameOrOlder(version, last string) bool {
	order, err := resourceversion.CompareResourceVersion(version, last)
	return err == nil && order <= 0
}
