package agents

import (
	"context"
	"os"
	"runtime/debug"
	"time"
)

const (
	// gcPercent is the growth of the heap after which the garbage collector runs, unless GOGC is set. With the default,
	// 100, the heap would reach twice its live size before each collection.
	gcPercent = 50
	// releaseInterval is the time between two releases of memory.
	releaseInterval = 2 * time.Minute
)

// LimitMemory keeps the memory of an agent or a hub small until ctx ends.
func LimitMemory(ctx context.Context) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	releaseMemory(ctx)
}

// releaseMemory returns unused memory to the operating system, until ctx ends: free heap, and pages of the program that
// only the start and deliveries need. The kernel reads released pages of the program again from its page cache.
func releaseMemory(ctx context.Context) {
	ticker := time.NewTicker(releaseInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			debug.FreeOSMemory()
			releaseProgram()
		case <-ctx.Done():
			return
		}
	}
}
