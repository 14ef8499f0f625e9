package localkube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	// stopTimeout is how long a control plane may take to stop before it is killed. It needs about two seconds.
	stopTimeout = 15 * time.Second
	// readyPollInterval is the time between two checks for the kubeconfig of a ready control plane.
	readyPollInterval = 20 * time.Millisecond
	// maxLog is the maximum number of bytes that Log returns.
	maxLog = 4096
)

// Options configure a control plane.
type Options struct {
	// Name is the name of the cluster, of its only node and of the context in its kubeconfig. Default: "local".
	Name string
	// Dir is the directory for all files of the control plane. A later start with the same directory has the same
	// objects. Default: a temporary directory, which Stop deletes.
	Dir string
	// Port is the port of the API server. 0 selects a free one.
	Port int
	// Address is the IP address of the API server. Default: "127.0.0.1".
	Address string
	// Network is the network of the control plane and of the processes of its pods. It must exist with its loopback
	// device up while they run. Default: the network of this process.
	Network Network
	// Exec maps container images to programs. A container of such an image runs as a process of the program. Containers
	// of other images do nothing and are reported as running.
	Exec map[string]string
	// Processors is the maximum number of processors that the control plane uses at the same time, not counting the
	// processes of its pods. Default: all.
	Processors int
	// Binary is the path of the program localkube. Default: the result of the function Binary.
	Binary string
}

// Plane is a control plane in its own process. The process ends with Stop or Kill, and also when the process that
// started it ends for any reason.
type Plane struct {
	// Name, Dir and Kubeconfig are the name, the data directory and the administrator's kubeconfig file. Containers of
	// exec images log to Dir/pods/<namespace>_<pod>_<container>.log.
	Name, Dir, Kubeconfig string
	// Config is the administrator's client configuration, without a rate limit. It connects from any network. Copy it
	// before changing it.
	Config *rest.Config

	opts            Options
	hasTemporaryDir bool

	// mu guards process, and admits one of Stop, Kill and Restart at a time.
	mu      sync.Mutex
	process *process
}

// process is one run of the program localkube.
type process struct {
	cmd      *exec.Cmd
	lifeline io.Closer
	// done is closed when the process has ended; err is its exit error then.
	done chan struct{}
	err  error
}

// Start starts a control plane and waits until it is ready: the API server answers, and namespaces get their
// ServiceAccounts. If ctx ends before, Start kills it and returns an error with the end of its log. If ctx ends later,
// the control plane continues to run.
func Start(ctx context.Context, opts Options) (*Plane, error) {
	p := &Plane{opts: opts}
	if p.opts.Name == "" {
		p.opts.Name = "local"
	}
	if p.opts.Binary == "" {
		binary, err := Binary("localkube")
		if err != nil {
			return nil, err
		}
		p.opts.Binary = binary
	}
	if p.opts.Dir == "" {
		dir, err := os.MkdirTemp("", "localkube-"+p.opts.Name+"-")
		if err != nil {
			return nil, fmt.Errorf("create the directory of control plane %s: %w", p.opts.Name, err)
		}
		p.opts.Dir, p.hasTemporaryDir = dir, true
	}
	dir, err := filepath.Abs(p.opts.Dir)
	if err != nil {
		return nil, fmt.Errorf("resolve the directory of control plane %s: %w", p.opts.Name, err)
	}
	p.Name, p.Dir, p.Kubeconfig = p.opts.Name, dir, filepath.Join(dir, "kubeconfig")
	if err := p.start(ctx); err != nil {
		if p.hasTemporaryDir {
			err = errors.Join(err, os.RemoveAll(dir))
		}
		return nil, err
	}
	return p, nil
}

// start is Start with the options and the directory of p. The caller holds mu, or no other goroutine has p yet.
func (p *Plane) start(ctx context.Context) error {
	if err := os.MkdirAll(p.Dir, 0o700); err != nil {
		return fmt.Errorf("start control plane %s: %w", p.Name, err)
	}
	// awaitReady waits until the new control plane writes the file.
	if err := os.Remove(p.Kubeconfig); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("start control plane %s: %w", p.Name, err)
	}
	launched, err := p.launch()
	if err != nil {
		return fmt.Errorf("start control plane %s: %w", p.Name, err)
	}
	if err := p.awaitReady(ctx, launched); err != nil {
		launched.kill()
		return fmt.Errorf("start control plane %s: %w\n%s", p.Name, err, p.Log())
	}
	p.process = launched
	return nil
}

// launch runs the program with a pipe as standard input: the lifeline, which breaks when this process ends.
func (p *Plane) launch() (*process, error) {
	args := []string{
		"--lifeline", "--dir", p.Dir, "--name", p.Name, "--port", strconv.Itoa(p.opts.Port), "--kubeconfig", p.Kubeconfig,
	}
	if p.hasTemporaryDir {
		args = append(args, "--temporary")
	}
	if p.opts.Processors > 0 {
		args = append(args, "--processors", strconv.Itoa(p.opts.Processors))
	}
	if p.opts.Address != "" {
		args = append(args, "--bind-address", p.opts.Address)
	}
	for image, program := range p.opts.Exec {
		args = append(args, "--exec", image+"="+program)
	}
	log, err := os.OpenFile(p.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	// The child has its own descriptor.
	defer func() { _ = log.Close() }()
	program, args := p.opts.Network.wrap(p.opts.Binary, args)
	cmd := exec.Command(program, args...) //nolint:noctx // the control plane outlives the context of its start
	cmd.Stdout, cmd.Stderr = log, log
	// In its own process group, it gets no signal when the user presses Ctrl-C: this process stops it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	lifeline, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	launched := &process{cmd: cmd, lifeline: lifeline, done: make(chan struct{})}
	go func() {
		defer close(launched.done)
		launched.err = cmd.Wait()
	}()
	return launched, nil
}

// awaitReady waits for the kubeconfig, and sets the client configuration and the port of p from it.
func (p *Plane) awaitReady(ctx context.Context, launched *process) error {
	ticker := time.NewTicker(readyPollInterval)
	defer ticker.Stop()
	for {
		if _, err := os.Stat(p.Kubeconfig); err == nil {
			break
		}
		select {
		case <-ticker.C:
		case <-launched.done:
			return fmt.Errorf("the process ended: %w", errors.Join(launched.err, errors.New("not ready yet")))
		case <-ctx.Done():
			return fmt.Errorf("wait until it is ready: %w", context.Cause(ctx))
		}
	}
	config, err := clientcmd.BuildConfigFromFlags("", p.Kubeconfig)
	if err != nil {
		return fmt.Errorf("read its kubeconfig: %w", err)
	}
	server, err := url.Parse(config.Host)
	if err != nil {
		return fmt.Errorf("read its address: %w", err)
	}
	if p.opts.Port, err = strconv.Atoi(server.Port()); err != nil {
		return fmt.Errorf("read its port: %w", err)
	}
	if p.Config == nil {
		config.QPS = -1
		if p.opts.Network != "" {
			config.Dial = p.opts.Network.Dial
		}
		p.Config = config
	}
	return nil
}

// Network returns the network of the control plane, "" for the network of this process.
func (p *Plane) Network() Network { return p.opts.Network }

// Port returns the port of the API server. A restart does not change it.
func (p *Plane) Port() int { return p.opts.Port }

// Log returns the end of the control plane's log, which has only errors; "" if it cannot be read.
func (p *Plane) Log() string {
	text, err := os.ReadFile(p.logFile())
	if err != nil {
		return ""
	}
	return string(text[max(0, len(text)-maxLog):])
}

func (p *Plane) logFile() string { return filepath.Join(p.Dir, "localkube.log") }

// Stop ends the control plane and the processes of its pods, and waits until they have ended. It deletes a temporary
// Dir. In another Dir, the objects stay. A second Stop does nothing.
func (p *Plane) Stop() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	err := p.stop()
	if p.hasTemporaryDir {
		err = errors.Join(err, os.RemoveAll(p.Dir))
	}
	return err
}

// stop ends the process gracefully if it runs. The caller holds mu.
func (p *Plane) stop() error {
	if p.process == nil {
		return nil
	}
	current := p.process
	p.process = nil
	defer func() { _ = current.lifeline.Close() }()
	// The only possible error is that the process has ended, which the select handles.
	_ = current.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-current.done:
	case <-time.After(stopTimeout):
		current.kill()
		return fmt.Errorf("stop control plane %s: it did not stop within %s and was killed", p.Name, stopTimeout)
	}
	if current.err != nil {
		return fmt.Errorf("stop control plane %s: %w\n%s", p.Name, current.err, p.Log())
	}
	return nil
}

// Kill ends the control plane like kill -9, and waits until it has ended. Its objects stay in Dir. Kill does nothing
// after Stop or Kill.
func (p *Plane) Kill() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.process != nil {
		p.process.kill()
		p.process = nil
	}
	return nil
}

// killRunning is Kill, with an error if the control plane has ended by itself before.
func (p *Plane) killRunning() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.process == nil {
		return nil
	}
	current := p.process
	p.process = nil
	current.kill()
	if status, ok := current.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signal() == syscall.SIGKILL {
		return nil
	}
	return fmt.Errorf("control plane %s ended by itself: %s\n%s", p.Name, current.cmd.ProcessState, p.Log())
}

// kill kills the process if it runs, and waits until it has ended.
func (p *process) kill() {
	// The only possible error is that the process has ended.
	_ = p.cmd.Process.Kill()
	<-p.done
	_ = p.lifeline.Close()
}

// Restart stops the control plane if it runs, starts it with the same objects and port, and waits until it is ready. It
// must not be called after Stop if Dir is temporary.
func (p *Plane) Restart(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	// After SIGTERM, the program would delete a temporary directory.
	if p.hasTemporaryDir && p.process != nil {
		p.process.kill()
		p.process = nil
	}
	if err := p.stop(); err != nil {
		return err
	}
	return p.start(ctx)
}
