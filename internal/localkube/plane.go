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
	// stopLimit is how long a control plane may take to stop before it is killed. It needs about two seconds.
	stopLimit = 15 * time.Second
	// readyPoll is how often Start looks for the kubeconfig that says the control plane is ready.
	readyPoll = 20 * time.Millisecond
	// logTail is how many bytes of a control plane's errors are quoted.
	logTail = 4096
)

// Options say what to start.
type Options struct {
	// Name names the cluster, its one node and the context in its kubeconfig. Default: "local".
	Name string
	// Dir holds everything the control plane writes. Starting again in the same directory finds the same objects.
	// If it is empty a temporary directory is used, which goes when the control plane stops.
	Dir string
	// Port is the API server's port. 0 picks a free one.
	Port int
	// Address is the IP address that the API server listens on and that the kubeconfig names. Default: "127.0.0.1".
	Address string
	// Network is where the control plane and the processes of its pods run. It must exist as long as they do, with its loopback device up.
	// Default: the network of this process.
	Network Network
	// Exec maps container images to programs. A container of such an image runs as a real process of that program.
	// Containers of other images do nothing and are reported as running.
	Exec map[string]string
	// Binary is the path of the localkube program. If it is empty, it is looked for as Binary does.
	Binary string
}

// Plane is a control plane in a process of its own. That process ends when Stop or Kill is called,
// and also when the process that started it ends, however it ends.
type Plane struct {
	// Name, Dir and Kubeconfig are the name, the data directory and the administrator's kubeconfig file. Containers of the images in
	// Options.Exec log to Dir/pods/<namespace>_<pod>_<container>.log.
	Name, Dir, Kubeconfig string
	// Config connects as administrator, without a limit on requests per second, and from within the control plane's network. Copy it before
	// changing it.
	Config *rest.Config

	opts      Options
	temporary bool

	// mu guards process: one of Stop, Kill and Restart at a time.
	mu      sync.Mutex
	process *process
}

// process is one run of the localkube program.
type process struct {
	cmd      *exec.Cmd
	lifeline io.Closer
	// done is closed when the process has ended and been waited for; err then is its exit error.
	done chan struct{}
	err  error
}

// Start starts a control plane and returns when it is ready: the API server answers and namespaces get their ServiceAccounts.
// If it does not become ready before ctx ends it is killed; the error quotes the end of what it wrote to its standard error.
// The control plane outlives ctx.
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
			return nil, fmt.Errorf("make directory for control plane %s: %w", p.opts.Name, err)
		}
		p.opts.Dir, p.temporary = dir, true
	}
	dir, err := filepath.Abs(p.opts.Dir)
	if err != nil {
		return nil, fmt.Errorf("find directory of control plane %s: %w", p.opts.Name, err)
	}
	p.Name, p.Dir, p.Kubeconfig = p.opts.Name, dir, filepath.Join(dir, "kubeconfig")
	if err := p.start(ctx); err != nil {
		if p.temporary {
			err = errors.Join(err, os.RemoveAll(dir))
		}
		return nil, err
	}
	return p, nil
}

func (p *Plane) start(ctx context.Context) error {
	if err := os.MkdirAll(p.Dir, 0o700); err != nil {
		return fmt.Errorf("start control plane %s: %w", p.Name, err)
	}
	// Its return says that the control plane is ready.
	if err := os.Remove(p.Kubeconfig); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("start control plane %s: %w", p.Name, err)
	}
	running, err := p.launch()
	if err != nil {
		return fmt.Errorf("start control plane %s: %w", p.Name, err)
	}
	if err := p.awaitReady(ctx, running); err != nil {
		running.kill()
		return fmt.Errorf("start control plane %s: %w\n%s", p.Name, err, p.Log())
	}
	p.process = running
	return nil
}

// launch runs the program with a pipe as its standard input: the lifeline that breaks when this process ends.
func (p *Plane) launch() (*process, error) {
	args := []string{
		"--lifeline", "--dir", p.Dir, "--name", p.Name, "--port", strconv.Itoa(p.opts.Port), "--kubeconfig", p.Kubeconfig,
	}
	if p.temporary {
		args = append(args, "--temporary")
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
	// The child has a descriptor of its own.
	defer func() { _ = log.Close() }()
	program, args := p.opts.Network.wrap(p.opts.Binary, args)
	cmd := exec.Command(program, args...) //nolint:noctx // the control plane outlives the context of its start
	cmd.Stdout, cmd.Stderr = log, log
	// A Ctrl-C in the terminal is for the process that started us all; it stops the control plane when it is ready to.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	lifeline, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	running := &process{cmd: cmd, lifeline: lifeline, done: make(chan struct{})}
	go func() {
		defer close(running.done)
		running.err = cmd.Wait()
	}()
	return running, nil
}

// awaitReady waits for the kubeconfig, and learns from it how to connect and on which port.
func (p *Plane) awaitReady(ctx context.Context, running *process) error {
	ticker := time.NewTicker(readyPoll)
	defer ticker.Stop()
	for {
		if _, err := os.Stat(p.Kubeconfig); err == nil {
			break
		}
		select {
		case <-ticker.C:
		case <-running.done:
			return fmt.Errorf("it ended: %w", errors.Join(running.err, errors.New("not ready yet")))
		case <-ctx.Done():
			return fmt.Errorf("wait for it: %w", context.Cause(ctx))
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

// Network returns the network that the control plane runs in, "" for that of this process.
func (p *Plane) Network() Network { return p.opts.Network }

// Port returns the API server's port. It stays the same over restarts.
func (p *Plane) Port() int { return p.opts.Port }

// Log returns the end of what the control plane wrote to its standard error: nothing but errors.
func (p *Plane) Log() string {
	text, err := os.ReadFile(p.logFile())
	if err != nil {
		return ""
	}
	return string(text[max(0, len(text)-logTail):])
}

func (p *Plane) logFile() string { return filepath.Join(p.Dir, "localkube.log") }

// Stop ends the control plane and the processes of its pods, and waits until they are gone. What it stored stays in Dir, unless Dir
// is temporary. Stopping a stopped control plane does nothing.
func (p *Plane) Stop() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	err := p.stop()
	if p.temporary {
		err = errors.Join(err, os.RemoveAll(p.Dir))
	}
	return err
}

func (p *Plane) stop() error {
	if p.process == nil {
		return nil
	}
	running := p.process
	p.process = nil
	defer func() { _ = running.lifeline.Close() }()
	// The only error is that the process has ended already, which is waited for below.
	_ = running.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-running.done:
	case <-time.After(stopLimit):
		running.kill()
		return fmt.Errorf("stop control plane %s: it did not stop within %s and was killed", p.Name, stopLimit)
	}
	if running.err != nil {
		return fmt.Errorf("stop control plane %s: %w\n%s", p.Name, running.err, p.Log())
	}
	return nil
}

// Kill ends the control plane as kill -9 does, and waits until it is gone. What it stored stays in Dir.
// Killing a stopped control plane does nothing.
func (p *Plane) Kill() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.process != nil {
		p.process.kill()
		p.process = nil
	}
	return nil
}

func (r *process) kill() {
	// The only error is that the process has ended already.
	_ = r.cmd.Process.Kill()
	<-r.done
	_ = r.lifeline.Close()
}

// Restart stops the control plane if it runs, and starts it again with the same objects on the same port, ready as after Start.
// It does not work for a temporary directory after Stop, which removes it.
func (p *Plane) Restart(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	// A process that stops in an orderly way would remove a temporary directory.
	if p.temporary && p.process != nil {
		p.process.kill()
		p.process = nil
	}
	if err := p.stop(); err != nil {
		return err
	}
	return p.start(ctx)
}
