package sandbox

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"sync"
	"time"

	"github.com/prometheus/procfs"

	"github.com/towline/towline/internal/kube"
)

// maxStderr is the number of bytes of a child's standard error that are kept: it begins with the reason for its end.
const maxStderr = 4 << 10

const (
	// maxTimeFactor is the maximum elapsed time of a call, as a multiple of Call.Limit. On a busy machine a child waits
	// for a processor, and its call must not fail for this.
	maxTimeFactor = 3
	// minTimeCheck is the minimum time between two checks of a child's processor time.
	minTimeCheck = 50 * time.Millisecond
)

// ErrStart is wrapped by the error of a call for which no process could be started. The input may be valid.
var ErrStart = errors.New("start a process of the sandbox")

// messageError is the error for an invalid message of a child, and the reason in the LimitError of the call.
type messageError string

// Error implements error.
func (e messageError) Error() string { return string(e) }

var (
	errMessageTooLarge    = messageError(fmt.Sprintf("its result has more than %d MiB", maxMessage>>20))
	errTooManyValues      = messageError(fmt.Sprintf("its result has more than %d values", maxValues))
	errUnexpectedCallback = messageError("it requested data that it must not have")
)

// child is a process that runs calls, one at a time.
type child struct {
	process *exec.Cmd
	in      io.WriteCloser
	out     io.Reader
	stderr  *limitedBuffer
	memory  int64 // limit in bytes
	// scope is the Call.Scope of all its calls.
	scope string
	// wait waits for the end of the process. It may be called several times.
	wait func() error
	// idleSince is the time of the last release, and cpuTimeBeforeIdle the processor time of the child then. children.mu
	// guards them.
	idleSince         time.Time
	cpuTimeBeforeIdle time.Duration
}

// limitedBuffer keeps the first maxStderr bytes that are written to it. It is no bytes.Buffer: io.Copy would use the
// ReadFrom of a bytes.Buffer, which has no limit.
type limitedBuffer struct{ text bytes.Buffer }

// Write implements io.Writer.
func (p *limitedBuffer) Write(text []byte) (int, error) {
	p.text.Write(text[:min(len(text), maxStderr-p.text.Len())])
	return len(text), nil
}

// startChild starts a child. The child does not inherit the environment, which can have credentials. It ends when this
// process ends. memory is its limit in bytes.
func startChild(command []string, memory int64) (*child, error) {
	started := &child{
		process: exec.Command(command[0], command[1:]...), stderr: &limitedBuffer{}, memory: memory, //nolint:noctx // it outlives a call; kill ends it
	}
	started.wait = sync.OnceValue(started.process.Wait)
	started.process.Env, started.process.Dir, started.process.Stderr = []string{"GOMAXPROCS=2", fmt.Sprint("GOMEMLIMIT=", memory)}, "/", started.stderr
	out, err := started.process.StdoutPipe()
	if err == nil {
		started.in, err = started.process.StdinPipe()
	}
	if err == nil {
		err = started.process.Start()
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStart, err)
	}
	started.out = out
	return started, nil
}

// exchange sends a call, calls callback for each request of the function, and returns the result. The memory of the
// output stays reserved, unless there is an error.
func (c *child) exchange(call request, callback func(json.RawMessage) (any, error), reserved *kube.ContentReservation) (response, error) {
	callbackMemory := int64(0) // reserved for the result of the callback
	for {
		err := write(c.in, call)
		if reserved.Subtract(callbackMemory); err != nil {
			return response{}, err
		}
		received, err := c.receive(reserved)
		if err != nil {
			return response{}, err
		}
		if received.Callback == nil {
			return received, nil
		}
		if callback == nil {
			reserved.Subtract(int64(len(received.Output) + len(received.Callback)))
			return response{}, errUnexpectedCallback
		}
		result, callbackErr := callback(received.Callback)
		reserved.Subtract(int64(len(received.Output) + len(received.Callback)))
		callbackMemory = encodedSize(result) * encodedCost
		if err := reserved.Add(callbackMemory); err != nil {
			return response{}, err
		}
		call = newCallbackResult(result, callbackErr)
	}
}

// receive reads one message. The memory of its Output and its Callback stays reserved. Each message has a decoder of
// its own, so that its buffer is freed: a decoder reads no part of the next message, which follows only the next
// request.
func (c *child) receive(reserved *kube.ContentReservation) (response, error) {
	counted := &countedReader{in: c.out, reserved: reserved}
	received, err := decodeMessage(counted)
	reserved.Subtract(counted.added - int64(len(received.Output)+len(received.Callback)))
	return received, err
}

// decodeMessage reads and decodes one message. With an error it returns an empty one.
func decodeMessage(in io.Reader) (response, error) {
	var received response
	limited := &io.LimitedReader{R: in, N: maxMessage}
	err := json.NewDecoder(limited).Decode(&received)
	switch {
	case err != nil && limited.N <= 0:
		return response{}, errMessageTooLarge
	case err != nil:
		return response{}, fmt.Errorf("read a message: %w", err)
	case kube.CountValuesParsingUpTo(received.Output, 0) > maxValues || kube.CountValuesParsingUpTo(received.Callback, 0) > maxValues: // JSON has no aliases
		return response{}, errTooManyValues
	}
	return received, nil
}

// messageCost is the memory to read a message, in bytes for each of its bytes: the buffer of the decoder, which doubles
// its size, and the decoded message.
const messageCost = 3

// countedReader reserves memory for a message while it is read.
type countedReader struct {
	in       io.Reader
	reserved *kube.ContentReservation
	added    int64 // to reserved, in bytes
}

// Read implements io.Reader.
func (r *countedReader) Read(p []byte) (int, error) {
	n, err := r.in.Read(p)
	if addErr := r.reserved.Add(int64(n) * messageCost); addErr != nil {
		return 0, addErr
	}
	r.added += int64(n) * messageCost
	return n, err
}

func newCallbackResult(result any, err error) request {
	raw, encodeErr := marshal(result)
	if err = errors.Join(err, encodeErr); err != nil {
		return request{Error: err.Error()}
	}
	return request{CallbackResult: raw}
}

// kill kills the process, and does not wait for its end.
func (c *child) kill() {
	_ = c.process.Process.Kill() // it may have ended already
	c.in.Close()
	go c.wait() //nolint:errcheck // so that no zombie remains; exitReason returns the error
}

// limitTime kills the child when it has used limit of processor time, or after maxTimeFactor times limit. The caller
// must call stop, which ends the supervision, and returns false if the child was killed.
func (c *child) limitTime(limit time.Duration) (stop func() bool) {
	start := time.Now()
	usedAtStart, _ := c.processorTime()
	ended, isInTime := make(chan struct{}), make(chan bool, 1)
	go func() {
		for remaining := limit; remaining > 0; {
			select {
			case <-ended:
				isInTime <- true
				return
			case <-time.After(max(remaining, minTimeCheck)):
			}
			elapsed := time.Since(start)
			remaining = maxTimeFactor*limit - elapsed
			if used, ok := c.processorTime(); ok {
				remaining = min(remaining, limit-(used-usedAtStart))
			} else {
				remaining = 0 // the child has ended, or the system has no /proc
			}
		}
		c.kill()
		isInTime <- false
	}()
	return func() bool {
		close(ended)
		return <-isInTime
	}
}

// processorTime returns the processor time that the child has used, which some systems count in steps of 10 ms. ok is
// false if the child has ended, or the system has no /proc.
func (c *child) processorTime() (used time.Duration, ok bool) {
	process, err := procfs.NewProc(c.process.Process.Pid)
	if err != nil {
		return 0, false
	}
	stat, err := process.Stat()
	if err != nil {
		return 0, false
	}
	return time.Duration(stat.CPUTime() * float64(time.Second)), true
}

// exitReason waits for the end of the process and returns its reason.
func (c *child) exitReason() string {
	err := c.wait()
	text := c.stderr.text.Bytes()
	switch {
	case bytes.Contains(text, []byte("stack exceeds")):
		return "it nests without end"
	case bytes.Contains(text, []byte("out of memory")), bytes.Contains(text, []byte("cannot allocate memory")),
		bytes.Contains(text, []byte("SIGSEGV")), bytes.Contains(text, []byte("pthread_create failed")): // no memory for a stack
		return fmt.Sprintf("it took more than %d MiB of memory", c.memory>>20)
	default:
		line, _, _ := bytes.Cut(bytes.TrimSpace(text), []byte("\n"))
		return fmt.Sprintf("its process ended: %v %s", err, line)
	}
}
