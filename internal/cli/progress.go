package cli

import (
	"sync"
	"time"

	"github.com/towline/towline/internal/cli/command"
)

const (
	// firstProgress is the time until the current step is printed for the first time.
	firstProgress = 2 * time.Second
	// nextProgress is the time after which the current step is printed again.
	nextProgress = 10 * time.Second
)

// progress prints the current step of a command on standard error: when the step changes, and again while it takes
// long.
type progress struct {
	streams  command.Streams
	started  time.Time
	ticker   *time.Ticker
	stopped  chan struct{}
	printing sync.WaitGroup

	// mu guards step. Lines are printed under it, so that they do not mix.
	mu   sync.Mutex
	step string
}

// startProgress starts a progress with a first step, which is printed only if it takes long. The caller must call
// stop.
func startProgress(streams command.Streams, step string) *progress {
	p := &progress{
		streams: streams, started: time.Now(), ticker: time.NewTicker(firstProgress), stopped: make(chan struct{}), step: step,
	}
	p.printing.Go(func() {
		for {
			select {
			case <-p.ticker.C:
				p.printStep()
				p.ticker.Reset(nextProgress)
			case <-p.stopped:
				return
			}
		}
	})
	return p
}

// setStep sets the current step, and prints it if it has changed.
func (p *progress) setStep(step string) {
	p.mu.Lock()
	changed := p.step != step
	p.step = step
	p.mu.Unlock()
	if changed {
		p.ticker.Reset(nextProgress)
		p.printStep()
	}
}

// printLine prints a line once and without the time, such as a line that Karmada documents.
func (p *progress) printLine(line string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ticker.Reset(nextProgress)
	p.streams.PrintErr("%s", line)
}

// printStep prints the current step and the time since the start.
func (p *progress) printStep() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.streams.PrintErr("%s (%.0f s)", p.step, time.Since(p.started).Seconds())
}

// stop stops printing. Nothing is printed after it returns.
func (p *progress) stop() {
	p.ticker.Stop()
	close(p.stopped)
	p.printing.Wait()
}
