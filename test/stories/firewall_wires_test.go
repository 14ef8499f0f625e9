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
	// hubAddress is where the hub's API server listens, on the loopback device of the hub's network. These addresses exist
	// in the networks of one story only, so that every story may use the same.
	hubAddress = "10.231.0.1"
	// dialTimeout is how long a dial may take that is to fail because nobody answers.
	dialTimeout = time.Second
)

// plug is one end of a cable.
type plug struct {
	network localkube.Network
	device  string
	// address is the device's own, with the length of the subnet's prefix.
	address string
}

// networks makes networks that have nothing but their loopback device.
func networks(t *testing.T, n int) []localkube.Network {
	t.Helper()
	made := make([]localkube.Network, n)
	for i := range made {
		made[i] = localkube.NetworkForTest(t, "nft")
	}
	return made
}

// cable joins two networks.
func cable(t *testing.T, a, b plug) {
	t.Helper()
	inside(t, a.network, "", "ip", "link", "add", a.device, "type", "veth", "peer", "name", b.device, "netns", string(b.network))
	for _, end := range []plug{a, b} {
		inside(t, end.network, "", "ip", "address", "add", end.address, "dev", end.device)
		inside(t, end.network, "", "ip", "link", "set", end.device, "up")
	}
}

// inside runs a program in a network, with text as its standard input, and returns its output.
func inside(t *testing.T, network localkube.Network, text, program string, args ...string) string {
	t.Helper()
	cmd := network.Command(t.Context(), program, args...)
	cmd.Stdin = strings.NewReader(text)
	out, err := output(cmd)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// dial says what is wrong unless somebody answers at the address.
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

// connectProxy is an HTTP proxy that knows only CONNECT, and only to one address.
type connectProxy struct {
	network localkube.Network
	target  string

	// mu guards what follows. granted counts the connections that were made, refused lists the other requests.
	mu      sync.Mutex
	granted int
	refused []string
	open    []net.Conn
	copying sync.WaitGroup
}

// serveProxy serves a proxy at an address of a network, for connections to target, until the story ends.
func serveProxy(t *testing.T, network localkube.Network, address, target string) *connectProxy {
	t.Helper()
	p := &connectProxy{network: network, target: target}
	listener, err := network.Listen(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: p, ReadHeaderTimeout: waitTimeout}
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(listener) }) // it ends with an error, since it is closed
	t.Cleanup(func() {
		_ = server.Close() // nothing of it is needed any more
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
	// A client that has gone is noticed by the copying below.
	_, _ = io.WriteString(client, "HTTP/1.1 200 Connection established\r\n\r\n")
	p.join(client, upstream)
}

// join copies both ways until one side ends.
func (p *connectProxy) join(a, b net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.granted++
	p.open = append(p.open, a, b)
	for _, way := range [][2]net.Conn{{a, b}, {b, a}} {
		p.copying.Go(func() {
			_, _ = io.Copy(way[0], way[1]) // however it ends, both sides learn of it
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

// want checks that the proxy was used for nothing but what it is for.
func (p *connectProxy) want(t *testing.T) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.granted == 0 || len(p.refused) > 0 {
		t.Errorf("the proxy made %d connections to %s and refused %q, want some and none", p.granted, p.target, p.refused)
	}
}
