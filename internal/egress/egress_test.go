package egress_test

import (
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/towline/towline/internal/egress"
)

// get requests a URL under a policy.
func get(t *testing.T, p *egress.Policy, address string) error {
	t.Helper()
	return getBy(t, p.Transport(&http.Transport{}, &net.Dialer{Timeout: 10 * time.Second}), address)
}

func getBy(t *testing.T, transport egress.Transport, address string) error {
	t.Helper()
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, response.Body)
	return errors.Join(err, response.Body.Close())
}

func policy(t *testing.T, hosts, networks []string) *egress.Policy {
	t.Helper()
	p, err := egress.New(hosts, networks)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPolicy(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(server.Close)
	named := strings.Replace(server.URL, "127.0.0.1", "localhost", 1)
	mapped := strings.Replace(server.URL, "127.0.0.1", "[::ffff:127.0.0.1]", 1)
	redirecting := httptest.NewUnstartedServer(http.RedirectHandler(server.URL, http.StatusFound))
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	redirecting.Listener = listener
	redirecting.Start()
	t.Cleanup(redirecting.Close)
	loopback := []string{"127.0.0.1/32", "::1/128"}
	for name, test := range map[string]struct {
		policy  *egress.Policy
		address string
		denied  bool
	}{
		"no policy":             {nil, server.URL, false},
		"outside of a cluster":  {egress.Default(), server.URL, false},
		"metadata":              {egress.Default(), "http://169.254.169.254/latest", true},
		"translated metadata":   {egress.Default(), "http://[64:ff9b::a9fe:a9fe]/latest", true},
		"metadata over IPv6":    {egress.Default(), "http://[fd00:ec2::254]/latest", true},
		"a denied address":      {policy(t, nil, loopback), server.URL, true},
		"another one":           {policy(t, nil, []string{"10.0.0.0/8"}), server.URL, false},
		"a name that resolves":  {policy(t, nil, loopback), named, true},
		"IPv4 in IPv6":          {policy(t, nil, loopback), mapped, true},
		"a redirect":            {policy(t, nil, loopback), redirecting.URL, true},
		"a redirect to another": {policy(t, []string{"127.0.0.2"}, nil), redirecting.URL, true},
		"an allowed host":       {policy(t, []string{"example.com", "LOCALHOST."}, nil), named, false},
		"no allowed host":       {policy(t, []string{"example.com"}, nil), named, true},
		"an allowed domain":     {policy(t, []string{"*.0.0.1"}, nil), server.URL, false},
		"a longer name":         {policy(t, []string{"*.host"}, nil), named, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if err := get(t, test.policy, test.address); errors.Is(err, egress.ErrDenied) != test.denied || !test.denied && err != nil {
				t.Errorf("got error %v, want denied: %v", err, test.denied)
			}
		})
	}
}

func TestDefaultInAPod(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
	for _, address := range []string{"http://127.0.0.1:1", "http://[::1]:1", "http://0.0.0.0:1", "http://localhost:1"} {
		if err := get(t, egress.Default(), address); !errors.Is(err, egress.ErrDenied) {
			t.Errorf("%s: got error %v", address, err)
		}
	}
}

// The operator's own proxy may have any address; the hosts of requests through it are checked.
func TestProxyOfTheEnvironment(t *testing.T) {
	proxy := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(proxy.Close)
	t.Setenv("HTTP_PROXY", proxy.URL)
	p := policy(t, []string{"example.com"}, []string{"127.0.0.0/8"})
	connection, err := p.Dial(t.Context(), &net.Dialer{}, "tcp", strings.TrimPrefix(proxy.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	_ = connection.Close()
	if err := get(t, p, "http://example.org"); !errors.Is(err, egress.ErrDenied) {
		t.Errorf("got error %v", err)
	}
}

// TestErrorsRepeatNoResponse requests services that are not meant for users, directly and as proxies.
func TestErrorsRepeatNoResponse(t *testing.T) {
	t.Parallel()
	const secret = "internal-secret"
	for name, answer := range map[string]string{
		"no HTTP":           "-ERR " + secret + "\r\n",
		"status code":       "HTTP/1.1 " + secret + " OK\r\n\r\n",
		"header":            "HTTP/1.1 200 OK\r\n" + secret + "\r\n\r\n",
		"length":            "HTTP/1.1 200 OK\r\nContent-Length: " + secret + "\r\n\r\n",
		"transfer encoding": "HTTP/1.1 200 OK\r\nTransfer-Encoding: " + secret + "\r\n\r\n",
		"trailer":           "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + secret + "\r\n\r\n",
		"reason":            "HTTP/1.1 407 " + secret + "\r\nContent-Length: 0\r\n\r\n",
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			connection, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				_, err = connection.Write([]byte(answer))
				_ = connection.Close()
			}
			if err != nil {
				t.Error(err)
			}
		}))
		t.Cleanup(server.Close)
		proxy, err := url.Parse(server.URL)
		if err != nil {
			t.Fatal(err)
		}
		byProxy := egress.Default().Transport(&http.Transport{Proxy: http.ProxyURL(proxy)}, &net.Dialer{Timeout: 10 * time.Second})
		if err := getBy(t, byProxy, "https://192.0.2.1"); err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("%s, as a proxy: got error %v", name, err)
		}
		if err := get(t, egress.Default(), server.URL); name != "reason" && !errors.Is(err, egress.ErrInvalidResponse) {
			t.Errorf("%s: got error %v, want ErrInvalidResponse", name, err)
		}
	}
}

func TestNewRefusesInvalidValues(t *testing.T) {
	t.Parallel()
	for _, host := range []string{"", "a b", "http://a", "a.*.b", "a:5000", "[::1]"} {
		if _, err := egress.New([]string{host}, nil); err == nil {
			t.Errorf("host %q is accepted", host)
		}
	}
	for _, network := range []string{"10.0.0.1", "::ffff:10.0.0.0/104"} { // no address is compared in the second form
		if _, err := egress.New(nil, []string{network}); err == nil {
			t.Errorf("network %s is accepted", network)
		}
	}
}
