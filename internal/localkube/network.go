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

// namespaceDir is the directory in which ip-netns(8) keeps named network namespaces.
const namespaceDir = "/run/netns"

// Network is the name of a network namespace, as `ip netns` lists it. The empty name is the network of this process.
type Network string

// Command is exec.CommandContext for a program in the network. `ip netns exec` replaces itself with the program, so
// signals reach the program.
func (n Network) Command(ctx context.Context, program string, args ...string) *exec.Cmd {
	program, args = n.wrap(program, args)
	return exec.CommandContext(ctx, program, args...)
}

// wrap returns the command line that runs program in the network.
func (n Network) wrap(program string, args []string) (string, []string) {
	if n == "" {
		return program, args
	}
	return "ip", append([]string{"netns", "exec", string(n), program}, args...)
}

// Dial opens a connection from within the network. The host in address must be an IP address, not a name.
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

// Listen opens a listener within the network. The host in address must be an IP address, not a name. The listener works
// in all goroutines.
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

// within calls do on a thread in the network. A socket that do opens stays in the network.
func (n Network) within(do func() error) error {
	if n == "" {
		return do()
	}
	target, err := os.Open(filepath.Join(namespaceDir, string(n)))
	if err != nil {
		return fmt.Errorf("open network %s: %w", n, err)
	}
	defer func() { _ = target.Close() }()
	runtime.LockOSThread()
	own, err := os.Open(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()))
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open own network: %w", err)
	}
	defer func() { _ = own.Close() }()
	if err := unix.Setns(int(target.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter network %s: %w", n, err)
	}
	err = do()
	if backErr := unix.Setns(int(own.Fd()), unix.CLONE_NEWNET); backErr != nil {
		// The thread stays locked. It ends with this goroutine, so that no other goroutine runs in the wrong network.
		return errors.Join(err, fmt.Errorf("leave network %s: %w", n, backErr))
	}
	runtime.UnlockOSThread()
	return err
}
