package check

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/metrics"
)

const (
	// stepLimit is how many instructions a script may take: one over 10,000 objects takes some hundred thousand.
	stepLimit = 5_000_000
	// memoryLimit is by how much the memory of our process may grow, in bytes, while a script runs: a quarter of what an agent may have.
	// stepsPerLook is how often to look.
	memoryLimit  = 128 << 20
	stepsPerLook = 32
	// heapMetric is the memory that objects take.
	heapMetric = "/memory/classes/heap/objects:bytes"
)

// The limits that a script can run into.
var (
	errTime   = fmt.Errorf("the script took longer than %s", scriptLimit)
	errSteps  = fmt.Errorf("the script took more than %d steps", stepLimit)
	errMemory = errors.New("the script took too much memory")
)

// meter is the context of one script. The interpreter asks it before every instruction whether it is done, which is how it counts. It is
// used by the interpreter's own goroutine only.
type meter struct {
	// The interpreter takes its limits as a context, so this is one.
	context.Context //nolint:containedctx // see above

	steps int
	start uint64
	over  chan struct{} // closed
	err   error
}

var _ context.Context = (*meter)(nil)

func newMeter(ctx context.Context) *meter {
	over := make(chan struct{})
	close(over)
	return &meter{Context: ctx, start: heap(), over: over}
}

// Done counts one instruction.
func (m *meter) Done() <-chan struct{} {
	m.steps++
	switch {
	case m.err != nil:
		return m.over
	case m.steps > stepLimit:
		m.err = errSteps
		return m.over
	case m.steps%stepsPerLook == 0 && m.grown():
		m.err = errMemory
		return m.over
	default:
		return m.Context.Done()
	}
}

// grown says whether the script took too much memory. What is garbage, others' too, does not count; that is found out only as often as half
// of the limit is taken.
func (m *meter) grown() bool {
	if heap() <= m.start+memoryLimit {
		return false
	}
	runtime.GC()
	return heap() > m.start+memoryLimit/2
}

// Err says which limit was met.
func (m *meter) Err() error {
	if m.err == nil && m.Context.Err() != nil {
		return errTime
	}
	return m.err
}

func heap() uint64 {
	sample := []metrics.Sample{{Name: heapMetric}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}
