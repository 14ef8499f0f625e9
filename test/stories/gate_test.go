package stories

import (
	"bytes"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// requestMatch selects a request that a gate blocks.
type requestMatch struct {
	// method is an HTTP method; "" stands for all methods that write.
	method string
	path   *regexp.Regexp
	// program is the prefix of the request's User-Agent.
	program string
	// body is a text in the request's body.
	body string
	// nth is the number of the request among the matching ones; 0 and 1 mean the first.
	nth int
	// answered means that the API server fulfils the request, but the client gets no response.
	answered bool
	// forbidden means that this request, and each later one with the same method and path, is refused instead of blocked.
	forbidden bool
}

// matches returns whether the method, the program and the path of a request match.
func (m requestMatch) matches(r *http.Request) bool {
	writes := r.Method == http.MethodPost || r.Method == http.MethodPut || r.Method == http.MethodPatch || r.Method == http.MethodDelete
	// A review of permissions is a POST that writes nothing.
	writes = writes && !strings.HasPrefix(r.URL.Path, "/apis/authorization.k8s.io/")
	asked := r.Method == m.method || (m.method == "" && writes)
	return asked && strings.HasPrefix(r.UserAgent(), m.program) && m.path.MatchString(r.URL.Path)
}

// blockedRequest has the state of a requestMatch. reached is closed when a request is blocked, and resumed when that
// request is forwarded.
type blockedRequest struct {
	requestMatch
	matched int
	reached chan struct{}
	resumed chan struct{}
	once    *sync.Once
}

// gate is a reverse proxy in front of an API server. It can block one request until the client ends, so that a process
// is killed exactly at this request.
type gate struct {
	server *httptest.Server
	proxy  *httputil.ReverseProxy

	// mu guards the fields below.
	mu   sync.Mutex
	next *blockedRequest
	// blocked is the last request that was blocked. next waits for its request.
	blocked *blockedRequest
	// responses are the responses of the API server since startRecording was called; nil before.
	responses []response
}

// response is a response of the API server to a request.
type response struct {
	method string
	path   string
	code   int
}

// startGate starts a gate to the API server of config. Its clients act with the credentials of config, or with their
// own if config has none.
func (w *world) startGate(config *rest.Config) *gate {
	w.t.Helper()
	upstream, err := url.Parse(config.Host)
	if err != nil {
		w.t.Fatal(err)
	}
	config = rest.CopyConfig(config)
	// HTTP/1.1 gives each of the many watches and requests its own connection.
	config.NextProtos = []string{"http/1.1"}
	transport, err := rest.TransportFor(config)
	if err != nil {
		w.t.Fatal(err)
	}
	g := &gate{}
	g.proxy = &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(upstream)
			if len(config.CertData) > 0 {
				r.Out.Header.Del("Authorization")
			}
		},
		Transport:      transport,
		FlushInterval:  -1,
		ModifyResponse: g.recordResponse,
		// The stories kill clients and API servers in the middle of requests.
		ErrorHandler: func(rw http.ResponseWriter, _ *http.Request, _ error) { rw.WriteHeader(http.StatusBadGateway) },
	}
	g.server = httptest.NewUnstartedServer(g)
	g.server.EnableHTTP2 = true
	g.server.Config.ErrorLog = log.New(io.Discard, "", 0) // or in the middle of a handshake
	g.server.StartTLS()
	w.t.Cleanup(func() {
		g.server.CloseClientConnections()
		g.server.Close()
	})
	return g
}

// block makes the gate block the request that m selects.
func (g *gate) block(m requestMatch) *blockedRequest {
	t := &blockedRequest{requestMatch: m, reached: make(chan struct{}), resumed: make(chan struct{}), once: &sync.Once{}}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.next = t
	return t
}

// ServeHTTP forwards a request unless the gate blocks it.
func (g *gate) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	t, caught, err := g.match(r)
	if err != nil {
		http.Error(rw, err.Error(), http.StatusBadGateway)
		return
	}
	if !caught {
		g.proxy.ServeHTTP(rw, r)
		return
	}
	if t.forbidden {
		t.once.Do(func() { close(t.reached) })
		forbid(rw, r)
		return
	}
	if t.answered {
		g.proxy.ServeHTTP(httptest.NewRecorder(), r)
	}
	t.once.Do(func() { close(t.reached) })
	select {
	case <-t.resumed:
		g.proxy.ServeHTTP(rw, r)
	case <-r.Context().Done():
	}
}

// resume forwards the blocked request. It must not be used with answered.
func (g *gate) resume() {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.blocked.resumed)
}

// match returns whether the request is the one to block, and its state.
func (g *gate) match(r *http.Request) (t *blockedRequest, caught bool, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	t = g.next
	if t == nil || !t.matches(r) {
		return nil, false, nil
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, false, fmt.Errorf("read request: %w", err)
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	if !bytes.Contains(body, []byte(t.body)) {
		return nil, false, nil
	}
	if t.matched++; t.matched < t.nth {
		return nil, false, nil
	}
	g.next, g.blocked = nil, t
	if t.forbidden {
		g.next = &blockedRequest{requestMatch: requestMatch{method: r.Method, program: t.program, path: regexp.MustCompile("^" + regexp.QuoteMeta(r.URL.Path) + "$"), forbidden: true}, reached: t.reached, once: t.once}
	}
	return t, true, nil
}

// clear makes the gate block no request.
func (g *gate) clear() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.next = nil
}

// forbid responds as an API server whose authorizer denies the request.
func forbid(rw http.ResponseWriter, r *http.Request) {
	rw.Header().Set("Content-Type", "application/json")
	rw.WriteHeader(http.StatusForbidden)
	_, _ = fmt.Fprintf(rw, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403,"message":"%s %s is forbidden"}`, r.Method, r.URL.Path)
}

// startRecording makes the gate record responses.
func (g *gate) startRecording() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.responses = []response{}
}

func (g *gate) recordResponse(r *http.Response) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.responses != nil {
		g.responses = append(g.responses, response{method: r.Request.Method, path: r.Request.URL.Path, code: r.StatusCode})
	}
	return nil
}

// listFailures lists the recorded requests that the API server did not fulfil.
func (g *gate) listFailures() []string {
	return g.listRecorded(func(a response) bool { return a.code >= http.StatusBadRequest })
}

// listBundleReads lists the recorded reads of bundles.
func (g *gate) listBundleReads() []string {
	return g.listRecorded(func(a response) bool {
		return a.method == http.MethodGet && strings.Contains(a.path, "/configurationbundles/")
	})
}

func (g *gate) listRecorded(which func(response) bool) []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	var found []string
	for _, a := range g.responses {
		if which(a) {
			found = append(found, fmt.Sprintf("%s %s: %d", a.method, a.path, a.code))
		}
	}
	return found
}

// awaitBlocked waits until a request is blocked.
func (w *world) awaitBlocked(t *blockedRequest) {
	w.t.Helper()
	select {
	case <-t.reached:
	case <-time.After(waitTimeout):
		w.t.Fatalf("no %s %s (%q, number %d) within %s", t.method, t.path, t.body, t.nth, waitTimeout)
	}
}

// ca returns the certificate of the gate, PEM-encoded.
func (g *gate) ca() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: g.server.Certificate().Raw})
}

func (g *gate) port() string {
	_, port, _ := net.SplitHostPort(g.server.Listener.Addr().String()) // a listener's address has a port
	return port
}

// throughGate returns config with the address of the gate.
func (g *gate) throughGate(config *clientcmdapi.Config) *clientcmdapi.Config {
	config = config.DeepCopy()
	cluster := config.Clusters[config.Contexts[config.CurrentContext].Cluster]
	cluster.Server, cluster.CertificateAuthorityData, cluster.TLSServerName = g.server.URL, g.ca(), ""
	return config
}

// writeGateKubeconfig writes a kubeconfig with the address of the gate and without valid credentials, and returns its
// path.
func (w *world) writeGateKubeconfig(name string, g *gate) string {
	w.t.Helper()
	config := clientcmdapi.NewConfig()
	config.Clusters["gate"] = clientcmdapi.NewCluster()
	config.AuthInfos["nobody"] = &clientcmdapi.AuthInfo{Token: "none"} // without a token, kubectl asks for a password
	config.Contexts["gate"] = &clientcmdapi.Context{Cluster: "gate", AuthInfo: "nobody"}
	config.CurrentContext = "gate"
	raw, err := clientcmd.Write(*g.throughGate(config))
	if err != nil {
		w.t.Fatal(err)
	}
	return w.save(name, string(raw))
}
