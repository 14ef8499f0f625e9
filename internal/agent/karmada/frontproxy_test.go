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

// frontProxy is a proxy before the hub that records the certificate of each request.
type frontProxy struct {
	server *httptest.Server

	// mu guards the fields below.
	mu sync.Mutex
	// open counts the open watches by certificate and resource.
	open map[string]map[string]int
	// lists are the resources that were listed, as a watch does that cannot continue.
	lists []string
}

// startFrontProxy starts a frontProxy, and writes its address into the agent's kubeconfig.
func (w *world) startFrontProxy() *frontProxy {
	w.t.Helper()
	upstream, err := url.Parse(w.hub.Config.Host)
	if err != nil {
		w.t.Fatal(err)
	}
	transport, err := rest.TransportFor(w.hub.Config)
	if err != nil {
		w.t.Fatal(err)
	}
	i := &frontProxy{open: map[string]map[string]int{}}
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(upstream)
			subject := r.In.TLS.PeerCertificates[0].Subject
			r.Out.Header.Set("Impersonate-User", subject.CommonName)
			r.Out.Header["Impersonate-Group"] = subject.Organization
		},
		Transport: transport, FlushInterval: -1,
		// The client of a cancelled request does not read the response.
		ErrorHandler: func(rw http.ResponseWriter, _ *http.Request, _ error) { rw.WriteHeader(http.StatusBadGateway) },
	}
	authorities := x509.NewCertPool()
	authorities.AppendCertsFromPEM(w.hub.Config.CAData)
	i.server = httptest.NewUnstartedServer(i.count(proxy))
	i.server.TLS = &tls.Config{ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: authorities}
	i.server.EnableHTTP2 = true
	i.server.Config.ErrorLog = log.New(io.Discard, "", 0) // it logs each rejected connection
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
	w.writeKubeconfig(kubeconfig)
	return i
}

func (i *frontProxy) count(next http.Handler) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		query, resource := r.URL.Query(), r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
		if end := r.TLS.PeerCertificates[0].NotAfter; time.Now().After(end) {
			// The TLS handshake of the next connection fails.
			rw.Header().Set("Connection", "close")
			rw.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		// kube.DetectRestore checks with lists of one item.
		if query.Has("sendInitialEvents") || query.Has("limit") && query.Get("limit") != "1" {
			i.mu.Lock()
			i.lists = append(i.lists, resource)
			i.mu.Unlock()
		}
		if query.Has("watch") {
			certificate := certificateID(r.TLS.PeerCertificates[0])
			i.add(certificate, resource, 1)
			defer i.add(certificate, resource, -1)
		}
		next.ServeHTTP(rw, r)
	})
}

func (i *frontProxy) add(certificate, resource string, n int) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.open[certificate] == nil {
		i.open[certificate] = map[string]int{}
	}
	if i.open[certificate][resource] += n; i.open[certificate][resource] == 0 {
		delete(i.open[certificate], resource)
	}
	if len(i.open[certificate]) == 0 {
		delete(i.open, certificate)
	}
}

// wantWatches returns a check that each watch is open once, all with this certificate.
func (i *frontProxy) wantWatches(certificate string) func(context.Context) error {
	return func(context.Context) error {
		i.mu.Lock()
		defer i.mu.Unlock()
		want := map[string]int{"clusters": 1, "works": 1, "configurationgroups": 1}
		if len(i.open) != 1 || !maps.Equal(i.open[certificate], want) {
			return fmt.Errorf("the watches are %v, want %v with %s", i.open, want, certificate)
		}
		return nil
	}
}

// takeLists returns the lists since the previous call.
func (i *frontProxy) takeLists() []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	lists := i.lists
	i.lists = nil
	return lists
}
