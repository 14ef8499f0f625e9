// Package egress limits the hosts and networks to which the hub connects for users.
//
// Users choose addresses: of charts, files and repositories, of API servers and of their proxies. The hub connects to
// them from its own network. Without a limit, a user could reach the services in that network, such as the metadata
// service of a cloud, which gives credentials to every client there.
//
// A Policy is checked for each connection: the host name before it is resolved, and then each resolved address. So it
// also holds for redirects, and for names that resolve to denied addresses.
package egress

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/textproto"
	"net/url"
	"os"
	"slices"
	"strings"
	"syscall"
)

// ErrDenied is wrapped by the errors of connections that a Policy denies.
var ErrDenied = errors.New("the hub does not connect to this address")

// Policy decides to which hosts and networks the hub connects. A nil Policy allows everything.
type Policy struct {
	hosts  []string
	denied []netip.Prefix
	// proxies are the addresses of the proxies in the environment of the process. They are allowed, because the operator
	// of the hub has chosen them.
	proxies []string
}

// New returns a Policy. If allowedHosts is not empty, only these hosts are allowed; *.example.com allows all
// subdomains, but not example.com itself. Addresses in deniedNetworks, in CIDR notation, are always denied.
func New(allowedHosts, deniedNetworks []string) (*Policy, error) {
	p := &Policy{proxies: environmentProxies()}
	for _, host := range allowedHosts {
		host = normalize(strings.TrimSpace(host))
		// Ports are not compared: a host with one would allow nothing.
		if _, _, err := net.SplitHostPort(host); host == "" || err == nil || strings.ContainsAny(strings.TrimPrefix(host, "*."), "*/[] ") {
			return nil, fmt.Errorf("allowed host %q is neither a host without a port nor *.<domain>", host)
		}
		p.hosts = append(p.hosts, host)
	}
	for _, text := range deniedNetworks {
		network, err := netip.ParsePrefix(strings.TrimSpace(text))
		if err != nil || network.Addr().Is4In6() {
			return nil, fmt.Errorf("denied network %q is not in CIDR notation, such as 10.0.0.0/8", text)
		}
		p.denied = append(p.denied, network.Masked())
	}
	return p, nil
}

// Default returns the Policy that denies only DefaultDenied.
func Default() *Policy {
	p := &Policy{proxies: environmentProxies()}
	for _, text := range DefaultDenied() {
		p.denied = append(p.denied, netip.MustParsePrefix(text))
	}
	return p
}

// DefaultDenied returns the networks that are denied by default: link-local addresses and the metadata services of
// clouds; and in a pod also loopback addresses, at which the containers of the pod listen. Outside of a pod loopback is
// allowed: a hub on the machine of its user needs the services there.
func DefaultDenied() []string {
	denied := []string{
		"169.254.0.0/16", "fe80::/10", // link-local, and the metadata services of most clouds
		"fd00:ec2::/32", "fd20:ce::/32", // AWS and Google Cloud over IPv6
		"100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32", // Alibaba Cloud, Azure, Oracle Cloud
	}
	if os.Getenv("KUBERNETES_SERVICE_HOST") != "" {
		denied = append(denied, "127.0.0.0/8", "::1/128", "0.0.0.0/8", "::/128")
	}
	return denied
}

// Transport sends requests according to a Policy. Its errors quote no response of a server or a proxy: otherwise users
// could read the first words of services to which they have no access.
type Transport struct{ *http.Transport }

// Transport makes base follow the policy, and returns it. It keeps base.Proxy, or sets the proxies of the environment.
// For a connection through a proxy, only the host name or the literal address is checked, because the proxy resolves
// names.
func (p *Policy) Transport(base *http.Transport, dialer *net.Dialer) Transport {
	proxy := base.Proxy
	if proxy == nil {
		proxy = http.ProxyFromEnvironment
	}
	base.Proxy = func(request *http.Request) (*url.URL, error) {
		// Dial gets the address of the proxy. So the host of the request is checked here, before a proxy is selected.
		if err := p.checkHost(request.URL.Hostname()); err != nil {
			return nil, err
		}
		if address, err := netip.ParseAddr(request.URL.Hostname()); err == nil && p.isDenied(address) {
			return nil, ErrDenied
		}
		return proxy(request)
	}
	base.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		return p.Dial(ctx, dialer, network, address)
	}
	base.OnProxyConnectResponse = func(_ context.Context, _ *url.URL, _ *http.Request, response *http.Response) error {
		if response.StatusCode == http.StatusOK {
			return nil
		}
		// net/http would return the reason phrase of the proxy.
		return fmt.Errorf("the proxy returned %d %s", response.StatusCode, http.StatusText(response.StatusCode))
	}
	return Transport{base}
}

// RoundTrip implements http.RoundTripper.
func (t Transport) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := t.Transport.RoundTrip(request)
	if err != nil {
		return nil, hideResponse(err)
	}
	if response.StatusCode != http.StatusSwitchingProtocols { // its body is also an io.Writer
		response.Body = responseBody{response.Body}
	}
	return response, nil
}

// responseBody is the body of a response. Its errors quote no part of the response, such as a trailer.
type responseBody struct{ io.ReadCloser }

// Read implements io.Reader.
func (b responseBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && err != io.EOF { //nolint:errorlint // io.Reader returns io.EOF itself
		err = hideResponse(err)
	}
	return n, err
}

// WrappedRoundTripper returns the wrapped transport, as client-go's transport utilities expect.
func (t Transport) WrappedRoundTripper() http.RoundTripper { return t.Transport }

// ErrInvalidResponse is the error for an invalid HTTP response.
var ErrInvalidResponse = errors.New("the server returned an invalid response")

// hideResponse returns err, or another error if err contains a part of a response. net/http quotes such parts, or
// returns them as a textproto.ProtocolError.
func hideResponse(err error) error {
	if op, ok := errors.AsType[*net.OpError](err); ok {
		if op.Op == "proxyconnect" {
			return &net.OpError{Op: op.Op, Net: op.Net, Err: hideResponse(op.Err)}
		}
		return err
	}
	text := err.Error()
	if strings.HasPrefix(text, "http2: server sent GOAWAY") {
		return errors.New("the server closed the connection")
	}
	// These errors are about the request, and the proxies in the environment.
	for _, prefix := range []string{"net/http: invalid", "invalid proxy address", "unsupported protocol scheme"} {
		if strings.HasPrefix(text, prefix) {
			return err
		}
	}
	_, isCertificate := errors.AsType[*tls.CertificateVerificationError](err)
	_, isHeader := errors.AsType[textproto.ProtocolError](err)
	if isCertificate || errors.Is(err, ErrDenied) || !isHeader && !strings.Contains(text, `"`) {
		return err
	}
	return ErrInvalidResponse
}

// Dial connects to an address with dialer, if the policy allows it. The proxies of the environment are always allowed.
func (p *Policy) Dial(ctx context.Context, dialer *net.Dialer, network, address string) (net.Conn, error) {
	if p == nil || slices.Contains(p.proxies, address) {
		return dialer.DialContext(ctx, network, address)
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDenied, err)
	}
	if err := p.checkHost(host); err != nil {
		return nil, err
	}
	limited := *dialer
	limited.ControlContext = func(_ context.Context, _, resolved string, _ syscall.RawConn) error {
		target, err := netip.ParseAddrPort(resolved)
		if err != nil || p.isDenied(target.Addr()) {
			return ErrDenied
		}
		return nil
	}
	return limited.DialContext(ctx, network, address)
}

// checkHost returns ErrDenied if there are allowed hosts and host is none of them.
func (p *Policy) checkHost(host string) error {
	if p == nil || len(p.hosts) == 0 {
		return nil
	}
	host = normalize(host)
	for _, allowed := range p.hosts {
		domain, isDomain := strings.CutPrefix(allowed, "*")
		// The zone of an IPv6 address can look like a domain.
		if host == allowed || isDomain && strings.HasSuffix(host, domain) && !strings.ContainsAny(host, ":%") {
			return nil
		}
	}
	return fmt.Errorf("%w: %s is not an allowed host", ErrDenied, host)
}

// isDenied returns whether address is in a denied network. It also checks the IPv4 address to which a gateway
// translates a NAT64 address.
func (p *Policy) isDenied(address netip.Addr) bool {
	if p == nil {
		return false
	}
	address = address.Unmap().WithZone("")
	if nat64 := netip.MustParsePrefix("64:ff9b::/96"); nat64.Contains(address) {
		raw := address.As16()
		if p.isDenied(netip.AddrFrom4([4]byte(raw[12:]))) {
			return true
		}
	}
	return slices.ContainsFunc(p.denied, func(network netip.Prefix) bool { return network.Contains(address) })
}

func normalize(host string) string { return strings.TrimSuffix(strings.ToLower(host), ".") }

// environmentProxies returns the proxies that http.ProxyFromEnvironment uses, as host:port.
func environmentProxies() []string {
	var proxies []string
	for _, name := range []string{"HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"} {
		text := os.Getenv(name)
		if text != "" && !strings.Contains(text, "://") {
			text = "http://" + text
		}
		proxy, err := url.Parse(text)
		if err != nil || proxy.Host == "" {
			continue
		}
		port := proxy.Port()
		if port == "" {
			port = map[string]string{"http": "80", "https": "443", "socks5": "1080", "socks5h": "1080"}[proxy.Scheme]
		}
		proxies = append(proxies, net.JoinHostPort(proxy.Hostname(), port))
	}
	return proxies
}
