package summaries

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
)

// cacheLimit is the maximum time for which isBehind distrusts a cache after a write.
const cacheLimit = 10 * time.Second

// echoFilter filters out watch events that this process's own status writes cause. It is only an optimization: a lost
// entry costs one extra reconcile. The zero value is ready.
type echoFilter struct {
	// mu guards byName.
	mu     sync.Mutex
	byName map[types.NamespacedName]*statusWrite
}

// statusWrite is what is known of the status writes to one summary.
type statusWrite struct {
	// version is the resourceVersion after the last one, "" before the first.
	version string
	// at is the time of that write.
	at time.Time
	// underWay says that a write is in progress; seen is the resourceVersion of the last event during it.
	underWay bool
	seen     string
}

// begin says that a write begins. Writes to one summary do not overlap.
func (f *echoFilter) begin(name types.NamespacedName) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.byName == nil {
		f.byName = map[types.NamespacedName]*statusWrite{}
	}
	if f.byName[name] == nil {
		f.byName[name] = &statusWrite{}
	}
	f.byName[name].underWay, f.byName[name].seen = true, ""
}

// end records the result of a write; version is empty if it failed. missed reports whether an event of another writer
// arrived during it.
func (f *echoFilter) end(name types.NamespacedName, version string, now time.Time) (missed bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	write := f.byName[name]
	if write == nil {
		return false
	}
	write.underWay = false
	if version != "" {
		write.version, write.at = version, now
	}
	return write.seen != "" && !isUpTo(write.seen, write.version)
}

// isEcho says whether an event is of a write of this process, or older than that. During a write every event counts as
// an echo and is recorded for end.
func (f *echoFilter) isEcho(name types.NamespacedName, version string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	write := f.byName[name]
	if write == nil {
		return false
	}
	if write.underWay {
		write.seen = version
		return true
	}
	return isUpTo(version, write.version)
}

// isBehind says whether a cached version is older than the last write. Reconciling it would cause a conflict or skip a
// report. After cacheLimit it returns false, since a restored API server has lower versions.
func (f *echoFilter) isBehind(name types.NamespacedName, version string, now time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	write := f.byName[name]
	return write != nil && write.version != "" && now.Sub(write.at) < cacheLimit && !isUpTo(write.version, version)
}

// forget drops what is known of a summary that is gone.
func (f *echoFilter) forget(name types.NamespacedName) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.byName, name)
}

// isUpTo says whether version is at most last.
func isUpTo(version, last string) bool {
	order, err := resourceversion.CompareResourceVersion(version, last)
	return err == nil && order <= 0
}
