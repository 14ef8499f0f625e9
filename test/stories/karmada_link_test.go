package stories

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"log"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/towline/towline/internal/localkube"
)

// hubLink stands between an agent and the hub, checks its certificate as the hub does, and remembers what it asks and
// what it is answered. For it a certificate has expired as soon as a newer one has been in use for a while.
type hubLink struct {
	server *httptest.Server

	// mu guards the fields below.
	mu sync.Mutex
	// answers are those since forget was called, and serials the certificates that they were asked with, in the order in
	// which they appeared.
	answers []answer
	serials []string
	// watches are the paths of the watches that were opened since then.
	watches []string
	// open ends the requests that are under way, by the certificate that each was made with.
	open map[*http.Request]context.CancelFunc
	// expired is how many of the serials are not valid any more.
	expired int
	// lost are the requests and connections that failed before the hub could answer.
	lost []string
}

// overlap is how long an agent may take to leave its old certificate behind.
const overlap = 15 * time.Second

// link opens a link to the hub.
func (w *world) link() *hubLink {
	w.t.Helper()
	upstream, err := url.Parse(w.hub.Config.Host)
	if err != nil {
		w.t.Fatal(err)
	}
	config := rest.CopyConfig(w.hub.Config)
	config.NextProtos = []string{"http/1.1"} // as for a gate
	transport, err := rest.TransportFor(config)
	if err != nil {
		w.t.Fatal(err)
	}
	l := &hubLink{open: map[*http.Request]context.CancelFunc{}}
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(upstream)
			// The link acts for whoever the certificate says.
			subject := r.In.TLS.PeerCertificates[0].Subject
			r.Out.Header.Set("Impersonate-User", subject.CommonName)
			r.Out.Header["Impersonate-Group"] = subject.Organization
		},
		Transport:      transport,
		FlushInterval:  -1,
		ModifyResponse: l.note,
		ErrorHandler: func(rw http.ResponseWriter, r *http.Request, err error) {
			if r.Context().Err() == nil { // otherwise nobody waits for the answer any more
				l.loses(fmt.Sprintf("%s %s: %v", r.Method, r.URL.Path, err))
			}
			rw.WriteHeader(http.StatusBadGateway)
		},
	}
	authorities := x509.NewCertPool()
	authorities.AppendCertsFromPEM(w.hub.Config.CAData)
	l.server = httptest.NewUnstartedServer(l.admits(proxy))
	l.server.TLS = &tls.Config{ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: authorities}
	l.server.EnableHTTP2 = true
	l.server.Config.ErrorLog = log.New(handshakes{l}, "", 0)
	l.server.StartTLS()
	w.t.Cleanup(func() {
		l.server.CloseClientConnections()
		l.server.Close()
	})
	return l
}

func (l *hubLink) note(r *http.Response) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answers = append(l.answers, answer{method: r.Request.Method, path: r.Request.URL.Path, code: r.StatusCode})
	return nil
}

// admits lets the requests through whose certificate has not expired.
func (l *hubLink) admits(next http.Handler) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		if !l.enters(r, cancel) {
			http.Error(rw, "the certificate has expired", http.StatusUnauthorized)
			return
		}
		defer l.leaves(r)
		next.ServeHTTP(rw, r.WithContext(ctx))
	})
}

// enters notes a request and its certificate, and says whether that is still good.
func (l *hubLink) enters(r *http.Request, cancel context.CancelFunc) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	serial := serialOf(r)
	if !slices.Contains(l.serials, serial) {
		l.serials = append(l.serials, serial)
		newest := len(l.serials) - 1
		time.AfterFunc(overlap, func() { l.expires(newest) })
	}
	if slices.Index(l.serials, serial) < l.expired {
		l.lost = append(l.lost, fmt.Sprintf("%s %s: made with a certificate that has expired", r.Method, r.URL.Path))
		return false
	}
	if r.URL.Query().Has("watch") {
		l.watches = append(l.watches, r.URL.Path+"?"+r.URL.Query().Get("fieldSelector"))
	}
	l.open[r] = cancel
	return true
}

func (l *hubLink) leaves(r *http.Request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.open, r)
}

// expires makes the first n certificates worthless, and ends the requests that are still open with them.
func (l *hubLink) expires(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.expired = max(l.expired, n)
	for r, cancel := range l.open {
		if slices.Index(l.serials, serialOf(r)) < l.expired {
			l.lost = append(l.lost, fmt.Sprintf("%s %s: open when its certificate expired", r.Method, r.URL.Path))
			cancel()
		}
	}
}

func serialOf(r *http.Request) string { return r.TLS.PeerCertificates[0].SerialNumber.String() }

func (l *hubLink) loses(what string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lost = append(l.lost, what)
}

// handshakes is where a server says what went wrong with connections.
type handshakes struct{ link *hubLink }

func (h handshakes) Write(line []byte) (int, error) {
	if bytes.Contains(line, []byte("TLS handshake error")) {
		h.link.loses(strings.TrimSpace(string(line)))
	}
	return len(line), nil
}

// watched are the paths and field selectors of the watches that were opened, each once.
func (l *hubLink) watched() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Compact(slices.Sorted(slices.Values(l.watches)))
}

// forget begins to remember anew.
func (l *hubLink) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answers, l.watches, l.lost = nil, nil, nil
}

// certificates is how many there have been, and how many of them have expired.
func (l *hubLink) certificates() (used, expired int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.serials), l.expired
}

// asked counts the requests, by what they are for.
func (l *hubLink) asked() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	counts := map[string]int{}
	for _, a := range l.answers {
		counts[a.method+" "+a.path]++
	}
	return counts
}

// failures lists the requests and connections that failed, and those that the hub did not fulfil. An agent that asks
// what became of its request for a certificate is told that it may not know until there is something to know. A status
// of a Work is written under an optimistic lock: one that follows another before the agent's cache has the former is
// refused, and written again.
func (l *hubLink) failures() (failed []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	failed = slices.Clone(l.lost)
	for _, a := range l.answers {
		waits := a.method == http.MethodGet && strings.Contains(a.path, "/certificatesigningrequests/")
		isStale := a.code == http.StatusConflict && strings.Contains(a.path, "/works/") && strings.HasSuffix(a.path, "/status")
		if a.code >= http.StatusBadRequest && !isStale && !waits {
			failed = append(failed, fmt.Sprintf("%s %s: %d", a.method, a.path, a.code))
		}
	}
	return failed
}

// freeAgent is the agent of a registered member that runs beside it, as a process of the story, and reaches the hub
// through a link.
type freeAgent struct {
	*process
	link *hubLink
	// kubeconfig is the file with its way to the hub.
	kubeconfig string
}

// freeAgent stops the agent of a member and starts one outside of it.
func (w *world) freeAgent(plane *localkube.Plane, flags ...string) *freeAgent {
	w.t.Helper()
	_, raw := w.agentConfig(plane)
	w.stopAgent(plane)
	a := &freeAgent{link: w.link()}
	config, err := clientcmd.Load(raw)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, cluster := range config.Clusters {
		cluster.Server = a.link.server.URL
		cluster.CertificateAuthorityData = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.link.server.Certificate().Raw})
	}
	if raw, err = clientcmd.Write(*config); err != nil {
		w.t.Fatal(err)
	}
	a.kubeconfig = w.save(plane.Name+"-agent.config", string(raw))
	a.process = w.start("agent of "+plane.Name, plane, "karmada-agent", append([]string{
		"--cluster-name=" + plane.Name, "--karmada-kubeconfig=" + a.kubeconfig, "--kubeconfig=" + plane.Kubeconfig,
		"--metrics-bind-address=", "--health-probe-bind-address=",
	}, flags...)...)
	return a
}

// expire puts an expired certificate in the place of the one in a kubeconfig: signed by the hub, with the same key and
// subject, but for yesterday.
func (w *world) expire(kubeconfig []byte) []byte {
	w.t.Helper()
	config, err := clientcmd.Load(kubeconfig)
	if err != nil {
		w.t.Fatal(err)
	}
	authority, key := w.hub.CertificateAuthority(w.t)
	for _, user := range config.AuthInfos {
		block, _ := pem.Decode(user.ClientCertificateData)
		template, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			w.t.Fatal(err)
		}
		template.NotBefore, template.NotAfter = time.Now().Add(-48*time.Hour), time.Now().Add(-24*time.Hour)
		template.SerialNumber = big.NewInt(time.Now().UnixNano())
		signed, err := x509.CreateCertificate(rand.Reader, template, authority, template.PublicKey, key)
		if err != nil {
			w.t.Fatal(err)
		}
		user.ClientCertificateData = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: signed})
	}
	raw, err := clientcmd.Write(*config)
	if err != nil {
		w.t.Fatal(err)
	}
	return raw
}
