package sandbox

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

const (
	// maxIdle is the maximum number of idle children. An idle child is killed after maxIdleTime, or if it has used more
	// than maxIdleCPU of processor time: collecting garbage takes less. A child that keeps more than maxIdleMemory, in
	// bytes, does not become idle. Most charts need less.
	maxIdle       = 8
	maxIdleTime   = time.Minute
	maxIdleMemory = 100 << 20
	maxIdleCPU    = time.Second
	// checkInterval is the time between two reads of the memory of all children, each of which takes some microseconds.
	// A processor fills about 20 MiB in that time.
	checkInterval = 20 * time.Millisecond
)

// children are the children of a Pool. They share a container with this process: if it exceeds its limit of memory,
// Kubernetes kills all its processes. To prevent that, children are killed before all of them together take more than
// limit: idle ones first, then the one with the most memory. An idle child has no work. If it uses the processor, it
// may run code of an attacker outside of the limits of a call, and is killed. On a system without /proc, memory and
// processor time of the children are unknown and not limited here.
type children struct {
	limit int64 // in bytes

	mu sync.Mutex // guards the fields below
	// active has the children that run a call, idle the others, the one that is idle longest first.
	active, idle []*child
	// released is closed and replaced when a child becomes idle.
	released   chan struct{}
	isWatching bool
}

func newChildren(limit int64) *children {
	return &children{limit: limit, released: make(chan struct{})}
}

// add adds an active child.
func (c *children) add(started *child) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.active = append(c.active, started)
	c.ensureWatched()
}

// takeIdle makes an idle child of the scope active and returns it. If there is none, released is closed when a child
// becomes idle.
func (c *children) takeIdle(scope string) (taken *child, released <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, idle := range slices.Backward(c.idle) {
		if idle.scope == scope {
			c.idle, c.active = slices.Delete(c.idle, i, i+1), append(c.active, idle)
			return idle, nil
		}
	}
	return nil, c.released
}

// release makes an active child idle, or kills it if it keeps much memory. If there are too many idle children, it
// kills the one that is idle longest.
func (c *children) release(child *child) {
	memory := child.usedMemory()
	cpuTime, _ := child.processorTime()
	c.mu.Lock()
	defer c.mu.Unlock()
	before := len(c.active)
	if c.active = without(c.active, child); len(c.active) == before {
		return // it was killed for its memory
	}
	if memory > maxIdleMemory {
		child.kill()
		return
	}
	child.idleSince, child.cpuTimeBeforeIdle = time.Now(), cpuTime
	if c.idle = append(c.idle, child); len(c.idle) > maxIdle {
		c.idle[0].kill()
		c.idle = slices.Delete(c.idle, 0, 1)
	}
	close(c.released)
	c.released = make(chan struct{})
	c.ensureWatched()
}

// remove removes an active child. It returns false if the child was killed for its memory.
func (c *children) remove(child *child) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := len(c.active)
	c.active = without(c.active, child)
	return len(c.active) < before
}

func without(list []*child, removed *child) []*child {
	return slices.DeleteFunc(list, func(other *child) bool { return other == removed })
}

// ensureWatched starts watch if the children need it and it does not run. The caller holds mu.
func (c *children) ensureWatched() {
	if !c.isWatching && c.needsWatch() {
		c.isWatching = true
		go c.watch()
	}
}

// needsWatch returns whether a child can exceed a limit that only watch checks. The caller holds mu.
func (c *children) needsWatch() bool { return len(c.idle) > 0 || c.canExceed() }

// canExceed returns whether the children exceed the limit if each reaches its own. The caller holds mu.
func (c *children) canExceed() bool {
	var total int64
	for _, child := range slices.Concat(c.active, c.idle) {
		total += child.memory
	}
	return total > c.limit
}

// watch calls killExcess until the children need no further check.
func (c *children) watch() {
	ticker := time.NewTicker(checkInterval)
	defer ticker.Stop()
	for c.killExcess() {
		<-ticker.C
	}
}

// killExcess kills idle children that have waited for maxIdleTime or use the processor, and, if all children together
// exceed the limit of memory, some of them. It returns false if the remaining children need no further check.
func (c *children) killExcess() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.idle = slices.DeleteFunc(c.idle, func(idle *child) bool {
		cpuTime, _ := idle.processorTime()
		mustEnd := time.Since(idle.idleSince) > maxIdleTime || cpuTime-idle.cpuTimeBeforeIdle > maxIdleCPU
		if mustEnd {
			idle.kill()
		}
		return mustEnd
	})
	if c.canExceed() {
		c.killLargest()
	}
	c.isWatching = c.needsWatch()
	return c.isWatching
}

// killLargest kills idle children, and then active ones, the largest first, until the others are within the limit. The
// caller holds mu.
func (c *children) killLargest() {
	var total int64
	used := map[*child]int64{}
	for _, child := range slices.Concat(c.active, c.idle) {
		used[child] = child.usedMemory()
		total += used[child]
	}
	for total > c.limit {
		from := &c.active
		if len(c.idle) > 0 {
			from = &c.idle
		}
		largest := slices.MaxFunc(*from, func(x, y *child) int { return cmp.Compare(used[x], used[y]) })
		largest.kill()
		*from = without(*from, largest)
		total -= used[largest]
	}
}
