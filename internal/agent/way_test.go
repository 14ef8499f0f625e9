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

// front stands between agent and hub and sees the requests.
type front struct {
	server *httptest.Server
	// mu guards the fields below.
	mu sync.Mutex
	// seen holds "METHOD path" of each request.
	seen []string
	// lose says what becomes of a request: nothing, loss on the way to the hub, or loss of the answer.
	lose func(*http.Request) fate
}

type fate int

const (
	arrives fate = iota
	lostBefore
	lostAfter
	refused // by an API server that does not know the credential
)

// stand puts a front before the hub; manifests from now on lead there.
func (w *world) stand() *front {
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
	f := &front{}
	f.server = httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		switch f.note(r) {
		case lostBefore:
			panic(http.ErrAbortHandler)
		case lostAfter:
			proxy.ServeHTTP(httptest.NewRecorder(), r)
			panic(http.ErrAbortHandler)
		case refused:
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
	w.way = func(config *clientcmdapi.Config) {
		for _, cluster := range config.Clusters {
			cluster.Server, cluster.CertificateAuthorityData = f.server.URL, ca
		}
	}
	return f
}

// unauthorized answers as an API server does.
func unauthorized(rw http.ResponseWriter) {
	rw.Header().Set("Content-Type", "application/json")
	rw.WriteHeader(http.StatusUnauthorized)
	_, _ = rw.Write([]byte(`{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"Unauthorized","reason":"Unauthorized","code":401}`))
}

func (f *front) note(r *http.Request) fate {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.seen = append(f.seen, r.Method+" "+r.URL.Path)
	if f.lose == nil {
		return arrives
	}
	return f.lose(r)
}

func (f *front) losing(lose func(*http.Request) fate) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lose = lose
}

func (f *front) requests() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.seen)
}

// count returns how many requests had what in method and path.
func (f *front) count(what string) int {
	found := slices.DeleteFunc(f.requests(), func(seen string) bool { return !strings.Contains(seen, what) })
	return len(found)
}

// breaker lets a number of writes through to the member, and then nothing any more.
type breaker struct {
	// mu guards the fields below.
	mu    sync.Mutex
	armed bool
	left  int
	// broken is closed when the first request is refused.
	broken chan struct{}
}

var errBroken = errors.New("cut off")

func newBreaker(writes int) *breaker { return &breaker{left: writes, broken: make(chan struct{})} }

// arm starts the counting.
func (b *breaker) arm() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.armed = true
}

func (b *breaker) allow(method string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.armed {
		return true
	}
	if method == http.MethodGet && b.left >= 0 {
		return true
	}
	if b.left == 0 {
		close(b.broken)
	}
	b.left--
	return b.left >= 0
}

// wrap returns a way to the member with b in it.
func (b *breaker) wrap(member *rest.Config) *rest.Config {
	config := rest.CopyConfig(member)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if !b.allow(r.Method) {
				return nil, errBroken
			}
			return next.RoundTrip(r)
		})
	})
	return config
}

type roundTripper func(*http.Request) (*http.Response, error)

// RoundTrip calls the function.
func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// journal is a log that a test can read.
type journal struct {
	// mu guards lines.
	mu    sync.Mutex
	lines []string
}

func (j *journal) context(t *testing.T) context.Context {
	t.Helper()
	return log.IntoContext(t.Context(), j.logger())
}

func (j *journal) logger() logr.Logger {
	return funcr.New(func(_, line string) {
		j.mu.Lock()
		defer j.mu.Unlock()
		j.lines = append(j.lines, line)
	}, funcr.Options{})
}

// with returns the lines that hold text.
func (j *journal) with(text string) []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(j.lines), func(line string) bool { return !strings.Contains(line, text) })
}

// errors returns the lines at error level.
func (j *journal) errors() []string {
	return slices.DeleteFunc(j.with(""), func(line string) bool { return strings.Contains(line, `"level"=`) })
}
