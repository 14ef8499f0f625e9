package localkube

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// namespaceDir is where ip-netns(8) keeps the network namespaces that have a name.
const namespaceDir = "/run/netns"

// Network is a network namespace, by the name that `ip netns` knows it by. The empty name is the one that this process is in.
type Network string

// Command returns a command that runs a program in the network. It is to be started and waited for as if it were of exec.CommandContext:
// `ip netns exec` replaces itself with the program, so that signals reach it. The context kills the program when it ends.
func (n Network) Command(ctx context.Context, program string, args ...string) *exec.Cmd {
	program, args = n.wrap(program, args)
	return exec.CommandContext(ctx, program, args...)
}

func (n Network) wrap(program string, args []string) (string, []string) {
	if n == "" {
		return program, args
	}
	return "ip", append([]string{"netns", "exec", string(n), program}, args...)
}

// Dial opens a connection from within the network. The address holds an IP address and no name.
func (n Network) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	var (
		dialer net.Dialer
		conn   net.Conn
	)
	err := n.within(func() (err error) {
		conn, err = dialer.DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// Listen opens a listener within the network. The address holds an IP address and no name. What is accepted from it may be used anywhere.
func (n Network) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	var (
		config   net.ListenConfig
		listener net.Listener
	)
	err := n.within(func() (err error) {
		listener, err = config.Listen(ctx, network, address)
		return err
	})
	return listener, err
}

// within runs do on a thread that is in the network. A socket stays in the network that it was opened in.
func (n Network) within(do func() error) error {
	if n == "" {
		return do()
	}
	there, err := os.Open(filepath.Join(namespaceDir, string(n)))
	if err != nil {
		return fmt.Errorf("open network %s: %w", n, err)
	}
	defer func() { _ = there.Close() }()
	runtime.LockOSThread()
	here, err := os.Open(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()))
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open own network: %w", err)
	}
	defer func() { _ = here.Close() }()
	if err := unix.Setns(int(there.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter network %s: %w", n, err)
	}
	err = do()
	if back := unix.Setns(int(here.Fd()), unix.CLONE_NEWNET); back != nil {
		// The thread stays locked, so that it ends with this goroutine and nobody else is put into the wrong network.
		return errors.Join(err, fmt.Errorf("leave network %s: %w", n, back))
	}
	runtime.UnlockOSThread()
	return err
}
