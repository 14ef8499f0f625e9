package agents

import (
	"context"
	"os"
	"runtime/debug"
	"time"
)

const (
	// gcPercent is the growth of the heap, in percent of the live heap, after which the garbage collector runs, unless
	// GOGC is set. With the default, 100, the heap would reach twice the size of the live heap before each collection.
	gcPercent = 50
	// releaseInterval is the time between two releases of memory.
	releaseInterval = 2 * time.Minute
)

// ReduceMemory makes the garbage collector run more often, and releases unused memory until ctx ends. Hubs and agents
// run it in a goroutine.
func ReduceMemory(ctx context.Context) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	releaseMemory(ctx)
}

// releaseMemory returns unused memory to the operating system until ctx ends: free heap, and pages of the program, most
// of which only the start and deliveries need. The kernel reads released pages again from its page cache.
func releaseMemory(ctx context.Context) {
	ticker := time.NewTicker(releaseInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			debug.FreeOSMemory()
			releaseProgramPages()
		case <-ctx.Done():
			return
		}
	}
}
