package chaos

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/towline/towline/internal/localkube"
)

// restartPause is the time before a program that has ended is started again, as its Deployment would.
const restartPause = 500 * time.Millisecond

// process is a program that is started again whenever it ends.
type process struct {
	name   string
	isHub  bool
	start  func() *exec.Cmd
	cancel context.CancelFunc
	done   chan struct{}

	// mu guards the fields below.
	mu       sync.Mutex
	cmd      *exec.Cmd
	isKilled bool // the test has killed cmd
	output   tailBuffer
	starts   int
	ends     []error // unexpected ends
}

// run starts a program and keeps it running until stop or the end of the test.
func run(t *testing.T, name string, env []string, program string, args ...string) *process {
	t.Helper()
	binary := binaryPath(t, program)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	p := &process{name: name, isHub: name == "hub", cancel: cancel, done: make(chan struct{})}
	p.start = func() *exec.Cmd {
		cmd := exec.CommandContext(ctx, binary, args...)
		cmd.Env = append(os.Environ(), env...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		cmd.Stdout, cmd.Stderr = &p.output, &p.output
		return cmd
	}
	go p.keepRunning(ctx)
	t.Cleanup(func() {
		p.stop()
		if t.Failed() {
			t.Logf("output of %s, which was started %d times:\n%s", name, p.starts, p.output.String())
		}
	})
	return p
}

func (p *process) keepRunning(ctx context.Context) {
	defer close(p.done)
	for ctx.Err() == nil {
		cmd := p.start()
		p.mu.Lock()
		err := cmd.Start()
		p.cmd, p.isKilled = cmd, false
		p.starts++
		p.mu.Unlock()
		if err == nil {
			_ = cmd.Wait() // the state has the reason
			p.recordEnd(ctx, cmd.ProcessState)
		}
		select {
		case <-ctx.Done():
		case <-time.After(restartPause):
		}
	}
}

// recordEnd records the reason for which a process has ended, unless the test has stopped it.
func (p *process) recordEnd(ctx context.Context, state *os.ProcessState) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.unexpectedEnd(state, p.isKilled, p.output.String()); err != nil && ctx.Err() == nil {
		p.ends = append(p.ends, err)
	}
}

// check returns an error if the process has crashed.
func (p *process) check() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return errors.Join(p.ends...)
}

// kill is kill -9. The process is started again.
func (p *process) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd != nil && p.cmd.Process != nil {
		p.isKilled = true
		_ = p.cmd.Process.Kill() // an error means that it has ended
	}
}

// stop kills the process and does not start it again.
func (p *process) stop() {
	p.cancel()
	<-p.done
}

func binaryPath(t *testing.T, name string) string {
	t.Helper()
	path, err := localkube.Binary(name)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// tailBuffer keeps the end of an output. It is safe for concurrent use.
type tailBuffer struct {
	mu  sync.Mutex // guards buf
	buf bytes.Buffer
}

// maxTail is the number of bytes that a tailBuffer keeps at least.
const maxTail = 20_000

// Write implements io.Writer.
func (b *tailBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.buf.Len() > 4*maxTail {
		b.buf.Next(b.buf.Len() - maxTail)
	}
	return b.buf.Write(p)
}

// String returns the end of the output.
func (b *tailBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	text := b.buf.Bytes()
	return string(text[max(0, len(text)-maxTail):])
}

// unexpectedEnd returns an error if a program has crashed, or a hub has ended for another reason than a lost Lease or
// an API server that does not answer while it starts. The Deployment would start it again in each case.
func (p *process) unexpectedEnd(state *os.ProcessState, isKilled bool, output string) error {
	status, _ := state.Sys().(syscall.WaitStatus)
	lines := strings.Split(strings.TrimSpace(output), "\n")
	last := lines[len(lines)-1]
	switch {
	case status.Signaled() && status.Signal() == syscall.SIGKILL && isKilled:
		return nil
	case status.Signaled() || state.ExitCode() != 1 && p.isHub || state.ExitCode() > 1:
		return fmt.Errorf("%s has crashed: %s\n%s", p.name, state, output)
	case p.isHub && !expectedEnd.MatchString(last):
		return fmt.Errorf("%s has ended: %s", p.name, last)
	default:
		return nil
	}
}

// expectedEnd matches the last line of a hub that has ended by itself for a fault of the test.
var expectedEnd = regexp.MustCompile(`leader election lost|connection refused|connection reset|connection lost|broken pipe|EOF|[Tt]imeout|deadline exceeded|unable to handle|not ready`)

// TestUnexpectedEnd runs programs that end in several ways.
func TestUnexpectedEnd(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		script          string
		isHub, isKilled bool
		output          string
		wantErr         bool
	}{
		"killed by the test":   {script: "kill -9 $$", isHub: true, isKilled: true},
		"killed by others":     {script: "kill -9 $$", isHub: true, wantErr: true},
		"panic":                {script: "exit 2", isHub: true, output: "leader election lost", wantErr: true},
		"panic of an agent":    {script: "exit 2", wantErr: true},
		"abort":                {script: "kill -6 $$", isKilled: true, wantErr: true},
		"end without an error": {script: "exit 0", isHub: true, wantErr: true},
		"lost lead":            {script: "exit 1", isHub: true, output: "x\nError: run the hub: leader election lost\n"},
		"other error":          {script: "exit 1", isHub: true, output: "leader election lost\nError: invalid\n", wantErr: true},
		"agent that ends":      {script: "exit 1"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.CommandContext(t.Context(), "sh", "-c", tc.script)
			_ = cmd.Run() // the state is compared
			err := (&process{name: name, isHub: tc.isHub}).unexpectedEnd(cmd.ProcessState, tc.isKilled, tc.output)
			if (err != nil) != tc.wantErr {
				t.Errorf("got %v, want an error: %t", err, tc.wantErr)
			}
		})
	}
}
