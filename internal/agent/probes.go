package agent

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/client-go/util/cert"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

const (
	headerLimit   = 10 * time.Second
	shutdownLimit = 2 * time.Second
)

// probes serves health and metrics until ctx ends.
type probes struct {
	ready   atomic.Bool
	metrics *metrics
}

// run serves at the two addresses; an empty one serves nothing. An address that another process on this machine has is left out with a
// message: agents of several clusters may share a machine, and their work does not depend on it.
func (p *probes) run(ctx context.Context, health, diagnostics string) error {
	var serving sync.WaitGroup
	defer serving.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, endpoint := range []struct {
		address string
		handler http.Handler
		secure  *tls.Config
	}{{health, p.healthHandler(), nil}, {diagnostics, p.diagnosticsHandler(), selfSigned()}} {
		if endpoint.address == "" {
			continue
		}
		listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", endpoint.address)
		if errors.Is(err, syscall.EADDRINUSE) {
			log.FromContext(ctx).Info("not serving: the address is in use", "address", endpoint.address)
			continue
		}
		if err != nil {
			return fmt.Errorf("listen on %s: %w", endpoint.address, err)
		}
		if endpoint.secure != nil {
			listener = tls.NewListener(listener, endpoint.secure)
		}
		server := &http.Server{Handler: endpoint.handler, ReadHeaderTimeout: headerLimit}
		serving.Go(func() { _ = server.Serve(listener) })
		serving.Go(func() {
			<-ctx.Done()
			stopping, done := context.WithTimeout(context.WithoutCancel(ctx), shutdownLimit)
			defer done()
			_ = server.Shutdown(stopping)
		})
	}
	<-ctx.Done()
	return nil
}

func (p *probes) healthHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok")) })
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) {
		if !p.ready.Load() {
			http.Error(w, "the cluster's own API has not answered yet", http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte("ok"))
	})
	return mux
}

func (p *probes) diagnosticsHandler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(p.metrics.registry, promhttp.HandlerOpts{}))
	return mux
}

// selfSigned makes a certificate when the first client asks for it.
func selfSigned() *tls.Config {
	certificate := sync.OnceValues(func() (*tls.Certificate, error) {
		crt, key, err := cert.GenerateSelfSignedCertKey("localhost", nil, nil)
		if err != nil {
			return nil, fmt.Errorf("make certificate for metrics: %w", err)
		}
		pair, err := tls.X509KeyPair(crt, key)
		return &pair, err
	})
	return &tls.Config{
		MinVersion:     tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return certificate() },
	}
}
