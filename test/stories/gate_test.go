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

// moment is a request at which a gate holds whoever makes it.
type moment struct {
	// method is that of HTTP; "" stands for all that write.
	method string
	path   *regexp.Regexp
	// program is what the request's User-Agent must start with.
	program string
	// body is a text that the request's body must contain.
	body string
	// nth is which of the matching requests is meant; 0 and 1 mean the first.
	nth int
	// answered means that the API server does what was asked, but the answer never arrives.
	answered bool
	// forbidden means that the request, and every later one of the same method and path, is refused rather than held.
	forbidden bool
}

// is says whether a request is of that kind.
func (m moment) is(r *http.Request) bool {
	writes := r.Method == http.MethodPost || r.Method == http.MethodPut || r.Method == http.MethodPatch || r.Method == http.MethodDelete
	// Asking who may do what is a POST that writes nothing.
	writes = writes && !strings.HasPrefix(r.URL.Path, "/apis/authorization.k8s.io/")
	asked := r.Method == m.method || (m.method == "" && writes)
	return asked && strings.HasPrefix(r.UserAgent(), m.program) && m.path.MatchString(r.URL.Path)
}

// trap waits for a moment; sprung is closed when a request is held, and resumed when it is forwarded after all.
type trap struct {
	moment
	seen    int
	sprung  chan struct{}
	resumed chan struct{}
	once    *sync.Once
}

// gate is a reverse proxy in front of an API server. It can hold one request until whoever made it is gone, so that a
// process is killed exactly there.
type gate struct {
	server *httptest.Server
	proxy  *httputil.ReverseProxy

	// mu guards the fields below.
	mu   sync.Mutex
	trap *trap
	// held is the trap of the last request that was held.
	held *trap
	// answers are those of the API server since record was called; nil before.
	answers []answer
}

// answer is what the API server said to a request.
type answer struct {
	method string
	path   string
	code   int
}

// gate opens a gate to the API server of config. Whoever comes through it acts with the credentials of config, or with
// his own if config has none.
func (w *world) gate(config *rest.Config) *gate {
	w.t.Helper()
	upstream, err := url.Parse(config.Host)
	if err != nil {
		w.t.Fatal(err)
	}
	config = rest.CopyConfig(config)
	// Many watches and requests at once: each on a connection of its own is simplest.
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
		ModifyResponse: g.note,
		// A client or an API server that is killed in the middle is the point of all this.
		ErrorHandler: func(rw http.ResponseWriter, _ *http.Request, _ error) { rw.WriteHeader(http.StatusBadGateway) },
	}
	g.server = httptest.NewUnstartedServer(g)
	g.server.EnableHTTP2 = true
	g.server.Config.ErrorLog = log.New(io.Discard, "", 0) // the same, in the middle of a handshake
	g.server.StartTLS()
	w.t.Cleanup(func() {
		g.server.CloseClientConnections()
		g.server.Close()
	})
	return g
}

// hold makes the gate hold the request of that moment.
func (g *gate) hold(m moment) *trap {
	t := &trap{moment: m, sprung: make(chan struct{}), resumed: make(chan struct{}), once: &sync.Once{}}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.trap = t
	return t
}

// ServeHTTP forwards a request unless it is the one to hold.
func (g *gate) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	t, caught, err := g.caught(r)
	if err != nil {
		http.Error(rw, err.Error(), http.StatusBadGateway)
		return
	}
	if !caught {
		g.proxy.ServeHTTP(rw, r)
		return
	}
	if t.forbidden {
		t.once.Do(func() { close(t.sprung) })
		forbid(rw, r)
		return
	}
	if t.answered {
		g.proxy.ServeHTTP(httptest.NewRecorder(), r)
	}
	t.once.Do(func() { close(t.sprung) })
	select {
	case <-t.resumed:
		g.proxy.ServeHTTP(rw, r)
	case <-r.Context().Done():
	}
}

// resume forwards the request that is held. It must not be one whose answer is withheld.
func (g *gate) resume() {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.held.resumed)
}

// caught returns the trap, and whether the request springs it.
func (g *gate) caught(r *http.Request) (t *trap, caught bool, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	t = g.trap
	if t == nil || !t.is(r) {
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
	if t.seen++; t.seen < t.nth {
		return nil, false, nil
	}
	g.trap, g.held = nil, t
	if t.forbidden {
		g.trap = &trap{moment: moment{method: r.Method, program: t.program, path: regexp.MustCompile("^" + regexp.QuoteMeta(r.URL.Path) + "$"), forbidden: true}, sprung: t.sprung, once: t.once}
	}
	return t, true, nil
}

// release forgets the trap.
func (g *gate) release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.trap = nil
}

// forbid answers as an API server whose authorizer denies the request.
func forbid(rw http.ResponseWriter, r *http.Request) {
	rw.Header().Set("Content-Type", "application/json")
	rw.WriteHeader(http.StatusForbidden)
	_, _ = fmt.Fprintf(rw, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403,"message":"%s %s is forbidden"}`, r.Method, r.URL.Path)
}

// record makes the gate remember answers, from now on.
func (g *gate) record() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.answers = []answer{}
}

func (g *gate) note(r *http.Response) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.answers != nil {
		g.answers = append(g.answers, answer{method: r.Request.Method, path: r.Request.URL.Path, code: r.StatusCode})
	}
	return nil
}

// failures lists the recorded requests that the API server did not fulfil.
func (g *gate) failures() []string {
	return g.recorded(func(a answer) bool { return a.code >= http.StatusBadRequest })
}

// fetches lists the recorded reads of bundles.
func (g *gate) fetches() []string {
	return g.recorded(func(a answer) bool {
		return a.method == http.MethodGet && strings.Contains(a.path, "/configurationbundles/")
	})
}

func (g *gate) recorded(which func(answer) bool) []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	var found []string
	for _, a := range g.answers {
		if which(a) {
			found = append(found, fmt.Sprintf("%s %s: %d", a.method, a.path, a.code))
		}
	}
	return found
}

// wait waits until a request is held.
func (w *world) wait(t *trap) {
	w.t.Helper()
	select {
	case <-t.sprung:
	case <-time.After(waitTimeout):
		w.t.Fatalf("no %s %s (%q, number %d) within %s", t.method, t.path, t.body, t.nth, waitTimeout)
	}
}

// ca returns the certificate by which clients of the gate know it, PEM-encoded.
func (g *gate) ca() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: g.server.Certificate().Raw})
}

func (g *gate) port() string {
	_, port, _ := net.SplitHostPort(g.server.Listener.Addr().String()) // a listener's address has a port
	return port
}

// through returns config with the way through the gate in place of the one it had.
func (g *gate) through(config *clientcmdapi.Config) *clientcmdapi.Config {
	config = config.DeepCopy()
	cluster := config.Clusters[config.Contexts[config.CurrentContext].Cluster]
	cluster.Server, cluster.CertificateAuthorityData, cluster.TLSServerName = g.server.URL, g.ca(), ""
	return config
}

// kubeconfig writes a kubeconfig without credentials of worth that leads through the gate and returns its path.
func (w *world) kubeconfig(name string, g *gate) string {
	w.t.Helper()
	config := clientcmdapi.NewConfig()
	config.Clusters["gate"] = clientcmdapi.NewCluster()
	config.AuthInfos["nobody"] = &clientcmdapi.AuthInfo{Token: "none"} // without any, kubectl asks for a password
	config.Contexts["gate"] = &clientcmdapi.Context{Cluster: "gate", AuthInfo: "nobody"}
	config.CurrentContext = "gate"
	raw, err := clientcmd.Write(*g.through(config))
	if err != nil {
		w.t.Fatal(err)
	}
	return w.save(name, string(raw))
}
