package sandbox

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/procfs"
)

// memoryInterval is the time between two reads of the memory of all active children, each of which takes some
// microseconds. A processor fills about 20 MiB in that time.
const memoryInterval = 20 * time.Millisecond

// memoryBudget limits the memory of all active children together. They share a container with this process: if it
// exceeds its limit, Kubernetes kills all its processes. To prevent that, the child with the most memory is killed. A
// system without /proc has no limit.
type memoryBudget struct {
	limit int64 // in bytes

	mu         sync.Mutex // guards the fields below
	active     []*child
	isWatching bool
}

// add counts a child until remove is called. remove returns false if the child was killed for its memory.
func (b *memoryBudget) add(c *child) (remove func() bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.active = append(b.active, c)
	if !b.isWatching && b.canExceed() {
		b.isWatching = true
		go b.watch()
	}
	return func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		before := len(b.active)
		b.active = slices.DeleteFunc(b.active, func(other *child) bool { return other == c })
		return len(b.active) < before
	}
}

// canExceed returns whether the children exceed the limit if each reaches its own. The caller holds mu.
func (b *memoryBudget) canExceed() bool {
	var total int64
	for _, c := range b.active {
		total += c.memory
	}
	return total > b.limit
}

func (b *memoryBudget) watch() {
	ticker := time.NewTicker(memoryInterval)
	defer ticker.Stop()
	for b.check() {
		<-ticker.C
	}
}

// check kills children until the others are within the limit. It returns false if they cannot exceed it any more.
func (b *memoryBudget) check() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.isWatching = b.canExceed(); !b.isWatching {
		return false
	}
	var total int64
	used := map[*child]int64{}
	for _, c := range b.active {
		used[c] = c.usedMemory()
		total += used[c]
	}
	slices.SortFunc(b.active, func(x, y *child) int { return cmp.Compare(used[x], used[y]) })
	for total > b.limit {
		largest := b.active[len(b.active)-1]
		largest.kill()
		total -= used[largest]
		b.active = b.active[:len(b.active)-1]
	}
	return true
}

// usedMemory returns the memory of the child that it does not share with other processes, in bytes. It returns zero if
// the child has ended, or the system has no /proc.
func (c *child) usedMemory() int64 {
	process, err := procfs.NewProc(c.process.Process.Pid)
	if err != nil {
		return 0
	}
	status, err := process.NewStatus()
	if err != nil {
		return 0
	}
	return int64(status.RssAnon) //nolint:gosec // it is less than the memory of the machine
}
