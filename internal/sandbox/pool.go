package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
)

const (
	// maxBusy is the maximum number of running calls of a scope, at most one for each processor core, that start children
	// without a delay. Further ones wait for startDelay for an idle child before they start one. So short calls share a
	// few children, and long ones do not delay them.
	maxBusy    = 4
	startDelay = 250 * time.Millisecond
	// maxPerKey is the number of calls with the same key that run at the same time, since each of them can reach its
	// limits: a profile with an endless template can have a thousand clusters. The other calls wait for them, and return
	// their error.
	maxPerKey = 2
	// maxPerScope is the maximum number of calls of a scope that run at the same time. On a machine with more than four
	// processors, the maximum is two calls for each processor. Without it, one tenant could start any number of children.
	maxPerScope = 8
	// maxMessage is the maximum size of a message of a child in bytes, and maxValues the maximum number of its values,
	// which kube.CountValues counts. A decoded message usually needs about six times its size, but one of many small
	// values more memory than this process has.
	maxMessage = 64 << 20
	maxValues  = 4_000_000
	// A call that exceeded a limit is not repeated for minPause, and for twice the former pause after each further
	// failure, up to maxPause.
	minPause = 30 * time.Second
	maxPause = 5 * time.Minute
)

// Pool runs calls in children. Create it with NewPool.
type Pool struct {
	command  []string
	memory   int64 // limit of a child in bytes
	content  *kube.ContentMemory
	children *children
	clock    clock.PassiveClock

	mu sync.Mutex // guards the fields below
	// running is the number of calls of each scope that have a child or wait for one.
	running    map[string]int
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

// NewPool returns a Pool without children. command starts a process that calls Serve. The memory of all children
// together is limited to three eighths of the memory limit of this process, with which they share a container, and to
// at least 256 MiB. One child can have all of it, but at most 1 GiB.
func NewPool(command []string, clock clock.PassiveClock) *Pool {
	limit := max(minMemory, debug.SetMemoryLimit(-1)/8*3)
	memory := min(maxMemory, limit)
	return &Pool{
		command: command, memory: memory, children: newChildren(limit), clock: clock,
		content: kube.NewContentMemory(max(minMemory, debug.SetMemoryLimit(-1)/4)),
		running: map[string]int{}, failures: map[callKey]failure{}, callsByKey: map[string]*keyCalls{},
	}
}

// Memory returns the memory for inputs and outputs of calls, and for what is made of the outputs: a quarter of the
// memory limit of this process, and at least 256 MiB. It is nil, which means no limit, for a nil Pool.
func (p *Pool) Memory() *kube.ContentMemory {
	if p == nil {
		return nil
	}
	return p.content
}

// Call is one execution of a function.
type Call struct {
	Function string
	// Scope identifies the users who trust each other with the results of their calls, for example the namespace of a
	// tenant. Calls share a child, and remembered errors, only within a scope: input that executes code in a child,
	// because of a bug in an interpreter, determines the results of the further calls there. Callers that cache results
	// must have the scope in their keys, too.
	Scope string
	// Key identifies the input without the data of a member, and Member the member with the data, if any. After a
	// LimitError, or an output that is too large for the memory of the scope, calls with the same key and member return
	// the error for a growing time. If two members in succession had it, the data is not the reason, and calls for all
	// members return it.
	Key, Member string

	// Limit is the maximum of processor time of the child, and a maxWait-th of the maximum time of the call.
	Limit time.Duration
	Input any
	// Load returns the input, instead of Input. It is called only when the call may run, so that a waiting call does not
	// keep a large input in memory.
	Load func() (any, error)
	// LoadSize is the size in bytes of the input that Load returns, for which memory is reserved before.
	LoadSize int
	// Output is a pointer that receives the output.
	Output any
	// Memory counts the memory of the input and of the output. Default: a reservation of Pool.Memory until Call returns.
	Memory *kube.ContentReservation
	// Callback is called when the function requests data. It must be nil for inputs with which the function requests none.
	// Then a request is an error. Both the requests and the output can be forged: the caller must check what it relies on.
	Callback func(input json.RawMessage) (any, error)
	// IsCallbackSlow is true if Callback can wait for a member. While it runs, the call does not count for the maximum of
	// its scope.
	IsCallbackSlow bool
	// Detail returns a text to add to the reason of a call that took too long, for example where it was. It may be nil.
	Detail func() string
}

// LimitError is returned for a call that exceeded a limit.
type LimitError struct{ reason string }

// Error returns which limit was exceeded.
func (e *LimitError) Error() string { return e.reason }

// Call runs a function in a child, and returns its error. It returns a LimitError if the child exceeds a limit. An
// error that is a phase.Invalid in the child is one here, too. If there is no memory for the
// input or the output, it returns the error of kube.ContentReservation.Add.
func (p *Pool) Call(call Call) error {
	call.Key = call.Scope + " " + call.Key
	if call.Memory == nil {
		call.Memory = p.content.Reserve(call.Scope)
		defer call.Memory.Release()
	}
	isAlone := !call.Memory.HasReserved()
	defer p.acquireKey(call.Key, maxPerKey)()
	if err := p.failureOf(call); err != nil { // of a call that has ended meanwhile
		return err
	}
	releaseScope := p.acquireScope(call.Scope)
	defer func() { releaseScope() }()
	input, releaseInput, err := call.encodeInput()
	defer releaseInput()
	if err != nil {
		return err
	}
	defer p.addRunning(call.Scope, -1)
	used, err := p.acquireChild(call.Scope)
	if err != nil {
		return err
	}
	stop := used.limitTime(call.Limit)
	callback := call.Callback
	if callback != nil && call.IsCallbackSlow {
		callback = func(input json.RawMessage) (any, error) {
			releaseScope() // slow members must not block the calls for others
			defer func() { releaseScope = p.acquireScope(call.Scope) }()
			return call.Callback(input)
		}
	}
	hasReturned := false
	defer func() {
		if !hasReturned { // the callback panicked
			used.kill()
			p.children.remove(used)
		}
	}()
	result, err := used.exchange(request{Function: call.Function, Input: input}, callback, call.Memory)
	hasReturned = true
	isInTime := stop()
	if isInTime && err == nil {
		p.children.release(used)
		p.forget(call)
		return decodeResult(result, call.Output)
	}
	call.Memory.Subtract(int64(len(result.Output))) // it was too late
	used.kill()
	isKilled := !p.children.remove(used)
	switch { // other calls may have caused these failures, which are not remembered, except the first
	case errors.Is(err, kube.ErrContentTooLarge) && isAlone:
		return p.remember(call, kube.ErrorForAll(err))
	case kube.IsMemoryError(err):
		return err
	case isKilled:
		return fmt.Errorf("%w: all calls together took more than %d MiB, and this one took the most", ErrMemory, p.children.limit>>20)
	}
	return p.remember(call, &LimitError{call.limitReason(used, isInTime, err)})
}

// limitReason returns which limit the call has exceeded. err is the error of child.exchange.
func (c Call) limitReason(used *child, isInTime bool, err error) string {
	exitReason := used.exitReason()
	wrongMessage, isWrong := errors.AsType[messageError](err)
	switch {
	case !isInTime && c.Detail != nil:
		return fmt.Sprintf("it took longer than %s", c.Limit) + c.Detail()
	case !isInTime:
		return fmt.Sprintf("it took longer than %s", c.Limit)
	case isWrong:
		return wrongMessage.Error()
	}
	return exitReason
}

// inputSize returns about how many bytes the JSON of the input has.
func (c Call) inputSize() int64 {
	if c.Load != nil {
		return int64(c.LoadSize) * 4 / 3 // base64
	}
	return encodedSize(c.Input)
}

// encodeInput reserves memory for the input until release is called, and returns its JSON.
func (c Call) encodeInput() (encoded json.RawMessage, release func(), err error) {
	needed := int64(0)
	release = func() { c.Memory.Subtract(needed) }
	reserve := func(size int64) error {
		added := max(0, size*encodedCost-needed)
		err := c.Memory.Add(added)
		if err == nil {
			needed += added
		}
		return err
	}
	if err := reserve(c.inputSize()); err != nil {
		return nil, release, err
	}
	input := c.Input
	if c.Load != nil {
		if input, err = c.Load(); err != nil {
			return nil, release, err
		}
		if err := reserve(encodedSize(input)); err != nil {
			return nil, release, err
		}
	}
	if encoded, err = marshal(input); err != nil {
		err = phase.Invalid{Err: err}
	}
	return encoded, release, err
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
	// Errors of templates and charts can have their input, and each caller that adds to an error copies it.
	text := kube.Truncate(result.Error, kube.MaxMessage)
	switch {
	case result.Invalid:
		return phase.Invalid{Err: errors.New(text)}
	case text != "":
		return errors.New(text)
	}
	return nil
}

// acquireChild returns an idle child of the scope, or starts one.
func (p *Pool) acquireChild(scope string) (*child, error) {
	var delay time.Duration
	if p.addRunning(scope, 1) > min(runtime.GOMAXPROCS(0), maxBusy) {
		delay = startDelay
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	for {
		idle, released := p.children.takeIdle(scope)
		if idle != nil {
			return idle, nil
		}
		select {
		case <-released:
		case <-timer.C:
			return p.startChild(scope)
		}
	}
}

// addRunning changes the number of running calls of a scope, and returns it.
func (p *Pool) addRunning(scope string, calls int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running[scope] += calls
	running := p.running[scope]
	if running == 0 {
		delete(p.running, scope)
	}
	return running
}

func (p *Pool) startChild(scope string) (*child, error) {
	started, err := startChild(p.command, p.memory)
	if err != nil {
		return nil, err
	}
	started.scope = scope
	p.children.add(started)
	return started, nil
}

// acquireScope waits until the scope may run another call. The caller must call release.
func (p *Pool) acquireScope(scope string) (release func()) {
	return p.acquireKey("scope "+scope, max(maxPerScope, 2*runtime.GOMAXPROCS(0)))
}

// acquireKey waits until less than limit calls with the key are running. The caller must call release.
func (p *Pool) acquireKey(key string, limit int) (release func()) {
	p.mu.Lock()
	calls := p.callsByKey[key]
	if calls == nil {
		calls = &keyCalls{slots: make(chan struct{}, limit)}
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

// remember returns err, and stores it for further calls.
func (p *Pool) remember(call Call, err error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.failures, func(_ callKey, old failure) bool { return p.clock.Since(old.retryAt) > maxPause })
	forAll, forMember := callKey{key: call.Key}, callKey{call.Key, call.Member}
	last, isKnown := p.failures[forAll]
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
