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

// NetworksVariable is the environment variable that, set to "required", makes a test fail and not skip where it cannot have network
// namespaces.
const NetworksVariable = "TOWLINE_NETWORKS"

// networkPrefix begins the name of every network that a test made. The id of the test's process follows, and then what makes it unique.
const networkPrefix = "towline-"

// NetworkForTest makes a network namespace whose only device is its loopback device. It is removed, with all its other devices, when the test
// ends. Where the machine or the user may not have one, or one of the programs is missing that the test says it needs there, the test is
// skipped.
func NetworkForTest(t testing.TB, programs ...string) Network {
	t.Helper()
	for _, program := range append([]string{"ip"}, programs...) {
		if _, err := exec.LookPath(program); err != nil {
			withoutNetwork(t, err)
		}
	}
	removeStaleNetworks(t)
	name := networkPrefix + strconv.Itoa(os.Getpid()) + "-" + strings.ToLower(rand.Text()[:8])
	if err := ip(t, "netns", "add", name); err != nil {
		withoutNetwork(t, err)
	}
	t.Cleanup(func() {
		if err := ip(t, "netns", "delete", name); err != nil {
			t.Error(err)
		}
	})
	// Some sandboxes let one make a namespace and not enter it.
	if err := ip(t, "netns", "exec", name, "ip", "link", "set", "lo", "up"); err != nil {
		withoutNetwork(t, err)
	}
	return Network(name)
}

// withoutNetwork ends the test.
func withoutNetwork(t testing.TB, reason error) {
	t.Helper()
	if os.Getenv(NetworksVariable) == "required" {
		t.Fatalf("no network namespaces: %v", reason)
	}
	t.Skipf("this machine has no network namespaces for us: %v", reason)
}

// removeStaleNetworks removes what test processes left that were killed.
func removeStaleNetworks(t testing.TB) {
	t.Helper()
	entries, err := os.ReadDir(namespaceDir)
	if err != nil {
		return // there is none at all
	}
	for _, entry := range entries {
		rest, ours := strings.CutPrefix(entry.Name(), networkPrefix)
		number, _, _ := strings.Cut(rest, "-")
		pid, err := strconv.Atoi(number)
		if !ours || err != nil || !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			continue
		}
		if err := ip(t, "netns", "delete", entry.Name()); err != nil {
			t.Logf("remove the network of a dead test process: %v", err) // another test process may have been faster
		}
	}
}

func ip(t testing.TB, args ...string) error {
	out, err := exec.CommandContext(context.WithoutCancel(t.Context()), "ip", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}
