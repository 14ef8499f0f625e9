package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/phase"
)

const (
	// maxIdle is the number of children that wait for calls, idleTime the time after which they end, and maxIdleMemory the
	// memory in bytes that each may keep. Most charts need less.
	maxIdle       = 4
	idleTime      = time.Minute
	maxIdleMemory = 100 << 20
	// startDelay is the time for which a call waits for an idle child if as many children are running as there are
	// processor cores. Then it starts a child. So short calls share a few children, and long ones do not delay them.
	startDelay = 250 * time.Millisecond
	// maxPerKey is the number of calls with the same key that run at the same time, since each of them can reach its
	// limits: a profile with an endless template can have a thousand clusters. The other calls wait for them, and return
	// their error.
	maxPerKey = 2
	// maxMessage is the maximum size of a message of a child in bytes. A decoded message needs about six times as much.
	maxMessage = 64 << 20
	// A call that exceeded a limit is not repeated for minPause, and for twice the former pause after each further
	// failure, up to maxPause.
	minPause = 30 * time.Second
	maxPause = 5 * time.Minute
)

// Pool runs calls in children. Create it with NewPool.
type Pool struct {
	command []string
	memory  int64 // limit of a child in bytes
	budget  memoryBudget
	clock   clock.PassiveClock
	idle    chan *child
	// running is the number of calls that have a child or wait for one.
	running atomic.Int32

	mu         sync.Mutex // guards the fields below
	failures   map[callKey]failure
	callsByKey map[string]*keyCalls
}

// callKey identifies the calls that a remembered failure applies to. An empty member stands for all members.
type callKey struct{ key, member string }

// keyCalls are the calls with one key that are running or waiting. Each running call has a value in slots.
type keyCalls struct {
	number int
	slots  chan struct{}
}

// failure is a call that exceeded a limit.
type failure struct {
	err error
	// member is the Call.Member of the last failure.
	member  string
	pause   time.Duration
	retryAt time.Time
}

// NewPool returns a Pool without children. command starts a process that calls Serve. The memory of a child is limited
// to a quarter of the memory limit of this process (GOMEMLIMIT), with which it shares a container. All children that
// run calls have a half of it together.
func NewPool(command []string, clock clock.PassiveClock) *Pool {
	limit := debug.SetMemoryLimit(-1)
	memory := max(minMemory, min(maxMemory, limit/4))
	return &Pool{
		command: command, memory: memory, budget: memoryBudget{limit: max(memory, limit/2)}, clock: clock, idle: make(chan *child, maxIdle),
		failures: map[callKey]failure{}, callsByKey: map[string]*keyCalls{},
	}
}

// Call is one execution of a function.
type Call struct {
	Function string
	// Key identifies the input without the data of a member, and Member the member with the data, if any. After a
	// LimitError, calls with the same key and member return the error for a growing time. If two members in succession
	// had it, the data is not the reason, and calls for all members return it.
	Key, Member string

	// Limit is the maximum of processor time of the child, and a maxWait-th of the maximum time of the call.
	Limit time.Duration
	Input any
	// Output is a pointer that receives the output.
	Output any
	// Callback is called when the function requests data. It may be nil for functions without callbacks.
	Callback func(input json.RawMessage) (any, error)
	// Detail returns a text to add to the reason of a call that took too long, for example where it was. It may be nil.
	Detail func() string
}

// LimitError is returned for a call that exceeded a limit.
type LimitError struct{ reason string }

// Error returns which limit was exceeded.
func (e *LimitError) Error() string { return e.reason }

// Call runs a function in a child, and returns its error. It returns a LimitError if the child exceeds a limit. An
// error that is a phase.Invalid in the child is one here, too.
func (p *Pool) Call(call Call) error {
	defer p.acquireKey(call.Key)()
	if err := p.failureOf(call); err != nil {
		return err
	}
	input, err := marshal(call.Input)
	if err != nil {
		return phase.Invalid{Err: err}
	}
	p.running.Add(1)
	defer p.running.Add(-1)
	used, err := p.acquireChild()
	if err != nil {
		return err
	}
	remove := p.budget.add(used)
	stop := used.limitTime(call.Limit)
	result, err := used.exchange(request{Function: call.Function, Input: input}, call.Callback)
	isInTime, isWithinBudget := stop(), remove()
	if isInTime && err == nil {
		if isWithinBudget {
			p.releaseChild(used)
		}
		p.forget(call)
		return decodeResult(result, call.Output)
	}
	used.kill()
	if !isWithinBudget {
		// Other calls are as much the reason: it is not remembered.
		return fmt.Errorf("%w: all calls together took more than %d MiB, and this one took the most", ErrMemory, p.budget.limit>>20)
	}
	reason := used.exitReason()
	switch {
	case !isInTime:
		reason = fmt.Sprintf("it took longer than %s", call.Limit)
		if call.Detail != nil {
			reason += call.Detail()
		}
	case errors.Is(err, errMessageTooLarge):
		reason = err.Error()
	}
	return p.remember(call, reason)
}

// ErrMemory is wrapped by the error of a call that was ended because all calls together took too much memory. The input
// may be valid.
var ErrMemory = errors.New("no memory is left for it")

// decodeResult decodes the output and returns the error of a call. There may be both.
func decodeResult(result response, output any) error {
	if len(result.Output) > 0 {
		if err := json.Unmarshal(result.Output, output); err != nil {
			return fmt.Errorf("decode the result: %w", err)
		}
	}
	switch {
	case result.Invalid:
		return phase.Invalid{Err: errors.New(result.Error)}
	case result.Error != "":
		return errors.New(result.Error)
	}
	return nil
}

// acquireChild returns an idle child, or starts one.
func (p *Pool) acquireChild() (*child, error) {
	var delay time.Duration
	if p.running.Load() > int32(min(runtime.GOMAXPROCS(0), maxIdle)) { //nolint:gosec // a small number
		delay = startDelay
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	for {
		select {
		case idle := <-p.idle:
			if idle.resume() {
				return idle, nil
			}
			continue
		default:
		}
		select {
		case idle := <-p.idle:
			if idle.resume() {
				return idle, nil
			}
		case <-timer.C:
			return startChild(p.command, p.memory)
		}
	}
}

// releaseChild keeps a child for the next call, or ends it if there are enough, or if it has kept much memory.
func (p *Pool) releaseChild(used *child) {
	if used.usedMemory() > maxIdleMemory {
		used.kill()
		return
	}
	used.suspend(idleTime)
	select {
	case p.idle <- used:
	default:
		used.kill()
	}
}

// acquireKey waits until less than maxPerKey calls with the key are running. The caller must call release.
func (p *Pool) acquireKey(key string) (release func()) {
	p.mu.Lock()
	calls := p.callsByKey[key]
	if calls == nil {
		calls = &keyCalls{slots: make(chan struct{}, maxPerKey)}
		p.callsByKey[key] = calls
	}
	calls.number++
	p.mu.Unlock()
	calls.slots <- struct{}{}
	return func() {
		<-calls.slots
		p.mu.Lock()
		defer p.mu.Unlock()
		if calls.number--; calls.number == 0 {
			delete(p.callsByKey, key)
		}
	}
}

// failureOf returns the error of the last call with the same key, for all members or for the same one, until its pause
// ends.
func (p *Pool) failureOf(call Call) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, key := range []callKey{{key: call.Key}, {call.Key, call.Member}} {
		if known, ok := p.failures[key]; ok && p.clock.Now().Before(known.retryAt) {
			return known.err
		}
	}
	return nil
}

// forget removes the failures of a call that succeeded. A key that succeeds for one member does so for others.
func (p *Pool) forget(call Call) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.failures, callKey{key: call.Key})
	delete(p.failures, callKey{call.Key, call.Member})
}

// remember returns a LimitError, and stores it for further calls.
func (p *Pool) remember(call Call, reason string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.failures, func(_ callKey, old failure) bool { return p.clock.Since(old.retryAt) > maxPause })
	forAll, forMember := callKey{key: call.Key}, callKey{call.Key, call.Member}
	last, isKnown := p.failures[forAll]
	err := &LimitError{reason: reason}
	if call.Member == "" || isKnown && (last.pause > 0 || last.member != call.Member) {
		p.failures[forAll] = p.nextFailure(last, call, err)
	} else {
		p.failures[forAll] = failure{err: err, member: call.Member, retryAt: p.clock.Now()}
	}
	if call.Member != "" {
		p.failures[forMember] = p.nextFailure(p.failures[forMember], call, err)
	}
	return err
}

// nextFailure returns the failure after last, with twice its pause.
func (p *Pool) nextFailure(last failure, call Call, err error) failure {
	pause := min(max(2*last.pause, minPause), maxPause)
	return failure{err: err, member: call.Member, pause: pause, retryAt: p.clock.Now().Add(pause)}
}
