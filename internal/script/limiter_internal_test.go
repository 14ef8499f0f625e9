package script

import (
	"errors"
	"runtime"
	"testing"
	"time"
)

// TestMemoryLimit is not parallel: other tests would change the size of the heap.
func TestMemoryLimit(t *testing.T) {
	limiter := newScriptLimiter(t.Context())
	for range checkInterval {
		limiter.Done()
	}
	if err := limiter.Err(); err != nil {
		t.Fatalf("before the script uses memory: %v", err)
	}
	used := make([]byte, 2*maxMemory)
	for range checkInterval {
		limiter.Done()
	}
	if err := limiter.Err(); !errors.Is(err, errMemory) {
		t.Errorf("with %d MiB used: got %v, want %v", len(used)>>20, err, errMemory)
	}
	runtime.KeepAlive(used)
}

// TestGarbageDoesNotRaiseTheMemoryLimit is not parallel, like TestMemoryLimit.
func TestGarbageDoesNotRaiseTheMemoryLimit(t *testing.T) {
	runtime.KeepAlive(make([]byte, 2*maxMemory)) // garbage of an earlier script
	limiter := newScriptLimiter(t.Context())
	used := make([]byte, maxMemory*3/2)
	for range checkInterval {
		limiter.Done()
	}
	if err := limiter.Err(); !errors.Is(err, errMemory) {
		t.Errorf("with %d MiB used after garbage: got %v, want %v", len(used)>>20, err, errMemory)
	}
	runtime.KeepAlive(used)
}

// TestTimeLimit: the time for which a script waits for a processor does not count.
func TestTimeLimit(t *testing.T) {
	t.Parallel()
	long := scriptTimeout + time.Hour
	for name, tc := range map[string]struct {
		elapsed, used time.Duration
		want          error
	}{
		"waited":  {elapsed: long, used: 0, want: nil},
		"ran":     {elapsed: long, used: long, want: errTime},
		"threads": {elapsed: 0, used: long, want: nil}, // the garbage collector has threads of its own
	} {
		limiter := newScriptLimiter(t.Context())
		limiter.start, limiter.initialTime = limiter.start.Add(-tc.elapsed), limiter.initialTime-tc.used
		for range checkInterval {
			limiter.Done()
		}
		if err := limiter.Err(); !errors.Is(err, tc.want) {
			t.Errorf("%s: got %v, want %v", name, err, tc.want)
		}
	}
}
