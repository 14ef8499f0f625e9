package localkube_test

import (
	"fmt"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/towline/towline/internal/localkube"
)

// TestPlaneInItsOwnNetwork starts a plane that is reachable only from its network.
func TestPlaneInItsOwnNetwork(t *testing.T) {
	t.Parallel()
	const address = "10.231.0.1"
	network := localkube.NetworkForTest(t)
	if out, err := network.Command(t.Context(), "ip", "address", "add", address+"/32", "dev", "lo").CombinedOutput(); err != nil {
		t.Fatalf("add an address to the network: %v: %s", err, out)
	}
	p := localkube.ForTest(t, localkube.WithNetwork(network, address))
	if want := "https://" + net.JoinHostPort(address, strconv.Itoa(p.Port())); p.Config.Host != want {
		t.Errorf("address: got %s, want %s", p.Config.Host, want)
	}
	if _, err := clientOf(p).CoreV1().Namespaces().Get(t.Context(), "default", metav1.GetOptions{}); err != nil {
		t.Errorf("request from within its network: %v", err)
	}
	if isListening(p.Port()) {
		t.Errorf("port %d of 127.0.0.1 answers outside of its network", p.Port())
	}
	kubectl, err := localkube.Binary("kubectl")
	if err != nil {
		t.Fatal(err)
	}
	cmd := network.Command(t.Context(), kubectl, "--kubeconfig="+p.Kubeconfig, "get", "namespace", "default", "-o", "name")
	if out, err := cmd.CombinedOutput(); err != nil || string(out) != "namespace/default\n" {
		t.Errorf("kubectl in its network: %v: %s", err, out)
	}

	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := p.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := clientOf(p).CoreV1().Namespaces().Get(t.Context(), "default", metav1.GetOptions{}); err != nil {
		t.Errorf("request after kill -9 and a restart: %v", err)
	}
}

// TestNetworkDoesNotMoveThisProcess opens sockets in a network and then one outside.
func TestNetworkDoesNotMoveThisProcess(t *testing.T) {
	t.Parallel()
	network := localkube.NetworkForTest(t)
	inside, err := network.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = inside.Close() })
	for range 20 {
		conn, err := network.Dial(t.Context(), "tcp", inside.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		outside, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		if outside.Addr().String() != inside.Addr().String() {
			conn, err = network.Dial(t.Context(), "tcp", outside.Addr().String())
			if err == nil {
				_ = conn.Close()
				t.Errorf("%s, opened outside of the network, answers in it", outside.Addr())
			}
		}
		if err := outside.Close(); err != nil {
			t.Error(err)
		}
	}
	_, err = localkube.Network("no-such-network").Dial(t.Context(), "tcp", "127.0.0.1:1")
	wantText(t, err, "open network no-such-network")
}

// TestStaleNetworksAreRemoved creates a network with the ID of a process that has ended.
func TestStaleNetworksAreRemoved(t *testing.T) {
	t.Parallel()
	localkube.NetworkForTest(t)
	dead := exec.CommandContext(t.Context(), "true")
	if err := dead.Run(); err != nil {
		t.Fatal(err)
	}
	stale := fmt.Sprintf("towline-%d-stale", dead.Process.Pid)
	if out, err := exec.CommandContext(t.Context(), "ip", "netns", "add", stale).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	live := localkube.NetworkForTest(t)
	localkube.NetworkForTest(t)
	out, err := exec.CommandContext(t.Context(), "ip", "netns", "list").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if names := string(out); strings.Contains(names, stale) || !strings.Contains(names, string(live)) {
		t.Errorf("networks: got %q, want %s and not %s", names, live, stale)
	}
}
