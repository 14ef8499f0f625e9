package chaos

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/towline/towline/internal/localkube"
)

// restartPause is the time after which a program that ended is started again, as its Deployment would.
const restartPause = 500 * time.Millisecond

// process is a program that is started again whenever it ends.
type process struct {
	name   string
	start  func() *exec.Cmd
	cancel context.CancelFunc
	done   chan struct{}

	// mu guards the fields below.
	mu     sync.Mutex
	cmd    *exec.Cmd
	output tailBuffer
	starts int
}

// run starts a program and keeps it running until stop or the end of the test.
func run(t *testing.T, name string, env []string, program string, args ...string) *process {
	t.Helper()
	binary := binaryPath(t, program)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	p := &process{name: name, cancel: cancel, done: make(chan struct{})}
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
		p.cmd = cmd
		p.starts++
		p.mu.Unlock()
		if err == nil {
			_ = cmd.Wait() // it is killed on purpose
		}
		select {
		case <-ctx.Done():
		case <-time.After(restartPause):
		}
	}
}

// kill is kill -9. The process is started again.
func (p *process) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd != nil && p.cmd.Process != nil {
		_ = p.cmd.Process.Kill() // an error means that it has ended
	}
}

// stop kills the process for good.
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
