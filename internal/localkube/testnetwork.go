package localkube

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// NetworksVariable is an environment variable. If it is "required", NetworkForTest fails the test where it would skip
// it.
const NetworksVariable = "TOWLINE_NETWORKS"

// networkPrefix is the prefix of the names of networks for tests. The process ID of the test and a random part follow.
const networkPrefix = "towline-"

// NetworkForTest creates a network namespace with only a loopback device, and deletes it with all its devices when the
// test ends. It skips the test if network namespaces are not available, or a program that the test needs is missing.
func NetworkForTest(t testing.TB, programs ...string) Network {
	t.Helper()
	for _, program := range append([]string{"ip"}, programs...) {
		if _, err := exec.LookPath(program); err != nil {
			skipOrFail(t, err)
		}
	}
	removeStaleNetworks(t)
	name := networkPrefix + strconv.Itoa(os.Getpid()) + "-" + strings.ToLower(rand.Text()[:8])
	if err := runIP(t, "netns", "add", name); err != nil {
		skipOrFail(t, err)
	}
	t.Cleanup(func() {
		if err := runIP(t, "netns", "delete", name); err != nil {
			t.Error(err)
		}
	})
	// Some sandboxes let a user create a namespace, but not enter it.
	if err := runIP(t, "netns", "exec", name, "ip", "link", "set", "lo", "up"); err != nil {
		skipOrFail(t, err)
	}
	return Network(name)
}

// skipOrFail skips or fails the test.
func skipOrFail(t testing.TB, reason error) {
	t.Helper()
	if os.Getenv(NetworksVariable) == "required" {
		t.Fatalf("network namespaces are not available: %v", reason)
	}
	t.Skipf("network namespaces are not available: %v", reason)
}

// removeStaleNetworks deletes the networks of test processes that were killed.
func removeStaleNetworks(t testing.TB) {
	t.Helper()
	entries, err := os.ReadDir(namespaceDir)
	if err != nil {
		return // no network was ever created
	}
	for _, entry := range entries {
		rest, isTestNetwork := strings.CutPrefix(entry.Name(), networkPrefix)
		number, _, _ := strings.Cut(rest, "-")
		pid, err := strconv.Atoi(number)
		if !isTestNetwork || err != nil || !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			continue
		}
		if err := runIP(t, "netns", "delete", entry.Name()); err != nil {
			t.Logf("remove the network of a dead test process: %v", err) // another test process may have been faster
		}
	}
}

func runIP(t testing.TB, args ...string) error {
	out, err := exec.CommandContext(context.WithoutCancel(t.Context()), "ip", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}
