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

// hubLink is a proxy between an agent and the hub. It verifies the agent's certificate like the hub, and records
// requests and responses. It refuses a certificate after a newer one has been in use for a while.
type hubLink struct {
	server *httptest.Server

	// mu guards the fields below.
	mu sync.Mutex
	// responses are the responses since reset was called. serials are the certificates of the requests, in the order of
	// their first use.
	responses []response
	serials   []string
	// watches are the paths of the watches that were opened since reset.
	watches []string
	// open has the functions that end the open requests.
	open map[*http.Request]context.CancelFunc
	// expired is the number of serials that are no longer valid.
	expired int
	// lost are the requests and connections that failed before the hub could respond.
	lost []string
}

// overlap is the time in which an agent may still use its old certificate.
const overlap = 15 * time.Second

// startHubLink starts a link to the hub.
func (w *world) startHubLink() *hubLink {
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
			// The link impersonates the subject of the certificate.
			subject := r.In.TLS.PeerCertificates[0].Subject
			r.Out.Header.Set("Impersonate-User", subject.CommonName)
			r.Out.Header["Impersonate-Group"] = subject.Organization
		},
		Transport:      transport,
		FlushInterval:  -1,
		ModifyResponse: l.recordResponse,
		ErrorHandler: func(rw http.ResponseWriter, r *http.Request, err error) {
			if r.Context().Err() == nil { // otherwise the client has ended the request
				l.recordLost(fmt.Sprintf("%s %s: %v", r.Method, r.URL.Path, err))
			}
			rw.WriteHeader(http.StatusBadGateway)
		},
	}
	authorities := x509.NewCertPool()
	authorities.AppendCertsFromPEM(w.hub.Config.CAData)
	l.server = httptest.NewUnstartedServer(l.checkCertificates(proxy))
	l.server.TLS = &tls.Config{ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: authorities}
	l.server.EnableHTTP2 = true
	l.server.Config.ErrorLog = log.New(tlsErrorLog{l}, "", 0)
	l.server.StartTLS()
	w.t.Cleanup(func() {
		l.server.CloseClientConnections()
		l.server.Close()
	})
	return l
}

func (l *hubLink) recordResponse(r *http.Response) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.responses = append(l.responses, response{method: r.Request.Method, path: r.Request.URL.Path, code: r.StatusCode})
	return nil
}

// checkCertificates forwards the requests whose certificate has not expired.
func (l *hubLink) checkCertificates(next http.Handler) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		if !l.startRequest(r, cancel) {
			http.Error(rw, "the certificate has expired", http.StatusUnauthorized)
			return
		}
		defer l.endRequest(r)
		next.ServeHTTP(rw, r.WithContext(ctx))
	})
}

// startRequest records a request and its certificate, and returns whether the certificate is still valid.
func (l *hubLink) startRequest(r *http.Request, cancel context.CancelFunc) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	serial := serialOf(r)
	if !slices.Contains(l.serials, serial) {
		l.serials = append(l.serials, serial)
		newest := len(l.serials) - 1
		time.AfterFunc(overlap, func() { l.expireCertificates(newest) })
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

func (l *hubLink) endRequest(r *http.Request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.open, r)
}

// expireCertificates makes the first n certificates invalid, and ends the open requests with them.
func (l *hubLink) expireCertificates(n int) {
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

func (l *hubLink) recordLost(what string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lost = append(l.lost, what)
}

// tlsErrorLog records the failed TLS handshakes of a server.
type tlsErrorLog struct{ link *hubLink }

func (h tlsErrorLog) Write(line []byte) (int, error) {
	if bytes.Contains(line, []byte("TLS handshake error")) {
		h.link.recordLost(strings.TrimSpace(string(line)))
	}
	return len(line), nil
}

// watchPaths returns the paths and field selectors of the watches that were opened, each once.
func (l *hubLink) watchPaths() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Compact(slices.Sorted(slices.Values(l.watches)))
}

// reset deletes the recorded requests.
func (l *hubLink) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.responses, l.watches, l.lost = nil, nil, nil
}

// certificateCounts returns the number of certificates, and of expired ones.
func (l *hubLink) certificateCounts() (used, expired int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.serials), l.expired
}

// requestCounts counts the requests by method and path.
func (l *hubLink) requestCounts() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	counts := map[string]int{}
	for _, a := range l.responses {
		counts[a.method+" "+a.path]++
	}
	return counts
}

// listFailures lists the requests and connections that failed, and the requests that the hub did not fulfil. The hub
// refuses two kinds of requests in normal operation: an agent reads its request for a certificate before it may, and it
// writes the status of a Work under an optimistic lock, before its cache has its last write. The agent retries both.
func (l *hubLink) listFailures() (failed []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	failed = slices.Clone(l.lost)
	for _, a := range l.responses {
		waits := a.method == http.MethodGet && strings.Contains(a.path, "/certificatesigningrequests/")
		isStale := a.code == http.StatusConflict && strings.Contains(a.path, "/works/") && strings.HasSuffix(a.path, "/status")
		if a.code >= http.StatusBadRequest && !isStale && !waits {
			failed = append(failed, fmt.Sprintf("%s %s: %d", a.method, a.path, a.code))
		}
	}
	return failed
}

// linkedAgent is the agent of a registered member that runs as a process of the story, and connects to the hub through
// a link.
type linkedAgent struct {
	*process
	link *hubLink
	// kubeconfig is the file with its kubeconfig for the hub.
	kubeconfig string
}

// startLinkedAgent stops the agent of a member and starts a linkedAgent.
func (w *world) startLinkedAgent(plane *localkube.Plane, flags ...string) *linkedAgent {
	w.t.Helper()
	_, raw := w.agentConfig(plane)
	w.stopAgent(plane)
	a := &linkedAgent{link: w.startHubLink()}
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

// expireCertificate replaces the certificate in a kubeconfig by an expired one: signed by the hub, with the same key
// and subject, but from yesterday.
func (w *world) expireCertificate(kubeconfig []byte) []byte {
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
