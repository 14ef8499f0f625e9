package sandbox_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/sandbox"
)

// serve is the argument with which the tests start their binary as a child.
const serve = "serve"

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == serve {
		if err := sandbox.Serve(functions(), os.Stdin, os.Stdout); err != nil {
			panic(err)
		}
		return
	}
	m.Run()
}

// node overflows the stack.
type node struct{ next *node }

func (n *node) depth() int { return n.next.depth() + 1 } //nolint:staticcheck // this is its purpose

func functions() map[string]sandbox.Function {
	type ask = func(any) (json.RawMessage, error)
	return map[string]sandbox.Function{
		"echo": func(input json.RawMessage, _ ask) (any, error) { return input, nil },
		"ask": func(input json.RawMessage, ask ask) (any, error) {
			answer, err := ask(input)
			return []json.RawMessage{answer, input}, err
		},
		"pid": func(json.RawMessage, ask) (any, error) { return os.Getpid(), nil },
		"continue": func(json.RawMessage, ask) (any, error) {
			go func() {
				for { //nolint:staticcheck // this is its purpose
				}
			}()
			return os.Getpid(), nil
		},
		"grow": func(json.RawMessage, ask) (any, error) {
			go func() {
				<-time.After(time.Second) // it is idle then
				filled := make([]byte, 170<<20)
				for i := range filled {
					filled[i] = 1
				}
				<-time.After(time.Hour)
				runtime.KeepAlive(filled)
			}()
			return os.Getpid(), nil
		},
		"env":     func(json.RawMessage, ask) (any, error) { return os.Environ(), nil },
		"invalid": func(json.RawMessage, ask) (any, error) { return "partly", phase.TerminalErrorf("wrong input") },
		"long":    func(json.RawMessage, ask) (any, error) { return nil, errors.New(strings.Repeat("x", 1<<20)) },
		"endless": func(json.RawMessage, ask) (any, error) {
			for { //nolint:staticcheck // this is its purpose
			}
		},
		"sleep": func(input json.RawMessage, _ ask) (any, error) {
			var duration time.Duration
			err := json.Unmarshal(input, &duration)
			<-time.After(duration)
			return nil, err
		},
		"hold": func(input json.RawMessage, ask ask) (any, error) {
			var mebibytes int
			err := json.Unmarshal(input, &mebibytes)
			held := bytes.Repeat([]byte("x"), mebibytes<<20)
			_, askErr := ask(nil)
			runtime.KeepAlive(held)
			return nil, errors.Join(err, askErr)
		},
		"memory": func(json.RawMessage, ask) (any, error) {
			var all [][]byte
			for {
				all = append(all, []byte(strings.Repeat("x", 1<<20))) //nolint:staticcheck // this is its purpose
			}
		},
		"request": func(input json.RawMessage, _ ask) (any, error) {
			var url string
			if err := json.Unmarshal(input, &url); err != nil {
				return nil, err
			}
			response, err := http.Get(url)
			if err == nil {
				response.Body.Close()
			}
			return nil, err
		},
		"warnings": func(json.RawMessage, ask) (any, error) {
			for range 1000 {
				log.Print("warning")
				fmt.Fprintln(os.Stderr, "warning")
			}
			return nil, nil
		},
		"large":  func(json.RawMessage, ask) (any, error) { return strings.Repeat("x", 65<<20), nil },
		"values": func(json.RawMessage, ask) (any, error) { return make([]int, 5_000_000), nil },
		"stack": func(json.RawMessage, ask) (any, error) {
			loop := &node{}
			loop.next = loop
			return loop.depth(), nil
		},
	}
}

func newPool() (*sandbox.Pool, *clocktesting.FakePassiveClock) {
	clock := clocktesting.NewFakePassiveClock(time.Unix(0, 0))
	return sandbox.NewPool([]string{os.Args[0], serve}, clock), clock
}

func TestCallsShareAProcess(t *testing.T) {
	t.Parallel()
	pool, _ := newPool()
	call := func(function string, input, output any) error {
		return pool.Call(sandbox.Call{
			Function: function, Key: function, Limit: time.Minute, Input: input, Output: output,
			Callback: func(question json.RawMessage) (any, error) {
				if string(question) == `"fail"` {
					return nil, errors.New("no answer")
				}
				return map[string]any{"answer to": question}, nil
			},
		})
	}
	var first, second int
	if err := errors.Join(call("pid", nil, &first), call("pid", nil, &second)); err != nil || first == 0 || first != second {
		t.Errorf("got processes %d and %d, error %v", first, second, err)
	}
	var got json.RawMessage
	if err := call("echo", json.RawMessage(`{"html":"<&>\u003c","one":1.0}`), &got); err != nil || string(got) != `{"html":"<&>\u003c","one":1.0}` {
		t.Errorf("got %s, error %v", got, err)
	}
	if err := call("ask", "a", &got); err != nil || string(got) != `[{"answer to":"a"},"a"]` {
		t.Errorf("got %s, error %v", got, err)
	}
	if err := call("ask", "fail", &got); err == nil || err.Error() != "no answer" {
		t.Errorf("got error %v", err)
	}
	var text string
	err := call("invalid", nil, &text)
	if invalid, ok := errors.AsType[phase.TerminalError](err); !ok || invalid.Error() != "wrong input" || text != "partly" {
		t.Errorf("got %q, error %v", text, err)
	}
	if err := call("long", nil, &text); err == nil || len(err.Error()) > kube.MaxMessage {
		t.Error("the text of the error has no limit")
	}
	var environment []string
	if err := call("env", nil, &environment); err != nil || len(environment) != 2 {
		t.Errorf("got environment %v, error %v", environment, err)
	}
}

func TestFunctionsHaveNoNetwork(t *testing.T) {
	t.Parallel()
	requests := 0
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { requests++ }))
	t.Cleanup(server.Close)
	pool, _ := newPool()
	var output any
	err := pool.Call(sandbox.Call{Function: "request", Key: "request", Limit: time.Minute, Input: server.URL, Output: &output})
	if err == nil || !strings.Contains(err.Error(), "there is no network") || requests > 0 {
		t.Errorf("%d requests, error %v", requests, err)
	}
}

// TestWarningsDoNotHideTheReason crashes a child after its function has printed more than is kept.
func TestWarningsDoNotHideTheReason(t *testing.T) {
	t.Parallel()
	skipWithRace(t)
	pool, _ := newPool()
	var output any
	if err := pool.Call(sandbox.Call{Function: "warnings", Key: "warnings", Limit: time.Minute, Output: &output}); err != nil {
		t.Fatal(err)
	}
	err := pool.Call(sandbox.Call{Function: "stack", Key: "stack", Limit: time.Minute, Output: &output})
	if err == nil || err.Error() != "it nests without end" {
		t.Errorf("got %v", err)
	}
}

func TestLimitsEndAProcess(t *testing.T) {
	t.Parallel()
	for function, want := range map[string]string{
		"large":   "its result has more than 64 MiB",
		"values":  "its result has more than 4000000 values",
		"ask":     "it requested data that it must not have",
		"endless": "it took longer than 1s",
		"memory":  "it took more than 1024 MiB of memory",
		"stack":   "it nests without end",
	} {
		t.Run(function, func(t *testing.T) {
			t.Parallel()
			if function != "endless" {
				skipWithRace(t)
			}
			pool, clock := newPool()
			limit := time.Minute
			if function == "endless" {
				limit = time.Second
			}
			call := func(key string) error {
				var output any
				return pool.Call(sandbox.Call{Function: function, Key: key, Limit: limit, Output: &output})
			}
			err := call("a")
			if exceeded, ok := errors.AsType[*sandbox.LimitError](err); !ok || exceeded.Error() != want {
				t.Fatalf("got %v, want %s", err, want)
			}
			if again := call("a"); again != err { //nolint:errorlint // the same error shows that there was no call
				t.Errorf("got %v at once, want the same error", again)
			}
			clock.SetTime(time.Unix(30, 0))
			if again := call("a"); again == err || again == nil { //nolint:errorlint // see above
				t.Errorf("got %v after the pause, want a new error", again)
			}
			var output string
			if err := pool.Call(sandbox.Call{Function: "echo", Key: "b", Limit: time.Minute, Input: "b", Output: &output}); err != nil || output != "b" {
				t.Errorf("got %q, error %v from the next call", output, err)
			}
		})
	}
}

// skipWithRace skips a test of a limit of memory or stack, or with a large result: the race detector needs several
// times as much memory, and the child ends for that reason.
func skipWithRace(t *testing.T) {
	t.Helper()
	if isRace {
		t.Skip("the race detector needs more memory than the limit of a child")
	}
}

// TestMemoryOfAChildIsAPartOfTheLimit changes the memory limit of this process, so it does not run in parallel.
func TestMemoryOfAChildIsAPartOfTheLimit(t *testing.T) { //nolint:paralleltest // see above
	skipWithRace(t)
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(800 << 20))
	pool, _ := newPool()
	err := pool.Call(sandbox.Call{Function: "memory", Key: "a", Limit: time.Minute})
	if err == nil || err.Error() != "it took more than 300 MiB of memory" {
		t.Errorf("got %v, want the limit of 300 MiB", err)
	}
}

// TestMemoryOfAllChildren has more calls than the memory limit of this process allows, which it changes. Each takes
// less than its own limit. Only the call that takes most fails.
func TestMemoryOfAllChildren(t *testing.T) { //nolint:paralleltest // see above
	skipWithRace(t)
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(1600 << 20))
	pool, _ := newPool()
	const largest = 170
	var filled, calls sync.WaitGroup
	release := make(chan struct{})
	hold := func(key, mebibytes int) {
		var once sync.Once
		err := pool.Call(sandbox.Call{Function: "hold", Key: fmt.Sprint(key), Limit: time.Minute, Input: mebibytes, Output: new(any), Callback: func(json.RawMessage) (any, error) {
			once.Do(filled.Done)
			<-release
			return "", nil
		}})
		once.Do(filled.Done) // it was killed before
		if isKilled := err != nil && strings.Contains(err.Error(), "all calls together took more than 600 MiB"); isKilled != (mebibytes == largest) || !isKilled && err != nil {
			t.Errorf("the call with %d MiB: got error %v", mebibytes, err)
		}
	}
	filled.Add(1)
	calls.Go(func() { hold(0, largest) })
	filled.Wait() // it is the largest from the start
	for i, mebibytes := range []int{10, 125, 125, 125, 125} {
		filled.Add(1)
		calls.Go(func() { hold(i+1, mebibytes) })
	}
	filled.Wait()
	close(release)
	calls.Wait()
}

// TestWaitingIsNotLimited calls a function that takes longer than its limit, but hardly any processor time.
func TestWaitingIsNotLimited(t *testing.T) {
	t.Parallel()
	pool, _ := newPool()
	sleep := func(key string, duration time.Duration) error {
		var output any
		return pool.Call(sandbox.Call{Function: "sleep", Key: key, Limit: time.Second, Input: duration, Output: &output})
	}
	if err := sleep("short", 1500*time.Millisecond); err != nil {
		t.Errorf("got %v from a call that waits", err)
	}
	if err := sleep("long", time.Hour); err == nil || err.Error() != "it took longer than 1s" {
		t.Errorf("got %v from a call that waits for an hour", err)
	}
}

// TestLongCallsDelayNoOther has more long calls of a scope than may run at the same time. They delay none of another
// scope.
func TestLongCallsDelayNoOther(t *testing.T) {
	t.Parallel()
	pool, _ := newPool()
	long := max(8, 2*runtime.GOMAXPROCS(0)) + 4
	var running, most atomic.Int32
	ended := make(chan error, long)
	for i := range long {
		go func() {
			ended <- pool.Call(sandbox.Call{
				Scope: "eu", Function: "endless", Key: fmt.Sprint("endless ", i), Limit: 5 * time.Second,
				Input:  inputFunc(func() { most.Store(max(most.Load(), running.Add(1))) }),
				Detail: func() string { running.Add(-1); return "" },
			})
		}()
	}
	var output string
	if err := pool.Call(sandbox.Call{Scope: "us", Function: "echo", Key: "b", Limit: time.Minute, Input: "b", Output: &output}); err != nil {
		t.Error(err)
	}
	select {
	case err := <-ended:
		t.Errorf("the call waited for a long one, which ended with %v", err)
	default:
	}
	for range long {
		<-ended
	}
	if limit := int32(long - 4); most.Load() > limit {
		t.Errorf("%d calls of a scope ran at the same time, want at most %d", most.Load(), limit)
	}
}

// TestSlowMembersDelayNoOther has as many calls of a scope as may run at the same time, all of which wait for the
// answers of members.
func TestSlowMembersDelayNoOther(t *testing.T) {
	t.Parallel()
	pool, _ := newPool()
	calls := max(8, 2*runtime.GOMAXPROCS(0))
	asked, answer, ended := make(chan struct{}, calls), make(chan struct{}), make(chan error, calls)
	for i := range calls {
		go func() {
			ended <- pool.Call(sandbox.Call{
				Function: "ask", Key: fmt.Sprint("ask ", i), Limit: time.Minute, Input: "a", Output: new(any), IsCallbackSlow: true,
				Callback: func(json.RawMessage) (any, error) { asked <- struct{}{}; <-answer; return "b", nil },
			})
		}()
	}
	for range calls {
		<-asked
	}
	if err := pool.Call(sandbox.Call{Function: "echo", Key: "b", Limit: time.Minute, Input: "b", Output: new(any)}); err != nil {
		t.Error(err)
	}
	close(answer)
	for range calls {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// inputFunc is an input that is encoded when its call has begun.
type inputFunc func()

// MarshalJSON implements json.Marshaler.
func (f inputFunc) MarshalJSON() ([]byte, error) { f(); return []byte(`""`), nil }

// TestFewCallsWithTheSameKeyReachTheLimit starts an endless call for many clusters at once.
func TestFewCallsWithTheSameKeyReachTheLimit(t *testing.T) {
	t.Parallel()
	pool, _ := newPool()
	const calls = 12
	failed := make(chan error, calls)
	for range calls {
		go func() {
			failed <- pool.Call(sandbox.Call{Function: "endless", Key: "endless", Limit: time.Second})
		}()
	}
	processes := map[error]bool{}
	for range calls {
		processes[<-failed] = true
	}
	if len(processes) > 2 || processes[nil] {
		t.Errorf("%d processes reach the limit, want at most 2", len(processes))
	}
}

// TestLimitOfOneMemberIsNotRememberedForOthers has a call that exceeds a limit with the data of some members.
func TestLimitOfOneMemberIsNotRememberedForOthers(t *testing.T) {
	t.Parallel()
	pool, clock := newPool()
	call := func(step, member string, isEndless bool, want error) error {
		t.Helper()
		function := "echo"
		if isEndless {
			function = "large"
		}
		var output string
		err := pool.Call(sandbox.Call{Function: function, Key: "template", Member: member, Limit: time.Minute, Input: "a", Output: &output})
		if want != nil && err != want || !isEndless && want == nil && err != nil { //nolint:errorlint // the same error shows that there was no call
			t.Errorf("%s: got %v, want %v", step, err, want)
		}
		return err
	}
	failed := call("a member fails", "one", true, nil)
	_ = call("the same member", "one", false, failed)
	_ = call("another member", "two", false, nil)
	again := call("a third member fails after a success", "three", true, nil)
	_ = call("a fourth one succeeds", "four", false, nil)
	_ = call("the first one still fails", "one", false, failed)
	_ = call("the third one still fails", "three", false, again)
	_ = call("one more fails", "five", true, nil)
	failed = call("a second one in succession", "six", true, nil)
	_ = call("all members fail", "two", false, failed)
	clock.SetTime(time.Unix(31, 0))
	_ = call("after the pause", "two", false, nil)
	_ = call("and so the others", "one", false, nil)
}
