package sandbox

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

const (
	// maxIdle is the number of children that wait for calls, and idleTime the time after which they end. maxIdleMemory is
	// the memory in bytes that each may keep, and maxIdleUse the processor time that each may use, for example to collect
	// garbage. Most charts need less memory.
	maxIdle       = 8
	idleTime      = time.Minute
	maxIdleMemory = 100 << 20
	maxIdleUse    = time.Second
	// checkInterval is the time between two reads of the memory of all children, each of which takes some microseconds.
	// A processor fills about 20 MiB in that time.
	checkInterval = 20 * time.Millisecond
)

// children are the children of a Pool. They share a container with this process: if it exceeds its limit of memory,
// Kubernetes kills all its processes. To prevent that, children are killed before all of them together take more than
// limit: idle ones first, then the one with the most memory. An idle child has no work. Code of an attacker could work
// in it without the limits of a call, so it is killed if it uses the processor. A system without /proc has no such
// limits.
type children struct {
	limit int64 // in bytes

	mu sync.Mutex // guards the fields below
	// active has the children that run a call, idle the children that wait for one, longest wait first.
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

// release makes an active child idle, or ends it if it has kept much memory. If there are too many, it ends the one
// that waits longest.
func (c *children) release(used *child) {
	memory := used.usedMemory()
	processorTime, _ := used.processorTime()
	c.mu.Lock()
	defer c.mu.Unlock()
	before := len(c.active)
	if c.active = without(c.active, used); len(c.active) == before {
		return // it was killed for its memory
	}
	if memory > maxIdleMemory {
		used.kill()
		return
	}
	used.idleSince, used.useBeforeIdle = time.Now(), processorTime
	if c.idle = append(c.idle, used); len(c.idle) > maxIdle {
		c.idle[0].kill()
		c.idle = slices.Delete(c.idle, 0, 1)
	}
	close(c.released)
	c.released = make(chan struct{})
	c.ensureWatched()
}

// remove removes an active child. It returns false if the child was killed for its memory.
func (c *children) remove(used *child) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := len(c.active)
	c.active = without(c.active, used)
	return len(c.active) < before
}

func without(list []*child, removed *child) []*child {
	return slices.DeleteFunc(list, func(other *child) bool { return other == removed })
}

// ensureWatched starts watch if the children need it and it does not run. The caller holds mu.
func (c *children) ensureWatched() {
	if !c.isWatching && c.needWatch() {
		c.isWatching = true
		go c.watch()
	}
}

func (c *children) needWatch() bool { return len(c.idle) > 0 || c.canExceed() }

// canExceed returns whether the children exceed the limit if each reaches its own. The caller holds mu.
func (c *children) canExceed() bool {
	var total int64
	for _, child := range slices.Concat(c.active, c.idle) {
		total += child.memory
	}
	return total > c.limit
}

func (c *children) watch() {
	ticker := time.NewTicker(checkInterval)
	defer ticker.Stop()
	for c.killExcess() {
		<-ticker.C
	}
}

// killExcess kills idle children that have waited for idleTime or use the processor, and, if all children together
// exceed the limit of memory, some of them. It returns false if the remaining children need no further check.
func (c *children) killExcess() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.idle = slices.DeleteFunc(c.idle, func(idle *child) bool {
		used, _ := idle.processorTime()
		isExpired := time.Since(idle.idleSince) > idleTime || used-idle.useBeforeIdle > maxIdleUse
		if isExpired {
			idle.kill()
		}
		return isExpired
	})
	if c.canExceed() {
		c.killLargest()
	}
	c.isWatching = c.needWatch()
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
