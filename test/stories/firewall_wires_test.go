package stories

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/towline/towline/internal/localkube"
)

const (
	// hubAddress is the address of the hub's API server, on the loopback device of the hub's network. These addresses
	// exist in the networks of one story only, so that every story may use the same.
	hubAddress = "10.231.0.1"
	// dialTimeout limits a dial to an address that does not answer.
	dialTimeout = time.Second
)

// cableEnd is one end of a cable.
type cableEnd struct {
	network localkube.Network
	device  string
	// address is the address of the device, with the length of the subnet's prefix.
	address string
}

// newNetworks creates networks that have only a loopback device.
func newNetworks(t *testing.T, n int) []localkube.Network {
	t.Helper()
	made := make([]localkube.Network, n)
	for i := range made {
		made[i] = localkube.NetworkForTest(t, "nft")
	}
	return made
}

// connectNetworks connects two networks with a cable.
func connectNetworks(t *testing.T, a, b cableEnd) {
	t.Helper()
	runInNetwork(t, a.network, "", "ip", "link", "add", a.device, "type", "veth", "peer", "name", b.device, "netns", string(b.network))
	for _, end := range []cableEnd{a, b} {
		runInNetwork(t, end.network, "", "ip", "address", "add", end.address, "dev", end.device)
		runInNetwork(t, end.network, "", "ip", "link", "set", end.device, "up")
	}
}

// runInNetwork runs a program in a network, with text as its standard input, and returns its output.
func runInNetwork(t *testing.T, network localkube.Network, text, program string, args ...string) string {
	t.Helper()
	cmd := network.Command(t.Context(), program, args...)
	cmd.Stdin = strings.NewReader(text)
	out, err := output(cmd)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// dial returns an error unless a server answers at the address.
func dial(t *testing.T, from localkube.Network, address string) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), dialTimeout)
	defer cancel()
	conn, err := from.Dial(ctx, "tcp", address)
	if err == nil {
		_ = conn.Close()
	}
	return err
}

// connectProxy is an HTTP proxy that supports only CONNECT, and only to one address.
type connectProxy struct {
	network localkube.Network
	target  string

	// mu guards the fields below. granted counts the established connections, refused lists the other requests.
	mu      sync.Mutex
	granted int
	refused []string
	open    []net.Conn
	copying sync.WaitGroup
}

// serveProxy runs a proxy at an address of a network, for connections to target, until the story ends.
func serveProxy(t *testing.T, network localkube.Network, address, target string) *connectProxy {
	t.Helper()
	p := &connectProxy{network: network, target: target}
	listener, err := network.Listen(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: p, ReadHeaderTimeout: waitTimeout}
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(listener) }) // it returns an error when the server is closed
	t.Cleanup(func() {
		_ = server.Close() // the error is of no interest
		serving.Wait()
		p.close()
	})
	return p
}

// ServeHTTP connects the client with the target.
func (p *connectProxy) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodConnect || r.Host != p.target {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.refused = append(p.refused, r.Method+" "+r.Host)
		http.Error(rw, "only CONNECT "+p.target, http.StatusForbidden)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), 10*dialTimeout)
	defer cancel()
	upstream, err := p.network.Dial(ctx, "tcp", p.target)
	if err != nil {
		http.Error(rw, err.Error(), http.StatusBadGateway)
		return
	}
	client, _, err := http.NewResponseController(rw).Hijack()
	if err != nil {
		_ = upstream.Close()
		return
	}
	// The copying below notices that the client has closed the connection.
	_, _ = io.WriteString(client, "HTTP/1.1 200 Connection established\r\n\r\n")
	p.copyBothWays(client, upstream)
}

// copyBothWays copies in both directions until one side ends.
func (p *connectProxy) copyBothWays(a, b net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.granted++
	p.open = append(p.open, a, b)
	for _, way := range [][2]net.Conn{{a, b}, {b, a}} {
		p.copying.Go(func() {
			_, _ = io.Copy(way[0], way[1]) // both connections are closed in each case
			_ = way[0].Close()
			_ = way[1].Close()
		})
	}
}

func (p *connectProxy) close() {
	p.mu.Lock()
	for _, conn := range p.open {
		_ = conn.Close() // most are closed already
	}
	p.mu.Unlock()
	p.copying.Wait()
}

// wantOnlyGranted checks that the proxy was used, and only for connections to its target.
func (p *connectProxy) wantOnlyGranted(t *testing.T) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.granted == 0 || len(p.refused) > 0 {
		t.Errorf("the proxy made %d connections to %s and refused %q, want some and none", p.granted, p.target, p.refused)
	}
}
