package sandbox_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/sandbox"
)

// TestMemoryOfMessages sends and receives messages that need more memory than a scope can have, which is 32 MiB here. A
// control character takes six bytes in JSON.
func TestMemoryOfMessages(t *testing.T) {
	t.Parallel()
	const small, large = 512 << 10, 2 << 20
	for name, test := range map[string]struct {
		function string
		input    any
		callback string
		isLarge  bool
	}{
		"small input":           {function: "echo", input: strings.Repeat("\x01", small)},
		"large input":           {function: "echo", input: strings.Repeat("\x01", large), isLarge: true},
		"large list":            {function: "echo", input: []map[string]string{{"a": strings.Repeat("\x01", large)}}, isLarge: true},
		"small callback result": {function: "ask", callback: strings.Repeat("\x01", small)},
		"large callback result": {function: "ask", callback: strings.Repeat("\x01", large), isLarge: true},
		"large output":          {function: "large", isLarge: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if test.function == "large" {
				skipWithRace(t)
			}
			pool, _ := newPool()
			memory := kube.NewContentMemory(64 << 20).Reserve("eu")
			t.Cleanup(memory.Release)
			var output json.RawMessage
			call := sandbox.Call{Function: test.function, Key: name, Limit: time.Minute, Input: test.input, Output: &output, Memory: memory}
			if test.function == "ask" {
				call.Callback = func(json.RawMessage) (any, error) { return test.callback, nil }
			}
			if err := pool.Call(call); errors.Is(err, kube.ErrContentTooLarge) != test.isLarge || !test.isLarge && err != nil {
				t.Errorf("got %v, want that it is too large: %t", err, test.isLarge)
			}
			if err := memory.Add(32<<20 - int64(len(output))); err != nil {
				t.Errorf("after the call: %v", err)
			}
		})
	}
}

// TestTooLargeOutputIsRemembered wants no second call of a function whose output is too large, since the first one can
// have taken much processor time.
func TestTooLargeOutputIsRemembered(t *testing.T) {
	t.Parallel()
	skipWithRace(t)
	pool, clock := newPool()
	memory := kube.NewContentMemory(64 << 20)
	call := func() error {
		reserved := memory.Reserve("eu")
		defer reserved.Release()
		return pool.Call(sandbox.Call{Function: "large", Key: "a", Limit: time.Minute, Output: new(any), Memory: reserved})
	}
	first := call()
	if !errors.Is(first, kube.ErrContentTooLarge) {
		t.Fatalf("got %v, want ErrContentTooLarge", first)
	}
	if again := call(); again != first { //nolint:errorlint // the same error shows that there was no call
		t.Errorf("got %v at once, want the same error", again)
	}
	if memory.Reserve("eu").IsErrorOfOther(first) {
		t.Error("other callers repeat the call, although the result is too large for them as well")
	}
	clock.SetTime(time.Unix(30, 0))
	if again := call(); again == first || !errors.Is(again, kube.ErrContentTooLarge) { //nolint:errorlint // see above
		t.Errorf("got %v after the pause, want a new error", again)
	}
}

// TestLittleMemoryLeftIsNotRemembered has an output that is too large beside other content of its reconcile only.
func TestLittleMemoryLeftIsNotRemembered(t *testing.T) {
	t.Parallel()
	pool, _ := newPool()
	memory := kube.NewContentMemory(64 << 20)
	call := func(other int64) error {
		reserved := memory.Reserve("eu")
		defer reserved.Release()
		if err := reserved.Add(other); err != nil {
			t.Error(err)
		}
		return pool.Call(sandbox.Call{
			Function: "ask", Key: "a", Limit: time.Minute, Input: "a", Output: new(any), Memory: reserved,
			Callback: func(json.RawMessage) (any, error) { return strings.Repeat("x", 1<<20), nil },
		})
	}
	if err := call(30 << 20); !errors.Is(err, kube.ErrContentTooLarge) {
		t.Errorf("beside 30 MiB: got %v, want ErrContentTooLarge", err)
	}
	if err := call(0); err != nil {
		t.Errorf("alone: %v", err)
	}
}

// TestKnownFailureNeedsNoMemory has a call whose failure is known, in a namespace without memory.
func TestKnownFailureNeedsNoMemory(t *testing.T) {
	t.Parallel()
	pool, _ := newPool()
	memory := kube.NewContentMemory(64 << 20)
	call := func() error {
		reserved := memory.Reserve("eu")
		defer reserved.Release()
		return pool.Call(sandbox.Call{Function: "endless", Key: "a", Limit: 100 * time.Millisecond, Input: strings.Repeat("x", 1<<20), Output: new(any), Memory: reserved})
	}
	first := call()
	if _, ok := errors.AsType[*sandbox.LimitError](first); !ok {
		t.Fatalf("got %v, want a LimitError", first)
	}
	full := memory.Reserve("eu")
	defer full.Release()
	if err := full.Add(32 << 20); err != nil {
		t.Fatal(err)
	}
	if again := call(); again != first { //nolint:errorlint // the same error shows that there was no call
		t.Errorf("got %v, want the same error", again)
	}
}

// TestCallsWithoutMemoryDoNotDelayOthers has calls of a namespace without memory, and one of another namespace with the
// same key.
func TestCallsWithoutMemoryDoNotDelayOthers(t *testing.T) {
	t.Parallel()
	pool, _ := newPool()
	memory := kube.NewContentMemory(64 << 20)
	full := memory.Reserve("full")
	defer full.Release()
	if err := full.Add(32 << 20); err != nil {
		t.Fatal(err)
	}
	call := func(scope string) error {
		reserved := memory.Reserve(scope)
		defer reserved.Release()
		return pool.Call(sandbox.Call{Function: "echo", Key: "a", Limit: time.Minute, Input: strings.Repeat("x", 1<<20), Output: new(any), Memory: reserved})
	}
	began := time.Now()
	for range 4 {
		if err := call("full"); !errors.Is(err, kube.ErrMemoryInUse) {
			t.Errorf("without memory: got %v", err)
		}
	}
	if err := call("other"); err != nil {
		t.Errorf("another namespace: %v", err)
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("the calls took %s: those without memory waited for it", took)
	}
}

// TestRequestsDoNotEndTheLimitOfAScope has more calls of a scope than may run at the same time. Each requests data at
// its start.
func TestRequestsDoNotEndTheLimitOfAScope(t *testing.T) {
	t.Parallel()
	pool, _ := newPool()
	limit := max(8, 2*runtime.GOMAXPROCS(0))
	var running, most atomic.Int32
	ended := make(chan error, limit+4)
	for i := range limit + 4 {
		go func() {
			ended <- pool.Call(sandbox.Call{
				Function: "ask", Key: fmt.Sprint("ask ", i), Limit: time.Minute, Input: "a", Output: new(any),
				Callback: func(json.RawMessage) (any, error) {
					now := running.Add(1)
					for known := most.Load(); now > known && !most.CompareAndSwap(known, now); known = most.Load() {
					}
					<-time.After(500 * time.Millisecond)
					running.Add(-1)
					return "b", nil
				},
			})
		}()
	}
	for range limit + 4 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	if got := int(most.Load()); got > limit {
		t.Errorf("%d calls of a scope ran at the same time, want at most %d", got, limit)
	}
}
