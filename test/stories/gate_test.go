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
	"sync"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// moment is a request at which a gate holds whoever makes it.
type moment struct {
	method string
	path   *regexp.Regexp
	// body is a text that the request's body must contain.
	body string
	// nth is which of the matching requests is meant; 0 and 1 mean the first.
	nth int
	// answered means that the API server does what was asked, but the answer never arrives.
	answered bool
}

// trap waits for a moment; sprung is closed when a request is held.
type trap struct {
	moment
	seen   int
	sprung chan struct{}
}

// gate is a reverse proxy in front of an API server. It can hold one request until whoever made it is gone, so that a process is
// killed exactly there.
type gate struct {
	server *httptest.Server
	proxy  *httputil.ReverseProxy

	// mu guards trap.
	mu   sync.Mutex
	trap *trap
}

// gate opens a gate to the API server of config. Whoever comes through it acts with the credentials of config, or with his own if
// config has none.
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
	g := &gate{proxy: &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(upstream)
			if len(config.CertData) > 0 {
				r.Out.Header.Del("Authorization")
			}
		},
		Transport:     transport,
		FlushInterval: -1,
		// A client or an API server that is killed in the middle is the point of all this.
		ErrorHandler: func(rw http.ResponseWriter, _ *http.Request, _ error) { rw.WriteHeader(http.StatusBadGateway) },
	}}
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
	t := &trap{moment: m, sprung: make(chan struct{})}
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
	if t.answered {
		g.proxy.ServeHTTP(httptest.NewRecorder(), r)
	}
	close(t.sprung)
	<-r.Context().Done()
}

// caught returns the trap, and whether the request springs it.
func (g *gate) caught(r *http.Request) (t *trap, caught bool, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	t = g.trap
	if t == nil || r.Method != t.method || !t.path.MatchString(r.URL.Path) {
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
	g.trap = nil
	return t, true, nil
}

// wait waits until a request is held.
func (w *world) wait(t *trap) {
	w.t.Helper()
	select {
	case <-t.sprung:
	case <-time.After(patience):
		w.t.Fatalf("no %s %s (%q, number %d) within %s", t.method, t.path, t.body, t.nth, patience)
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
