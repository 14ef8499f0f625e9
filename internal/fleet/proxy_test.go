package fleet_test

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/localkube"
)

// socks is a SOCKS5 proxy with authentication (RFC 1928 and 1929).
type socks struct {
	net.Listener
	user, password string
	// connections counts the forwarded connections.
	connections atomic.Int32
}

func newSocks(t *testing.T, user, password string) *socks {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &socks{Listener: listener, user: user, password: password}
	ctx, cancel := context.WithCancel(t.Context())
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			near, err := s.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer context.AfterFunc(ctx, func() { _ = near.Close() })()
				defer func() { _ = near.Close() }()
				if far, err := s.accept(ctx, near); err == nil {
					s.forward(ctx, near, far)
				}
			})
		}
	})
	t.Cleanup(func() {
		cancel()
		_ = s.Close()
		serving.Wait()
	})
	return s
}

// accept authenticates a client and connects to the requested address.
func (s *socks) accept(ctx context.Context, near net.Conn) (net.Conn, error) {
	// The client waits for each response, so the reader buffers no bytes of the next message.
	in := bufio.NewReader(near)
	text := func() string {
		length, _ := in.ReadByte()
		said := make([]byte, length)
		_, _ = io.ReadFull(in, said)
		return string(said)
	}
	version, _ := in.ReadByte()
	if methods := text(); version != 5 || !strings.Contains(methods, "\x02") {
		return nil, fmt.Errorf("version %d with methods %q", version, methods)
	}
	_, _ = near.Write([]byte{5, 2})
	_, _ = in.ReadByte()
	if user, password := text(), text(); user != s.user || password != s.password {
		_, _ = near.Write([]byte{1, 1})
		return nil, fmt.Errorf("not for %q", user)
	}
	_, _ = near.Write([]byte{1, 0})
	head := make([]byte, 4)
	if _, err := io.ReadFull(in, head); err != nil || head[1] != 1 {
		return nil, fmt.Errorf("command %d: %w", head[1], err)
	}
	var host string
	if head[3] == 3 {
		host = text()
	} else {
		address := make(net.IP, map[byte]int{1: net.IPv4len, 4: net.IPv6len}[head[3]])
		_, _ = io.ReadFull(in, address)
		host = address.String()
	}
	port := make([]byte, 2)
	if _, err := io.ReadFull(in, port); err != nil {
		return nil, err
	}
	far, err := (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(int(binary.BigEndian.Uint16(port)))))
	if err != nil {
		return nil, err
	}
	s.connections.Add(1)
	_, err = near.Write([]byte{5, 0, 0, 1, 0, 0, 0, 0, 0, 0})
	return far, err
}

// forward copies in both directions until one side ends.
func (*socks) forward(ctx context.Context, near, far net.Conn) {
	defer context.AfterFunc(ctx, func() { _ = far.Close() })()
	go func() {
		_, _ = io.Copy(far, near)
		_ = far.Close()
	}()
	_, _ = io.Copy(near, far)
}

func TestMemberIsReachedThroughSOCKS(t *testing.T) {
	t.Parallel()
	server, proxy := newMember(t), newSocks(t, "user", "secret")
	a := newMemberAccess(t, server.URL)
	a.setSecret("token", "t", "caBundle", authorityOf(server))
	through := func(login string) {
		a.member.Access = &fleet.Access{Server: server.URL, Secret: a.member.Access.Secret, ProxyURL: "socks5://" + login + "@" + proxy.Addr().String()}
	}
	through("user:secret")
	if got, err := a.request(); got != "Bearer t" || err != nil || proxy.connections.Load() != 1 {
		t.Errorf("the member got %q, %v, and the proxy forwarded %d connections", got, err, proxy.connections.Load())
	}
	through("user:wrong")
	if got, err := a.request(); err == nil || proxy.connections.Load() != 1 {
		t.Errorf("with a wrong password the member got %q", got)
	}
	through("user:secret")
	// The certificate is also verified behind the proxy.
	a.setSecret("token", "t", "caBundle", string(localkube.Shared(t).Config.CAData))
	if _, err := a.request(); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a server of another authority: error = %v", err)
	}
	if proxy.connections.Load() != 2 {
		t.Errorf("the proxy forwarded %d connections, want 2", proxy.connections.Load())
	}
}

// newSecuredProxy returns a proxy with TLS, whose certificate authority differs from the members'.
func newSecuredProxy(t *testing.T) (server *httptest.Server, authority string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	itself := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "proxy"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, itself, itself, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	server = httptest.NewUnstartedServer(http.HandlerFunc((&proxy{}).forward))
	server.TLS = &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
	server.StartTLS()
	t.Cleanup(server.Close)
	return server, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

func TestTLSProxyIsVerifiedWithTheBundleOfTheCluster(t *testing.T) {
	t.Parallel()
	server := newMember(t)
	proxy, authority := newSecuredProxy(t)
	a := newMemberAccess(t, server.URL)
	a.member.Access = &fleet.Access{Server: server.URL, Secret: a.member.Access.Secret, ProxyURL: proxy.URL}
	a.setSecret("token", "t", "caBundle", authorityOf(server))
	if got, err := a.request(); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("through a proxy of another authority, the member got %q: %v", got, err)
	}
	a.setSecret("token", "t", "caBundle", authorityOf(server)+authority)
	if got, err := a.request(); got != "Bearer t" || err != nil {
		t.Errorf("with both authorities in the bundle, the member got %q, %v", got, err)
	}
	a.setSecret("token", "t", "caBundle", authority)
	if got, err := a.request(); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a server with a certificate of the proxy's authority got %q: %v", got, err)
	}
}
