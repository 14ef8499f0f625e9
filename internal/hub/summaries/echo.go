package summaries

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
)

// cacheLimit is how long a cache may take to have what was written.
const cacheLimit = 10 * time.Second

// echoFilter tells the watch events of this process's own status writes from those of others, so that only the latter wake the controller.
// It is no memory of anything true: what it does not know costs one more reconcile. The zero value is ready.
type echoFilter struct {
	// mu guards byName.
	mu     sync.Mutex
	byName map[types.NamespacedName]*statusWrite
}

// statusWrite is what is known of the status writes to one summary.
type statusWrite struct {
	// version is the resourceVersion after the last one, "" before the first.
	version string
	// at is when that was.
	at time.Time
	// underWay says that one is being written, and seen is the version of the last event meanwhile, which may be its echo.
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

// end says that a write ended now with this version, "" if it failed. missed says that an event came meanwhile that was not its echo.
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

// isEcho says whether an event of this version is of a write of this process, or older than that.
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

// isBehind says whether a cache that has this version lacks the last write: what is written on top of it would be refused, and what seems to be
// reported already is not. After cacheLimit the cache is believed: the API server may have been restored from a backup.
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
