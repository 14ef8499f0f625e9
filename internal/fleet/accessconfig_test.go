package fleet_test

import (
	"crypto/tls"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/egress"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// memberAccess is a member with the name of the test, and its Secret on a shared hub.
type memberAccess struct {
	testing.TB
	hub     client.Client
	clients *fleet.Clients
	secret  *corev1.Secret
	member  fleet.Member
}

func newMemberAccess(t *testing.T, server string) *memberAccess {
	t.Helper()
	plane := localkube.Shared(t)
	hub, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	a := &memberAccess{TB: t, hub: hub, clients: fleet.NewClients(fleet.SecretReaders{Live: hub}, plane.Config, fleet.IdentityPolicy{}, nil), secret: &corev1.Secret{}}
	a.secret.Namespace, a.secret.Name = plane.Namespace(t, "access"), "one"
	a.member = fleet.Member{
		Type: fleet.TypeKarmada, Namespace: "karmada-es-one", Name: "one", Mode: fleet.Push,
		Access: &fleet.Access{Server: server, Secret: client.ObjectKeyFromObject(a.secret)},
	}
	return a
}

// setSecret writes the Secret with these keys and values.
func (a *memberAccess) setSecret(pairs ...string) {
	a.Helper()
	a.secret.Data = map[string][]byte{}
	for i := 0; i < len(pairs); i += 2 {
		a.secret.Data[pairs[i]] = []byte(pairs[i+1])
	}
	write := a.hub.Update
	if a.secret.UID == "" {
		if err := a.hub.Create(a.Context(), a.secret); err != nil {
			a.Fatal(err)
		}
		return
	}
	if err := write(a.Context(), a.secret); err != nil {
		a.Fatal(err)
	}
}

func (a *memberAccess) wantError(text string) {
	a.Helper()
	config, err := a.clients.Config(a.Context(), a.member)
	if config != nil || err == nil || !strings.Contains(err.Error(), text) {
		a.Errorf("Config() = %v, %v, want an error with %q", config, err, text)
	}
}

func (a *memberAccess) config() *rest.Config {
	a.Helper()
	config, err := a.clients.Config(a.Context(), a.member)
	if err != nil {
		a.Fatal(err)
	}
	return config
}

// request sends a request to the member and returns the response.
func (a *memberAccess) request() (string, error) {
	a.Helper()
	config := a.config()
	dialled, err := rest.HTTPClientFor(config)
	if err != nil {
		a.Fatal(err)
	}
	request, err := http.NewRequestWithContext(a.Context(), http.MethodGet, config.Host+"/healthz", nil)
	if err != nil {
		a.Fatal(err)
	}
	response, err := dialled.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return string(body), err
}

func TestAccessErrorsNameTheField(t *testing.T) {
	t.Parallel()
	a := newMemberAccess(t, "https://127.0.0.1:1")
	of := a.member.Access
	a.wantError(`connect to karmada-es-one/one: read spec.secretRef: secrets "one" not found`)
	a.setSecret("other", "x")
	a.wantError(`spec.secretRef: secret ` + of.Secret.String() + ` has no key "token"`)
	a.setSecret("token", "t")
	a.wantError(`has no key "caBundle"`)
	a.setSecret("token", "t", "caBundle", "nonsense")
	a.wantError(`key "caBundle" of secret ` + of.Secret.String() + `: `)
	a.member.Access = &fleet.Access{Server: of.Server, Secret: of.Secret, Insecure: true, ProxyURL: "ftp://user:secret@h"}
	a.wantError("spec.proxyURL: not an http://, https:// or socks5:// address")
	for server, text := range map[string]string{"": "has no host", "http://h": "over TLS only", "https://user:secret@h": "are allowed"} {
		a.member.Access = &fleet.Access{Server: server, Secret: of.Secret, Insecure: true}
		a.wantError("spec.apiEndpoint: ")
		a.wantError(text)
	}
	a.member.Access = &fleet.Access{Server: of.Server}
	a.wantError("spec.secretRef is missing")
}

func TestReplacedTokenIsUsedAtOnce(t *testing.T) {
	t.Parallel()
	server := newMember(t)
	a := newMemberAccess(t, server.URL)
	if got, want := a.member.CredentialsSecret(), a.member.Access.Secret.String(); got != want {
		t.Errorf("CredentialsSecret() = %q, want %q", got, want)
	}
	a.setSecret("token", "old\n", "caBundle", authorityOf(server))
	first := a.config()
	if again := a.config(); again != first {
		t.Errorf("Config() again = %p, want the same config %p", again, first)
	}
	if got, err := a.request(); got != "Bearer old" || err != nil {
		t.Errorf("the member got %q, %v", got, err)
	}
	a.setSecret("token", "new", "caBundle", authorityOf(server))
	if got, err := a.request(); got != "Bearer new" || err != nil {
		t.Errorf("the member got %q, %v", got, err)
	}
	second := a.config()
	moved := *a.member.Access
	moved.ProxyURL = "http://127.0.0.1:1"
	a.member.Access = &moved
	if third := a.config(); third == second {
		t.Error("Config() is the same with another proxy")
	}
	a.clients.Forget(a.member.Key())
	if fourth := a.config(); fourth == second {
		t.Error("Config() is the same after Forget")
	}
}

func TestServerCertificateIsVerified(t *testing.T) {
	t.Parallel()
	server, other := newMember(t), localkube.Shared(t)
	a := newMemberAccess(t, server.URL)
	a.setSecret("token", "t", "caBundle", string(other.Config.CAData))
	if _, err := a.request(); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a server of another authority: error = %v", err)
	}
	insecure := *a.member.Access
	insecure.Insecure = true
	a.member.Access = &insecure
	if got, err := a.request(); got != "Bearer t" || err != nil {
		t.Errorf("without verification, the member got %q, %v", got, err)
	}
}

func TestProxyGetsItsHeaders(t *testing.T) {
	t.Parallel()
	server, proxy := newMember(t), newProxy(t)
	a := newMemberAccess(t, server.URL)
	a.setSecret("token", "t", "caBundle", authorityOf(server))
	a.member.Access = &fleet.Access{
		Server: server.URL, Secret: a.member.Access.Secret, ProxyURL: strings.Replace(proxy.URL, "http://", "http://user:secret@", 1),
		ProxyHeader: map[string]string{"X-Route": "a, b", "X-Other": "c"},
	}
	if got, err := a.request(); got != "Bearer t" || err != nil {
		t.Fatalf("the member got %q, %v", got, err)
	}
	seen := proxy.last()
	if strings.Join(seen.Values("X-Route"), "|") != "a|b" || seen.Get("X-Other") != "c" || seen.Get("Proxy-Authorization") == "" || seen.Get("Authorization") != "" {
		t.Errorf("the proxy got %v", seen)
	}
	// A copy of the configuration, like the copy of each client, also uses the proxy.
	limited := rest.CopyConfig(a.config())
	limited.UserAgent = "another"
	if _, err := rest.HTTPClientFor(limited); err != nil {
		t.Error(err)
	}
	// The certificate is also verified behind a proxy.
	a.setSecret("token", "t", "caBundle", string(localkube.Shared(t).Config.CAData))
	if _, err := a.request(); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a server of another authority: error = %v", err)
	}
}

// TestAccessFollowsTheEgressPolicy uses a Cluster with an address that the policy denies: as its API server, as its
// proxy, and behind an allowed proxy.
func TestAccessFollowsTheEgressPolicy(t *testing.T) {
	t.Parallel()
	const deniedAddress = "127.0.0.3"
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", net.JoinHostPort(deniedAddress, "0"))
	if err != nil {
		t.Fatal(err)
	}
	var reached atomic.Int32
	denied := httptest.NewUnstartedServer(http.NotFoundHandler())
	denied.Config.ConnState = func(connection net.Conn, state http.ConnState) {
		if state == http.StateNew {
			reached.Add(1)
			_ = connection.Close()
		}
	}
	_ = denied.Listener.Close()
	denied.Listener = listener
	denied.Start()
	t.Cleanup(denied.Close)
	policy, err := egress.New(nil, []string{deniedAddress + "/32"})
	if err != nil {
		t.Fatal(err)
	}
	server, proxy := newMember(t), newProxy(t)
	a := newMemberAccess(t, server.URL)
	a.clients = fleet.NewClients(fleet.SecretReaders{Live: a.hub}, nil, fleet.IdentityPolicy{}, policy)
	a.setSecret("token", "t", "caBundle", authorityOf(server))
	secret, address := a.member.Access.Secret, listener.Addr().String()
	for name, memberAccess := range map[string]fleet.Access{
		"apiEndpoint":                  {Server: "https://" + address},
		"apiEndpoint behind a proxy":   {Server: "https://" + address, ProxyURL: proxy.URL},
		"proxyURL":                     {Server: server.URL, ProxyURL: "http://" + address},
		"proxyURL of SOCKS":            {Server: server.URL, ProxyURL: "socks5://" + address},
		"proxyURL with a proxy header": {Server: server.URL, ProxyURL: "http://" + address, ProxyHeader: map[string]string{"X-Route": "a"}},
	} {
		memberAccess.Secret = secret
		a.member.Access = &memberAccess
		if _, err := a.request(); !errors.Is(err, egress.ErrDenied) {
			t.Errorf("%s: got error %v, want ErrDenied", name, err)
		}
	}
	if n := reached.Load(); n > 0 || proxy.last() != nil {
		t.Errorf("the denied server got %d connections, the allowed proxy a request with the headers %v", n, proxy.last())
	}
	for name, proxyURL := range map[string]string{"an allowed apiEndpoint": "", "an allowed proxyURL": proxy.URL} {
		a.member.Access = &fleet.Access{Server: server.URL, Secret: secret, ProxyURL: proxyURL}
		if got, err := a.request(); got != "Bearer t" || err != nil {
			t.Errorf("%s: the member got %q, %v", name, got, err)
		}
	}
}

// newMember returns an API server that responds with the authorization header of the request.
func newMember(t *testing.T) *httptest.Server {
	t.Helper()
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Header.Get("Authorization"))
	}))
	server.EnableHTTP2 = true
	server.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
	server.StartTLS()
	t.Cleanup(server.Close)
	return server
}

func authorityOf(server *httptest.Server) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))
}

// proxy forwards connections, and records the last headers.
type proxy struct {
	*httptest.Server
	mu     sync.Mutex // guards header
	header http.Header
}

func newProxy(t *testing.T) *proxy {
	t.Helper()
	p := &proxy{}
	p.Server = httptest.NewServer(http.HandlerFunc(p.forward))
	t.Cleanup(p.Close)
	return p
}

func (p *proxy) last() http.Header {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.header
}

func (p *proxy) forward(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	p.header = r.Header.Clone()
	p.mu.Unlock()
	if r.Method != http.MethodConnect {
		http.Error(w, "only CONNECT", http.StatusMethodNotAllowed)
		return
	}
	far, err := (&net.Dialer{}).DialContext(r.Context(), "tcp", r.Host)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer func() { _ = far.Close() }()
	near, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer func() { _ = near.Close() }()
	_, _ = near.Write([]byte("HTTP/1.1 200 Connection established\r\n\r\n"))
	go func() {
		_, _ = io.Copy(far, buffered)
		_ = far.Close()
	}()
	_, _ = io.Copy(near, far)
}
