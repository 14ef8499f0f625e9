package demo_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/towline/towline/internal/localkube"
)

const (
	// demoLimit is the maximum duration of a demo on cores that it shares with other tests.
	demoLimit = 4 * time.Minute
	// endLimit is the maximum time until the processes of a demo that was killed have ended.
	endLimit = 15 * time.Second
)

// demoProcess is a demo in a process of its own, with its own directory for temporary files.
type demoProcess struct {
	cmd      *exec.Cmd
	dir      string
	out, err *transcript
}

// transcript is the output of a process.
type transcript struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (w *transcript) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.Write(p)
}

func (w *transcript) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.String()
}

// startDemo starts program as a demo whose temporary files are in dir.
func startDemo(t *testing.T, program, dir string, env ...string) *demoProcess {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), demoLimit)
	p := &demoProcess{dir: dir, out: &transcript{}, err: &transcript{}}
	p.cmd = exec.CommandContext(ctx, program, "demo", "--exit")
	p.cmd.Env = append(append(os.Environ(), "TMPDIR="+dir), env...)
	p.cmd.Dir = dir
	p.cmd.Stdout, p.cmd.Stderr = io.Writer(p.out), io.Writer(p.err)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		_ = p.cmd.Wait() // an error if it was waited for before
		if t.Failed() {
			t.Logf("transcript:\n%s\n%s", p.out, p.err)
		}
	})
	return p
}

// exitCode waits for the end of the demo and returns its exit code, -1 if a signal ended it.
func (p *demoProcess) exitCode(t *testing.T) int {
	t.Helper()
	err := p.cmd.Wait()
	exit := &exec.ExitError{}
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return p.cmd.ProcessState.ExitCode()
}

// waitForOutput waits until the output contains text.
func (p *demoProcess) waitForOutput(t *testing.T, text string) {
	t.Helper()
	err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, demoLimit, true, func(context.Context) (bool, error) {
		return strings.Contains(p.out.String(), text), nil
	})
	if err != nil {
		t.Fatalf("wait for the output %q: %v", text, err)
	}
}

// wantNoProcess fails the test if a process that works in the demo's directory outlives limit.
func (p *demoProcess) wantNoProcess(t *testing.T, limit time.Duration) {
	t.Helper()
	var left []string
	err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, limit, true, func(context.Context) (bool, error) {
		left = processes(p.dir)
		return len(left) == 0, nil
	})
	if err != nil {
		t.Errorf("processes left after %s: %v", limit, left)
	}
}

// processes lists the command lines of the processes that have dir in them or in their environment, except our own.
func processes(dir string) []string {
	var found []string
	directories, _ := filepath.Glob("/proc/[0-9]*") // the pattern is right
	for _, process := range directories {
		cmdline, err := os.ReadFile(filepath.Join(process, "cmdline"))
		if err != nil {
			continue // the process has ended
		}
		environment, _ := os.ReadFile(filepath.Join(process, "environ")) // empty for a process that has ended
		if bytes.Contains(cmdline, []byte(dir)) || bytes.Contains(environment, []byte(dir)) {
			found = append(found, filepath.Base(process)+": "+string(bytes.ReplaceAll(cmdline, []byte{0}, []byte{' '})))
		}
	}
	return found
}

func workDirs(t *testing.T, dir string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, "towline-demo-*"))
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// towlinePath returns the path of the program that `make build` writes.
func towlinePath(t *testing.T) string {
	t.Helper()
	program, err := localkube.Binary("towline")
	if err != nil {
		t.Fatal(err)
	}
	return program
}

func TestDemoDeploysAndDeletesStaleDirectories(t *testing.T) {
	dir, program := t.TempDir(), towlinePath(t)
	killed := startDemo(t, program, dir)
	killed.waitForOutput(t, "2/6 Start the hub")
	if err := killed.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if code := killed.exitCode(t); code != -1 {
		t.Errorf("code of a killed demo: got %d", code)
	}
	killed.wantNoProcess(t, endLimit)
	if left := workDirs(t, dir); len(left) != 1 {
		t.Errorf("directories of a killed demo: got %v, want one", left)
	}

	p := startDemo(t, program, dir)
	if code := p.exitCode(t); code != 0 {
		t.Errorf("code: got %d, want 0", code)
	}
	for _, want := range []string{
		"\ncluster01 $ kubectl apply -f ", "\nhub $ kubectl get sveltosclusters -A --show-labels\nNAMESPACE", "\nedge ", "\ncloud ",
		"clusterprofile.config.projectsveltos.io/deploy-hello", "\nhub $ sveltosctl show addons\n", "\ncluster02 $ kubectl get deployments -A\nNAMESPACE",
		"\n== The demo is complete\n",
	} {
		if !strings.Contains(p.out.String(), want) {
			t.Errorf("transcript lacks %q", want)
		}
	}
	p.wantNoProcess(t, endLimit)
	if left := workDirs(t, dir); len(left) != 0 {
		t.Errorf("directories left: %v", left)
	}
}

func TestInterruptedDemoDeletesEverything(t *testing.T) {
	p := startDemo(t, towlinePath(t), t.TempDir())
	p.waitForOutput(t, "3/6 Register cluster01")
	if err := p.cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if code := p.exitCode(t); code != 130 {
		t.Errorf("code: got %d, want 130", code)
	}
	if !strings.Contains(p.err.String(), "error: interrupted: Register cluster01 in pull mode: its agent connects to the hub\n") {
		t.Errorf("errors do not name the step: %q", p.err)
	}
	p.wantNoProcess(t, time.Second)
	if left := workDirs(t, p.dir); len(left) != 0 {
		t.Errorf("directories left: %v", left)
	}
}

func TestDemoFailsWhereAProgramIsMissing(t *testing.T) {
	// Programs in the directory of towline are found first, so that it needs its own directory.
	content, err := os.ReadFile(towlinePath(t))
	if err != nil {
		t.Fatal(err)
	}
	alone := filepath.Join(t.TempDir(), "towline")
	if err := os.WriteFile(alone, content, 0o700); err != nil { //nolint:gosec // a program must be executable
		t.Fatal(err)
	}
	dir := t.TempDir()
	p := startDemo(t, alone, dir, "TOWLINE_BIN=/does/not/exist", "PATH=/does/not/exist")
	if code := p.exitCode(t); code != 1 {
		t.Errorf("code: got %d, want 1", code)
	}
	if !strings.Contains(p.err.String(), "find towline-agent: run `make build` first") {
		t.Errorf("errors: got %q", p.err)
	}
	if left := workDirs(t, dir); len(left) != 0 {
		t.Errorf("directories left: %v", left)
	}
}
