package script

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/metrics"
	"time"
)

const (
	// maxSteps is the maximum number of instructions of a script. A typical script for 10,000 objects takes some hundred
	// thousand.
	maxSteps = 5_000_000
	// maxMemory limits the growth of the heap while a script runs, in bytes. The child process in which the script runs
	// has at least twice as much memory. checkInterval is the number of instructions between two checks of memory and
	// time.
	maxMemory     = 128 << 20
	checkInterval = 32
	// maxGarbage is the heap size in bytes above which garbage is collected before a script starts.
	maxGarbage = maxMemory / 8
	// heapMetric is the size of live objects and garbage.
	heapMetric = "/memory/classes/heap/objects:bytes"
)

// The errors of exceeded limits.
var (
	errTime   = fmt.Errorf("the script took longer than %s", scriptTimeout)
	errSteps  = fmt.Errorf("the script took more than %d steps", maxSteps)
	errMemory = errors.New("the script took too much memory")
)

// scriptLimiter is the context of one script. The interpreter calls Done before each instruction, which lets it count
// them. Only the goroutine of the interpreter uses it.
type scriptLimiter struct {
	// The interpreter accepts limits only as a context.
	context.Context //nolint:containedctx // see above

	steps       int
	initialHeap uint64
	// start is the time, and initialTime the processor time of this process, before the script.
	start       time.Time
	initialTime time.Duration
	closed      chan struct{} // a closed channel
	err         error
}

var _ context.Context = (*scriptLimiter)(nil)

func newScriptLimiter(ctx context.Context) *scriptLimiter {
	if heapSize() > maxGarbage {
		runtime.GC() // garbage would raise initialHeap, and so the limit
	}
	closed := make(chan struct{})
	close(closed)
	return &scriptLimiter{Context: ctx, initialHeap: heapSize(), start: time.Now(), initialTime: processorTime(), closed: closed}
}

// Done counts one instruction. It returns a closed channel if a limit is exceeded, and otherwise the channel of the
// wrapped context.
func (l *scriptLimiter) Done() <-chan struct{} {
	l.steps++
	switch {
	case l.err != nil:
		return l.closed
	case l.steps > maxSteps:
		l.err = errSteps
		return l.closed
	case l.steps%checkInterval != 0:
		return l.Context.Done()
	case l.exceedsMemory():
		l.err = errMemory
		return l.closed
	case l.exceedsTime():
		l.err = errTime
		return l.closed
	default:
		return l.Context.Done()
	}
}

// exceedsTime returns true if the process has used more than scriptTimeout of processor time since the start. Waiting
// for a processor does not count.
func (l *scriptLimiter) exceedsTime() bool {
	return time.Since(l.start) > scriptTimeout && processorTime()-l.initialTime > scriptTimeout
}

// exceedsMemory returns true if live objects have grown too much. When the heap reaches maxMemory, it runs the garbage
// collector and then allows half of maxMemory, so that collections are rare.
func (l *scriptLimiter) exceedsMemory() bool {
	if heapSize() <= l.initialHeap+maxMemory {
		return false
	}
	runtime.GC()
	return heapSize() > l.initialHeap+maxMemory/2
}

// Err returns the error of the exceeded limit or of the wrapped context, nil if there is none.
func (l *scriptLimiter) Err() error {
	return cmp.Or(l.err, l.Context.Err())
}

func heapSize() uint64 {
	sample := []metrics.Sample{{Name: heapMetric}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}
