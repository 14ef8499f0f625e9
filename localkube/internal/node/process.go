package node

import (
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// process is a running child process.
type process struct {
	cmd *exec.Cmd
	// done is closed when the process has ended and been waited for.
	done chan struct{}
}

// startProcess starts cmd in a process group of its own. The process is killed if this one dies, even of SIGKILL.
func startProcess(cmd *exec.Cmd) (*process, error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	p := &process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// Linux sends Pdeathsig when the thread dies that started the process, not when its last thread does (prctl(2),
		// golang.org/issue/27505): this goroutine keeps the thread for itself as long as the process lives.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		defer close(p.done)
		// Its error repeats the state of the process.
		_ = cmd.Wait()
		p.signal(syscall.SIGKILL)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// stop asks the process to end, kills it after grace, and returns when it is gone.
func (p *process) stop(grace time.Duration) {
	p.signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(grace):
		p.signal(syscall.SIGKILL)
		<-p.done
	}
}

// signal reaches the process and all that it started. The only error is that they are gone.
func (p *process) signal(signal syscall.Signal) { _ = syscall.Kill(-p.cmd.Process.Pid, signal) }

// result returns the exit code of a process that is done, as a shell counts them, and what ended it if it was not 0.
func (p *process) result() (code int32, reason string) {
	state := p.cmd.ProcessState
	if status, ok := state.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int32(status.Signal()), state.String()
	}
	if state.ExitCode() == 0 {
		return 0, ""
	}
	return int32(state.ExitCode()), state.String()
}
