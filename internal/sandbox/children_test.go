package sandbox_test

import (
	"encoding/json"
	"fmt"
	"runtime/debug"
	"testing"
	"time"

	"github.com/prometheus/procfs"

	"github.com/towline/towline/internal/sandbox"
)

// pidOf calls a function of a scope that returns the ID of its process.
func pidOf(t *testing.T, pool *sandbox.Pool, function, scope string) int {
	t.Helper()
	var pid int
	if err := pool.Call(sandbox.Call{Function: function, Scope: scope, Key: function, Limit: time.Minute, Output: &pid}); err != nil || pid == 0 {
		t.Fatalf("got process %d, error %v", pid, err)
	}
	return pid
}

// wantEnd waits until the hub has ended a process.
func wantEnd(t *testing.T, pid int) {
	t.Helper()
	for end := time.Now().Add(time.Minute); isRunning(pid); <-time.After(checkPause) {
		if time.Now().After(end) {
			t.Fatalf("process %d does not end", pid)
		}
	}
}

const checkPause = 20 * time.Millisecond

// isRunning returns whether a process exists and is no zombie.
func isRunning(pid int) bool {
	process, err := procfs.NewProc(pid)
	if err != nil {
		return false
	}
	stat, err := process.Stat()
	return err == nil && stat.State != "Z" && stat.State != "X"
}

// TestScopesShareNoChild: a child that executes code of one tenant must not return results to another one.
func TestScopesShareNoChild(t *testing.T) {
	t.Parallel()
	pool, _ := newPool()
	first := pidOf(t, pool, "pid", "a")
	if other := pidOf(t, pool, "pid", "b"); other == first {
		t.Error("two scopes share a process")
	}
	if again := pidOf(t, pool, "pid", "a"); again != first {
		t.Error("calls of one scope do not share a process")
	}
	// Nor errors.
	endless := sandbox.Call{Function: "large", Scope: "a", Key: "key", Limit: time.Minute, Output: new(any)}
	if err := pool.Call(endless); err == nil {
		t.Error("the call succeeds")
	}
	if err := pool.Call(sandbox.Call{Function: "echo", Scope: "b", Key: "key", Limit: time.Minute, Input: 1, Output: new(any)}); err != nil {
		t.Errorf("the error of another scope is returned: %v", err)
	}
}

// TestIdleChildrenOfManyScopes has more scopes than idle children.
func TestIdleChildrenOfManyScopes(t *testing.T) {
	t.Parallel()
	pool, _ := newPool()
	var pids []int
	const scopes = 12
	for scope := range scopes {
		pids = append(pids, pidOf(t, pool, "pid", fmt.Sprint(scope)))
	}
	const maxIdle = 8
	for _, pid := range pids[:scopes-maxIdle] {
		wantEnd(t, pid)
	}
	if last := pidOf(t, pool, "pid", fmt.Sprint(scopes-1)); last != pids[scopes-1] {
		t.Error("the last child is not kept")
	}
}

// TestChildOfACallbackThatPanics: a controller recovers from panics, and the child must not stay.
func TestChildOfACallbackThatPanics(t *testing.T) {
	t.Parallel()
	pool, _ := newPool()
	pid := pidOf(t, pool, "pid", "a")
	func() {
		defer func() { _ = recover() }()
		err := pool.Call(sandbox.Call{
			Function: "hold", Scope: "a", Key: "a", Limit: time.Minute, Input: 1, Output: new(any),
			Callback: func(json.RawMessage) (any, error) { panic("in the callback") },
		})
		t.Errorf("the call returns %v", err)
	}()
	wantEnd(t, pid)
}

// TestIdleChildrenUseNoProcessor: code of an attacker continues after its call.
func TestIdleChildrenUseNoProcessor(t *testing.T) {
	t.Parallel()
	pool, _ := newPool()
	wantEnd(t, pidOf(t, pool, "continue", ""))
	if err := pool.Call(sandbox.Call{Function: "echo", Key: "echo", Limit: time.Minute, Input: 1, Output: new(any)}); err != nil {
		t.Errorf("the next call: %v", err)
	}
}

// TestMemoryOfIdleChildren changes the memory limit of this process: children take more memory together after their
// calls than all of them may have.
func TestMemoryOfIdleChildren(t *testing.T) { //nolint:paralleltest // see above
	skipWithRace(t)
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(1600 << 20))
	pool, _ := newPool()
	var pids []int
	const children = 4
	for scope := range children {
		pids = append(pids, pidOf(t, pool, "grow", fmt.Sprint(scope)))
	}
	for end := time.Now().Add(30 * time.Second); ; <-time.After(checkPause) {
		running := 0
		for _, pid := range pids {
			if isRunning(pid) {
				running++
			}
		}
		if running == children-1 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d children with 170 MiB each are left, and all may take 600 MiB", running)
		}
	}
}
