package karmada

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/towline/towline/internal/join/register"
)

// inlet stands before the hub, and knows which certificate each request was made with.
type inlet struct {
	server *httptest.Server

	// mu guards what follows.
	mu sync.Mutex
	// open are the watches that are open, by certificate and path.
	open map[string]map[string]int
	// lists are the requests that read a list as a whole, as a watch does that cannot go on where it was.
	lists []string
}

// inlet opens one, and has the agent of the world reach the hub through it.
func (w *world) inlet() *inlet {
	w.t.Helper()
	upstream, err := url.Parse(w.hub.Config.Host)
	if err != nil {
		w.t.Fatal(err)
	}
	transport, err := rest.TransportFor(w.hub.Config)
	if err != nil {
		w.t.Fatal(err)
	}
	i := &inlet{open: map[string]map[string]int{}}
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(upstream)
			subject := r.In.TLS.PeerCertificates[0].Subject
			r.Out.Header.Set("Impersonate-User", subject.CommonName)
			r.Out.Header["Impersonate-Group"] = subject.Organization
		},
		Transport: transport, FlushInterval: -1,
		// Nobody waits for the answer of what is cut off.
		ErrorHandler: func(rw http.ResponseWriter, _ *http.Request, _ error) { rw.WriteHeader(http.StatusBadGateway) },
	}
	authorities := x509.NewCertPool()
	authorities.AppendCertsFromPEM(w.hub.Config.CAData)
	i.server = httptest.NewUnstartedServer(i.count(proxy))
	i.server.TLS = &tls.Config{ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: authorities}
	i.server.EnableHTTP2 = true
	i.server.Config.ErrorLog = log.New(io.Discard, "", 0) // it tells of each connection that it refuses
	i.server.StartTLS()
	w.t.Cleanup(func() {
		i.server.CloseClientConnections()
		i.server.Close()
	})
	raw, err := clientcmd.Load(w.secret().Data[register.KubeconfigKey])
	if err != nil {
		w.t.Fatal(err)
	}
	for _, cluster := range raw.Clusters {
		cluster.Server = i.server.URL
		cluster.CertificateAuthorityData = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: i.server.Certificate().Raw})
	}
	kubeconfig, err := clientcmd.Write(*raw)
	if err != nil {
		w.t.Fatal(err)
	}
	w.keep(kubeconfig)
	return i
}

func (i *inlet) count(next http.Handler) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		query, resource := r.URL.Query(), r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
		if end := r.TLS.PeerCertificates[0].NotAfter; time.Now().After(end) {
			// The next connection does not come about.
			rw.Header().Set("Connection", "close")
			rw.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		// A list of one item is the check of kube.DetectRestore.
		if query.Has("sendInitialEvents") || query.Has("limit") && query.Get("limit") != "1" {
			i.mu.Lock()
			i.lists = append(i.lists, resource)
			i.mu.Unlock()
		}
		if query.Has("watch") {
			by := serial(r.TLS.PeerCertificates[0])
			i.add(by, resource, 1)
			defer i.add(by, resource, -1)
		}
		next.ServeHTTP(rw, r)
	})
}

func (i *inlet) add(by, resource string, n int) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.open[by] == nil {
		i.open[by] = map[string]int{}
	}
	if i.open[by][resource] += n; i.open[by][resource] == 0 {
		delete(i.open[by], resource)
	}
	if len(i.open[by]) == 0 {
		delete(i.open, by)
	}
}

// only checks that the agent has its watches open once, all with the certificate of that serial.
func (i *inlet) only(by string) func(context.Context) error {
	return func(context.Context) error {
		i.mu.Lock()
		defer i.mu.Unlock()
		want := map[string]int{"clusters": 1, "works": 1, "configurationgroups": 1}
		if len(i.open) != 1 || !maps.Equal(i.open[by], want) {
			return fmt.Errorf("the watches are %v, want %v with %s", i.open, want, by)
		}
		return nil
	}
}

// listed returns which lists were read since it was called last.
func (i *inlet) listed() []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	was := i.lists
	i.lists = nil
	return was
}
