package session

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/diagnostics"
)

// The agent must be restarted if its loop does not call Watchdog.Reset for missedHeartbeats intervals, but not before
// minWatchdogTimeout, which is enough for several slow requests.
const (
	minWatchdogTimeout = 5 * time.Minute
	missedHeartbeats   = 5
)

// Probes serves health and metrics until ctx ends.
type Probes struct {
	// Ready is set once the member's API has answered, also in an agent that waits to become leader.
	Ready atomic.Bool
	// Metrics is the registry to serve.
	Metrics *prometheus.Registry
	// Member is the cluster that authenticates and authorises requests for metrics.
	Member *rest.Config
	// Watchdog.Check returns an error when the agent must be restarted.
	Watchdog interface{ Check() error }
}

// Watchdog detects that the heartbeat loop is stuck.
type Watchdog struct {
	clock   clock.PassiveClock
	timeout time.Duration
	// lastReset is the time of the last Reset, in Unix nanoseconds.
	lastReset atomic.Int64
}

// NewWatchdog returns a Watchdog that was reset just now. heartbeat is the interval of the heartbeats.
func NewWatchdog(clock clock.PassiveClock, heartbeat time.Duration) *Watchdog {
	w := &Watchdog{clock: clock, timeout: max(minWatchdogTimeout, missedHeartbeats*heartbeat)}
	w.Reset()
	return w
}

// Reset records that the loop runs.
func (w *Watchdog) Reset() { w.lastReset.Store(w.clock.Now().UnixNano()) }

// Check returns an error if the loop is stuck.
func (w *Watchdog) Check() error {
	if w.clock.Since(time.Unix(0, w.lastReset.Load())) > w.timeout {
		return errors.New("the heartbeat loop is stuck")
	}
	return nil
}

// Run serves on the two addresses until ctx ends; an empty address is skipped. An address in use is skipped with a log
// message, because several agents may share a machine and an agent works without it. Other errors of Listen are
// returned.
func (p *Probes) Run(ctx context.Context, health, metrics string) error {
	authorizedHandler, err := diagnostics.Handler(p.Member, promhttp.HandlerFor(p.Metrics, promhttp.HandlerOpts{}))
	if err != nil {
		return err
	}
	var servers sync.WaitGroup
	defer servers.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, endpoint := range []struct {
		address      string
		handler      http.Handler
		wrapListener func(net.Listener) net.Listener
	}{
		{health, diagnostics.Health(p.Watchdog.Check, p.checkMember), func(l net.Listener) net.Listener { return l }},
		{metrics, authorizedHandler, diagnostics.SelfSignedTLS},
	} {
		if endpoint.address == "" {
			continue
		}
		listener, err := diagnostics.Listen(ctx, endpoint.address)
		if errors.Is(err, syscall.EADDRINUSE) {
			log.FromContext(ctx).Info("not serving: the address is in use", "address", endpoint.address)
			continue
		}
		if err != nil {
			return err
		}
		servers.Go(func() {
			if err := diagnostics.Serve(ctx, endpoint.wrapListener(listener), endpoint.handler); err != nil {
				log.FromContext(ctx).Info("not serving any more", "address", endpoint.address, "reason", err.Error())
			}
		})
	}
	<-ctx.Done()
	return nil
}

// checkMember returns an error until the member's API has answered.
func (p *Probes) checkMember() error {
	if !p.Ready.Load() {
		return errors.New("the member's API has not answered yet")
	}
	return nil
}
