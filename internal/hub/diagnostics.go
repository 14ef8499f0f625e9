package hub

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"syscall"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/towline/towline/internal/diagnostics"
)

// endpoints are the HTTP endpoints of a hub.
type endpoints struct {
	health *health
	// registry has the metrics of this hub; the metrics of libraries are in the registry of controller-runtime.
	registry *prometheus.Registry
}

// serve serves the endpoints at the addresses of opts in the background. stop ends that and waits for running requests.
func (e *endpoints) serve(ctx context.Context, cfg *rest.Config, opts Options) (stop func(), err error) {
	metricsHandler := promhttp.HandlerFor(prometheus.Gatherers{e.registry, metrics.Registry}, promhttp.HandlerOpts{})
	authorizedHandler, err := diagnostics.Handler(cfg, metricsHandler)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	var serving sync.WaitGroup
	stop = func() {
		cancel()
		serving.Wait()
	}
	for _, endpoint := range []struct {
		flag, address string
		handler       http.Handler
		secure        func(net.Listener) net.Listener
	}{
		{"--health-address", opts.HealthAddress, diagnostics.Health(e.health.Alive, e.health.Ready), func(l net.Listener) net.Listener { return l }},
		{"--diagnostics-address", opts.DiagnosticsAddress, authorizedHandler, diagnostics.SelfSignedTLS},
	} {
		if endpoint.address == "" {
			continue
		}
		listener, err := diagnostics.Listen(ctx, endpoint.address)
		if err != nil {
			stop()
			if errors.Is(err, syscall.EADDRINUSE) {
				err = fmt.Errorf("%w; choose another address with %s, or disable it with an empty one", err, endpoint.flag)
			}
			return nil, err
		}
		log.FromContext(ctx).Info("serving", "flag", endpoint.flag, "address", listener.Addr().String())
		serving.Go(func() {
			if err := diagnostics.Serve(ctx, endpoint.secure(listener), endpoint.handler); err != nil {
				log.FromContext(ctx).Error(err, "serve diagnostics")
			}
		})
	}
	serving.Go(func() { e.health.run(ctx) })
	return stop, nil
}
