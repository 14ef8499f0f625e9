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
	headerLimit   = 10 * time.Second
	shutdownLimit = 2 * time.Second
)

// Listen opens a TCP address for Serve.
func Listen(ctx context.Context, address string) (net.Listener, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", address, err)
	}
	return listener, nil
}

// Secure makes listener speak TLS with a certificate of its own, which is made when the first client asks for it and signed by nobody:
// clients that want to know whom they talk to need other means.
func Secure(listener net.Listener) net.Listener {
	certificate := sync.OnceValues(func() (*tls.Certificate, error) {
		crt, key, err := cert.GenerateSelfSignedCertKey("localhost", nil, nil)
		if err != nil {
			return nil, fmt.Errorf("make certificate for metrics: %w", err)
		}
		pair, err := tls.X509KeyPair(crt, key)
		return &pair, err
	})
	return tls.NewListener(listener, &tls.Config{
		MinVersion:     tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return certificate() },
	})
}

// Serve answers on listener until ctx ends, and closes it. It returns an error if it ends before.
func Serve(ctx context.Context, listener net.Listener, handler http.Handler) error {
	server := &http.Server{Handler: handler, ReadHeaderTimeout: headerLimit}
	stopped := make(chan struct{})
	ending, end := context.WithCancel(ctx)
	go func() {
		defer close(stopped)
		<-ending.Done()
		stopping, done := context.WithTimeout(context.WithoutCancel(ctx), shutdownLimit)
		defer done()
		if err := server.Shutdown(stopping); err != nil {
			_ = server.Close()
		}
	}()
	err := server.Serve(listener)
	end()
	<-stopped
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serve on %s: %w", listener.Addr(), err)
}

// Health answers /healthz with what alive says, and /readyz with what ready says: that all is well (nil), or what is not. alive should
// fail only if the process should be started anew.
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
