package diagnostics

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"k8s.io/client-go/util/cert"
)

const (
	headerTimeout   = 10 * time.Second
	shutdownTimeout = 2 * time.Second // running requests are canceled after it
)

// Listen listens on a TCP address for Serve.
func Listen(ctx context.Context, address string) (net.Listener, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", address, err)
	}
	return listener, nil
}

// SelfSignedTLS returns a TLS listener. Its certificate is self-signed, so clients cannot verify it. The first client
// triggers its creation.
func SelfSignedTLS(listener net.Listener) net.Listener {
	certificate := sync.OnceValues(func() (*tls.Certificate, error) {
		crt, key, err := cert.GenerateSelfSignedCertKey("localhost", nil, nil)
		if err != nil {
			return nil, fmt.Errorf("create the certificate: %w", err)
		}
		pair, err := tls.X509KeyPair(crt, key)
		return &pair, err
	})
	return tls.NewListener(listener, &tls.Config{
		MinVersion:     tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return certificate() },
	})
}

// Serve serves handler on listener until ctx ends, and closes listener. It returns an error if it ends before ctx.
func Serve(ctx context.Context, listener net.Listener, handler http.Handler) error {
	server := &http.Server{Handler: handler, ReadHeaderTimeout: headerTimeout}
	stopped := make(chan struct{})
	serveCtx, cancel := context.WithCancel(ctx)
	go func() {
		defer close(stopped)
		<-serveCtx.Done()
		shutdownCtx, cancelShutdown := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
		defer cancelShutdown()
		if err := server.Shutdown(shutdownCtx); err != nil {
			_ = server.Close()
		}
	}()
	err := server.Serve(listener)
	cancel()
	<-stopped
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serve on %s: %w", listener.Addr(), err)
}

// Health returns a handler that serves the results of alive on /healthz and of ready on /readyz: 200 for nil, else 503
// with the error. alive should return an error only if the process must be restarted.
func Health(alive, ready func() error) http.Handler {
	mux := http.NewServeMux()
	for path, check := range map[string]func() error{"/healthz": alive, "/readyz": ready} {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
			if err := check(); err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
			_, _ = w.Write([]byte("ok"))
		})
	}
	return mux
}
