// Command localkube runs one Kubernetes control plane and one simulated node in one process, until it is told to stop.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/towline/towline/localkube/internal/controlplane"
	"github.com/towline/towline/localkube/internal/node"
	_ "github.com/towline/towline/localkube/internal/queuemetrics"
	"github.com/towline/towline/localkube/internal/quiet"
	"github.com/towline/towline/localkube/internal/release"
)

// startLimit is how long the control plane may take to become ready; on two idle cores it takes about three seconds.
const startLimit = 5 * time.Minute

// stopLimit is how long the control plane may take to stop once the processes of its pods are gone.
const stopLimit = 800 * time.Millisecond

// settings are what the command line says.
type settings struct {
	dir        string
	name       string
	port       int
	bind       net.IP
	advertise  net.IP
	kubeconfig string
	exec       map[string]string
	processors int
	lifeline   bool
	temporary  bool
}

func main() {
	quiet.End()
	useHugePages()
	os.Exit(start()) //nolint:forbidigo // this is a command
}

// start returns the exit code: 0 after a stop that was asked for, 1 after a failure, 2 for wrong arguments.
func start() int {
	s, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "localkube:", err)
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if s.lifeline {
		ctx = untilEOF(ctx, os.Stdin)
	}
	if s.processors > 0 {
		runtime.GOMAXPROCS(s.processors)
	}
	if err := run(ctx, s); err != nil {
		fmt.Fprintln(os.Stderr, "localkube:", err)
		return 1
	}
	return 0
}

func parse(args []string) (settings, error) {
	s := settings{exec: map[string]string{}}
	flags := flag.NewFlagSet("localkube", flag.ContinueOnError)
	flags.StringVar(&s.dir, "dir", "", "directory for data, certificates and logs; made if missing")
	flags.StringVar(&s.name, "name", "local", "name of the cluster, of its node and of the kubeconfig's context")
	flags.IntVar(&s.port, "port", 0, "port of the API server; 0 picks a free one")
	flags.Func("bind-address", "`IP` that the API server listens on; 0.0.0.0 means all of this network namespace (default 127.0.0.1)", address(&s.bind))
	flags.Func("advertise", "`IP` that clients are told to use (default the --bind-address, or 127.0.0.1 if that means all)", address(&s.advertise))
	flags.StringVar(&s.kubeconfig, "kubeconfig", "", "file for the administrator's kubeconfig, written when the cluster is ready (default DIR/kubeconfig)")
	flags.IntVar(&s.processors, "processors", 0, "maximum `number` of processors to use at the same time (default all)")
	flags.BoolVar(&s.lifeline, "lifeline", false, "stop when standard input ends")
	flags.BoolVar(&s.temporary, "temporary", false, "remove the data directory when stopping")
	flags.Func("exec", "`image=path`: run containers of this image as processes of the program at path; may be repeated", func(value string) error {
		image, path, ok := strings.Cut(value, "=")
		if !ok || image == "" || path == "" {
			return errors.New("want image=path")
		}
		absolute, err := filepath.Abs(path)
		s.exec[image] = absolute
		return err
	})
	if err := flags.Parse(args); err != nil {
		return s, err
	}
	if flags.NArg() > 0 {
		return s, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if s.dir == "" {
		return s, errors.New("--dir is required")
	}
	if s.processors < 0 {
		return s, fmt.Errorf("--processors %d: want a positive number, or 0 for all", s.processors)
	}
	if problems := validation.IsDNS1123Subdomain(s.name); len(problems) > 0 {
		return s, fmt.Errorf("--name %q: %s", s.name, strings.Join(problems, "; "))
	}
	var err error
	if s.dir, err = filepath.Abs(s.dir); err != nil {
		return s, err
	}
	if s.kubeconfig == "" {
		s.kubeconfig = filepath.Join(s.dir, "kubeconfig")
	}
	s.kubeconfig, err = filepath.Abs(s.kubeconfig)
	return s, err
}

// address parses the IP address of a flag.
func address(into *net.IP) func(string) error {
	return func(value string) error {
		ip := net.ParseIP(value)
		if ip == nil {
			return errors.New("want an IP address")
		}
		*into = ip
		return nil
	}
}

// untilEOF returns a context that ends with ctx or when r does.
func untilEOF(ctx context.Context, r io.Reader) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		defer cancel()
		// Whatever ends the stream, the parent at its other end is gone.
		_, _ = io.Copy(io.Discard, r)
	}()
	return ctx
}

// run prepares the data directory, becomes the cluster, and tidies up.
func run(ctx context.Context, s settings) error {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return fmt.Errorf("make data directory: %w", err)
	}
	if err := os.Chdir(s.dir); err != nil {
		return fmt.Errorf("enter data directory: %w", err)
	}
	log, err := os.OpenFile(libraryLog, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	// The end of the process closes it as well.
	defer func() { _ = log.Close() }()
	redirectLogs(log)
	if err := release.Set(); err != nil {
		return err
	}
	if err := runCluster(ctx, s, log); err != nil {
		return fmt.Errorf("%w (see also %s)", err, filepath.Join(s.dir, libraryLog))
	}
	if s.temporary {
		if err := os.RemoveAll(s.dir); err != nil {
			return fmt.Errorf("remove data directory: %w", err)
		}
	}
	return nil
}

// runCluster runs the control plane and the node until ctx ends.
func runCluster(ctx context.Context, s settings, log io.Writer) error {
	starting, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	plane, err := controlplane.Start(starting, controlplane.Options{
		Name: s.name, Dir: s.dir, Port: s.port, Bind: s.bind, Advertise: s.advertise, Log: log,
	})
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return err
	}
	running, end := context.WithCancel(ctx)
	defer end()
	nodeEnded, err := startNode(running, s, plane)
	if err != nil {
		return err
	}
	if err := plane.WriteKubeconfig(s.kubeconfig); err != nil {
		return err
	}
	var failure error
	select {
	case <-ctx.Done():
	case <-plane.Finished():
		failure = fmt.Errorf("run API server: %w", plane.Err())
	case err := <-nodeEnded:
		return err
	}
	// First the processes of pods, whose last words may be for the API server.
	end()
	stopping, done := context.WithTimeout(context.WithoutCancel(ctx), stopLimit)
	defer done()
	failure = errors.Join(failure, <-nodeEnded)
	plane.Stop(stopping)
	return failure
}

// startNode registers the node and runs it until ctx ends; what it returns then comes out of the channel.
func startNode(ctx context.Context, s settings, plane *controlplane.Plane) (<-chan error, error) {
	ca, err := plane.CA()
	if err != nil {
		return nil, err
	}
	host, port, err := net.SplitHostPort(plane.Address())
	if err != nil {
		return nil, fmt.Errorf("split API server address: %w", err)
	}
	if err := os.MkdirAll(filepath.Join(s.dir, "pods"), 0o700); err != nil {
		return nil, fmt.Errorf("make directory for pods: %w", err)
	}
	local := node.New(node.Options{
		Name: s.name, Dir: s.dir, Client: plane.Client(), Exec: s.exec, Host: host, Port: port, CA: ca,
	})
	if err := local.Register(ctx); err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- local.Run(ctx) }()
	return ended, nil
}
