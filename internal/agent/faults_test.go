package agent_test

import (
	"context"
	"encoding/pem"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"k8s.io/client-go/rest"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

// hubProxy is a proxy between the agent and the hub. It records the requests, and can drop or reject them.
type hubProxy struct {
	server *httptest.Server
	// mu guards the fields below.
	mu sync.Mutex
	// seen has "METHOD path" of each request.
	seen []string
	// decide returns the outcome of a request; nil forwards all.
	decide func(*http.Request) outcome
}

type outcome int

const (
	isForwarded outcome = iota
	requestLost
	responseLost
	isRejected // as by an API server that does not accept the credential
)

// startHubProxy starts a proxy in front of the hub. Later manifests have its address.
func (w *world) startHubProxy() *hubProxy {
	w.t.Helper()
	target, err := url.Parse(w.hub.Config.Host)
	if err != nil {
		w.t.Fatal(err)
	}
	transport, err := rest.TransportFor(rest.AnonymousClientConfig(w.hub.Config))
	if err != nil {
		w.t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.Transport, proxy.FlushInterval = transport, -1
	proxy.ErrorHandler = func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) }
	f := &hubProxy{}
	f.server = httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		switch f.record(r) {
		case requestLost:
			panic(http.ErrAbortHandler)
		case responseLost:
			proxy.ServeHTTP(httptest.NewRecorder(), r)
			panic(http.ErrAbortHandler)
		case isRejected:
			unauthorized(rw)
		default:
			proxy.ServeHTTP(rw, r)
		}
	}))
	f.server.EnableHTTP2 = true
	f.server.StartTLS()
	w.t.Cleanup(func() {
		f.server.CloseClientConnections()
		f.server.Close()
	})
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: f.server.Certificate().Raw})
	w.changeKubeconfig = func(config *clientcmdapi.Config) {
		for _, cluster := range config.Clusters {
			cluster.Server, cluster.CertificateAuthorityData = f.server.URL, ca
		}
	}
	return f
}

// unauthorized writes the response of an API server.
func unauthorized(rw http.ResponseWriter) {
	rw.Header().Set("Content-Type", "application/json")
	rw.WriteHeader(http.StatusUnauthorized)
	_, _ = rw.Write([]byte(`{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"Unauthorized","reason":"Unauthorized","code":401}`))
}

func (f *hubProxy) record(r *http.Request) outcome {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.seen = append(f.seen, r.Method+" "+r.URL.Path)
	if f.decide == nil {
		return isForwarded
	}
	return f.decide(r)
}

func (f *hubProxy) setDecision(decide func(*http.Request) outcome) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.decide = decide
}

func (f *hubProxy) requests() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.seen)
}

// count returns the number of requests whose method and path contain text.
func (f *hubProxy) count(text string) int {
	found := slices.DeleteFunc(f.requests(), func(seen string) bool { return !strings.Contains(seen, text) })
	return len(found)
}

// writeLimiter allows a number of writes to the member, and then refuses all requests.
type writeLimiter struct {
	// mu guards the fields below.
	mu       sync.Mutex
	isActive bool
	left     int
	// refused is closed when the first request is refused.
	refused chan struct{}
}

var errCutOff = errors.New("cut off")

func newWriteLimiter(writes int) *writeLimiter {
	return &writeLimiter{left: writes, refused: make(chan struct{})}
}

// activate starts the count.
func (b *writeLimiter) activate() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.isActive = true
}

func (b *writeLimiter) allow(method string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.isActive {
		return true
	}
	if method == http.MethodGet && b.left >= 0 {
		return true
	}
	if b.left == 0 {
		close(b.refused)
	}
	b.left--
	return b.left >= 0
}

// wrap returns a configuration for the member whose requests pass b.
func (b *writeLimiter) wrap(member *rest.Config) *rest.Config {
	config := rest.CopyConfig(member)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if !b.allow(r.Method) {
				return nil, errCutOff
			}
			return next.RoundTrip(r)
		})
	})
	return config
}

type roundTripper func(*http.Request) (*http.Response, error)

// RoundTrip calls the function.
func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// logRecorder is a log that a test can read.
type logRecorder struct {
	// mu guards lines.
	mu    sync.Mutex
	lines []string
}

func (j *logRecorder) intoContext(t *testing.T) context.Context {
	t.Helper()
	return log.IntoContext(t.Context(), j.logger())
}

func (j *logRecorder) logger() logr.Logger {
	return funcr.New(func(_, line string) {
		j.mu.Lock()
		defer j.mu.Unlock()
		j.lines = append(j.lines, line)
	}, funcr.Options{})
}

// linesWith returns the lines that contain text.
func (j *logRecorder) linesWith(text string) []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(j.lines), func(line string) bool { return !strings.Contains(line, text) })
}

// errorLines returns the lines at error level.
func (j *logRecorder) errorLines() []string {
	return slices.DeleteFunc(j.linesWith(""), func(line string) bool { return strings.Contains(line, `"level"=`) })
}
