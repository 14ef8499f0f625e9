package script

import (
	"errors"
	"runtime"
	"testing"
)

// TestMemoryLimit is not parallel: other tests would change the size of the heap.
func TestMemoryLimit(t *testing.T) {
	limiter := newScriptLimiter(t.Context())
	for range memoryCheckInterval {
		limiter.Done()
	}
	if err := limiter.Err(); err != nil {
		t.Fatalf("before the script uses memory: %v", err)
	}
	used := make([]byte, 2*maxMemory)
	for range memoryCheckInterval {
		limiter.Done()
	}
	if err := limiter.Err(); !errors.Is(err, errMemory) {
		t.Errorf("with %d MiB used: got %v, want %v", len(used)>>20, err, errMemory)
	}
	runtime.KeepAlive(used)
}
