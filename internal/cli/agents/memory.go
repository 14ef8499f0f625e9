package agents

import (
	"context"
	"os"
	"runtime/debug"
	"time"
)

const (
	// gcPercent is the growth of the heap after which the garbage collector runs, unless GOGC is set. The default value
	// would double the heap, which is small in an agent, and consists of caches in a hub.
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

// releaseMemory returns memory that an idle program does not use to the operating system, until ctx ends: the heap that
// the last deliveries needed, and the pages of the program that only its start and the last deliveries needed. Pages
// that are needed again are still in the page cache.
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
