package agents

import (
	"context"
	"os"
	"runtime/debug"
	"time"
)

const (
	// gcPercent is the growth of the heap after which the garbage collector runs, unless GOGC is set. The heap of an
	// agent is small, and the default value would double it.
	gcPercent = 50
	// firstRelease is the time from the start of an agent to the first release of memory: the agent is connected then.
	firstRelease = time.Minute
	// releaseInterval is the time between two releases of memory.
	releaseInterval = 5 * time.Minute
)

// limitMemory keeps the memory of an agent small until ctx ends.
func limitMemory(ctx context.Context) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	releaseMemory(ctx)
}

// releaseMemory returns memory that an idle agent does not use to the operating system, until ctx ends: the heap that
// the last deliveries needed, and the pages of the program that only its start and the last deliveries needed. Pages
// that are needed again are still in the page cache.
func releaseMemory(ctx context.Context) {
	timer := time.NewTimer(firstRelease)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
			debug.FreeOSMemory()
			releaseProgram()
			timer.Reset(releaseInterval)
		case <-ctx.Done():
			return
		}
	}
}
