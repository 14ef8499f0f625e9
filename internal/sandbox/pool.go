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
	// A call that finds no idle child starts one at once if at most maxBusy calls of its scope run, and at most one for
	// each processor core. Otherwise it first waits up to startDelay for an idle child. So short calls share a few
	// children, and long calls delay them by startDelay at most.
	maxBusy    = 4
	startDelay = 250 * time.Millisecond
	// maxPerKey is the maximum number of calls with the same key that run at the same time. A profile with an endless
	// template can have a thousand clusters, and the call for each of them reaches its limits. The other calls wait, and
	// then return the error of the first ones.
	maxPerKey = 2
	// maxPerScope is the maximum number of calls of a scope that run at the same time. On a machine with more than four
	// processors, the maximum is two calls for each processor. Without it, one tenant could start any number of children.
	maxPerScope = 8
	// maxMessage is the maximum size of a message of a child in bytes, and maxValues the maximum number of JSON values in
	// it. A decoded message usually takes about six times its size. A message of many small values would take more memory
	// than this process has.
	maxMessage = 64 << 20
	maxValues  = 4_000_000
	// After a call has exceeded a limit, calls with its key are not run for minPause. Each further failure doubles the
	// pause, up to maxPause.
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
	running  map[string]int
	failures map[callKey]failure
	limiters map[string]*callLimiter
}

// callKey identifies the calls to which a stored failure applies. An empty member stands for all members.
type callKey struct{ key, member string }

// callLimiter limits the running calls with one key, or in one scope. Each running call has a value in slots.
type callLimiter struct {
	calls int // running and waiting
	slots chan struct{}
}

// failure is a stored error of calls that exceeded a limit.
type failure struct {
	err error
	// member is the Call.Member of the last failure.
	member string
	// pause is zero if only one member had the failure, once: calls for other members are run then.
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
		running: map[string]int{}, failures: map[callKey]failure{}, limiters: map[string]*callLimiter{},
	}
}

// Memory returns the memory for inputs and outputs of calls, and for the objects that callers make from the outputs: a
// quarter of the memory limit of this process, and at least 256 MiB. It is nil, which means no limit, for a nil Pool.
func (p *Pool) Memory() *kube.ContentMemory {
	if p == nil {
		return nil
	}
	return p.content
}

// Call is one execution of a function.
type Call struct {
	// Function is the name of a function in the argument of Serve.
	Function string
	// Scope identifies the users who trust each other with the results of their calls, for example the namespace of a
	// tenant. Calls share children and stored errors only within a scope: if an input executes code in a child, through a
	// bug in an interpreter, it can forge the results of all further calls in that child. For the same reason, callers
	// that cache results must include the scope in their keys.
	Scope string
	// Key identifies the input without the data of a member, and Member is the member with the data, if any. After a
	// LimitError, or an output that is too large for the memory of the scope, calls with the same key and member return
	// the error for a growing time. If calls for two members fail in succession, the data is not the reason, and calls for
	// all members return the error.
	Key, Member string

	// Limit is the maximum processor time of the call. The maximum elapsed time is maxTimeFactor times Limit.
	Limit time.Duration
	Input any
	// Load returns the input. If it is set, Input is ignored. It is called only when the call may run, so that a
	// waiting call does not keep a large input in memory.
	Load func() (any, error)
	// LoadSize is the size in bytes of the data in the input of Load. Memory for it is reserved before Load is called.
	LoadSize int
	// Output is a pointer that receives the output.
	Output any
	// Memory counts the memory of the input and of the output. Default: a reservation of Pool.Memory until Call returns.
	Memory *kube.ContentReservation
	// Callback is called when the function requests data. If it is nil, a request is an error: it must be nil for inputs
	// with which the function requests none. Requests and output can be forged: the caller must validate them.
	Callback func(input json.RawMessage) (any, error)
	// IsCallbackSlow is true if Callback can wait for a member. While Callback runs, the call does not count against
	// maxPerScope.
	IsCallbackSlow bool
	// Detail returns a text to add to the reason of a call that took too long, for example the place in the template. It
	// may be nil.
	Detail func() string
}

// LimitError is the error of a call that exceeded a limit.
type LimitError struct{ reason string }

// Error returns the limit that was exceeded, as a clause such as "it took longer than 5s".
func (e *LimitError) Error() string { return e.reason }

// Call runs a function in a child, and returns its error. If the function returns a phase.TerminalError, Call returns
// one, too. It returns a LimitError if the call exceeds a limit, and an error that wraps ErrStart or ErrMemory if this
// process or other calls are the reason. If there is no memory for the input or the output, it returns the error of
// kube.ContentReservation.Add.
func (p *Pool) Call(call Call) error {
	call.Key = call.Scope + " " + call.Key
	if call.Memory == nil {
		call.Memory = p.content.Reserve(call.Scope)
		defer call.Memory.Release()
	}
	hasOnlyThisCall := !call.Memory.HasReserved()
	defer p.acquireSlot(call.Key, maxPerKey)()
	if err := p.storedFailure(call); err != nil { // also of a call for which this one waited
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
	child, err := p.acquireChild(call.Scope)
	if err != nil {
		return err
	}
	stop := child.limitTime(call.Limit)
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
			child.kill()
			p.children.remove(child)
		}
	}()
	result, err := child.exchange(request{Function: call.Function, Input: input}, callback, call.Memory)
	hasReturned = true
	isInTime := stop()
	if isInTime && err == nil {
		p.children.release(child)
		p.deleteFailures(call)
		return decodeResult(result, call.Output)
	}
	call.Memory.Subtract(int64(len(result.Output))) // an output after the limit of time is not used
	child.kill()
	isKilled := !p.children.remove(child)
	switch { // other calls may be the reason for the failures of these cases: only the first is stored
	case errors.Is(err, kube.ErrContentTooLarge) && hasOnlyThisCall:
		return p.storeFailure(call, kube.ErrorForAll(err))
	case kube.IsMemoryError(err):
		return err
	case isKilled:
		return fmt.Errorf("%w: all calls together took more than %d MiB, and this one took the most", ErrMemory, p.children.limit>>20)
	}
	return p.storeFailure(call, &LimitError{call.limitReason(child, isInTime, err)})
}

// limitReason returns the limit that the call has exceeded, for LimitError. err is the error of child.exchange.
func (c Call) limitReason(child *child, isInTime bool, err error) string {
	exitReason := child.exitReason()
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

// inputSize returns the approximate size of the input as JSON, in bytes.
func (c Call) inputSize() int64 {
	if c.Load != nil {
		return int64(c.LoadSize) * 4 / 3 // base64
	}
	return encodedSize(c.Input)
}

// encodeInput reserves memory for the input, and returns the input as JSON. The caller must call release, also after an
// error.
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
		err = phase.TerminalError{Err: err}
	}
	return encoded, release, err
}

// ErrMemory is wrapped by the error of a call that was ended because all calls together took too much memory. The input
// may be valid.
var ErrMemory = errors.New("no memory is left for it")

// decodeResult decodes the output and returns the error of the function. A result can have both.
func decodeResult(result response, output any) error {
	if len(result.Output) > 0 {
		if err := json.Unmarshal(result.Output, output); err != nil {
			return fmt.Errorf("decode the result: %w", err)
		}
	}
	// Errors of templates and charts can contain their input, and each caller that wraps an error copies its text.
	text := kube.Truncate(result.Error, kube.MaxMessage)
	switch {
	case result.Invalid:
		return phase.TerminalError{Err: errors.New(text)}
	case text != "":
		return errors.New(text)
	}
	return nil
}

// acquireChild returns an idle child of the scope, or starts one. It adds the call to running, also with an error; the
// caller must remove it.
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

// addRunning adds calls, which may be negative, to the number of running calls of a scope, and returns the sum.
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
	return p.acquireSlot("scope "+scope, max(maxPerScope, 2*runtime.GOMAXPROCS(0)))
}

// acquireSlot waits until less than limit calls with the key are running. The caller must call release.
func (p *Pool) acquireSlot(key string, limit int) (release func()) {
	p.mu.Lock()
	limiter := p.limiters[key]
	if limiter == nil {
		limiter = &callLimiter{slots: make(chan struct{}, limit)}
		p.limiters[key] = limiter
	}
	limiter.calls++
	p.mu.Unlock()
	limiter.slots <- struct{}{}
	return func() {
		<-limiter.slots
		p.mu.Lock()
		defer p.mu.Unlock()
		if limiter.calls--; limiter.calls == 0 {
			delete(p.limiters, key)
		}
	}
}

// storedFailure returns the error of the last failed call with the key of call, for all members or for the same one,
// until its pause ends.
func (p *Pool) storedFailure(call Call) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, key := range []callKey{{key: call.Key}, {call.Key, call.Member}} {
		if known, ok := p.failures[key]; ok && p.clock.Now().Before(known.retryAt) {
			return known.err
		}
	}
	return nil
}

// deleteFailures deletes the failures of a call that has succeeded, also the one for all members: the input is valid.
func (p *Pool) deleteFailures(call Call) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.failures, callKey{key: call.Key})
	delete(p.failures, callKey{call.Key, call.Member})
}

// storeFailure stores err for further calls, and returns it.
func (p *Pool) storeFailure(call Call, err error) error {
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
