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

// stillLimit is how long the loop that keeps in touch with the hub may stand still before the agent is to be started anew: some turns of
// it, each with requests that take as long as they may, whether or not the hub answers them. missedTurns is the same for slow heartbeats.
const (
	stillLimit  = 5 * time.Minute
	missedTurns = 5
)

// Probes serves health and metrics until ctx ends.
type Probes struct {
	// Ready is set once the member's own API has answered, also in an agent that only waits for its turn to work.
	Ready atomic.Bool
	// Metrics are what is served.
	Metrics *prometheus.Registry
	// Member is whom to ask who may read the metrics.
	Member *rest.Config
	// Pulse fails when the agent is to be started anew.
	Pulse interface{ Check() error }
}

// Pulse notes that the loop which keeps in touch with the hub turns.
type Pulse struct {
	clock clock.PassiveClock
	limit time.Duration
	// last is when it turned last, in Unix nanoseconds.
	last atomic.Int64
}

// NewPulse returns a Pulse that turned just now, of an agent that beats in this interval.
func NewPulse(clock clock.PassiveClock, heartbeat time.Duration) *Pulse {
	p := &Pulse{clock: clock, limit: max(stillLimit, missedTurns*heartbeat)}
	p.Turned()
	return p
}

// Turned says that the loop turned.
func (p *Pulse) Turned() { p.last.Store(p.clock.Now().UnixNano()) }

// Check fails if the loop stands still.
func (p *Pulse) Check() error {
	if p.clock.Since(time.Unix(0, p.last.Load())) > p.limit {
		return errors.New("the loop that keeps in touch with the hub stands still")
	}
	return nil
}

// Run serves at the two addresses; an empty one serves nothing. An address that another process on this machine has is left out with a
// message: agents of several clusters may share a machine, and their work does not depend on it.
func (p *Probes) Run(ctx context.Context, health, metrics string) error {
	guarded, err := diagnostics.Guard(p.Member, promhttp.HandlerFor(p.Metrics, promhttp.HandlerOpts{}))
	if err != nil {
		return err
	}
	protected := http.NewServeMux()
	protected.Handle("GET /metrics", guarded)
	var serving sync.WaitGroup
	defer serving.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, endpoint := range []struct {
		address string
		handler http.Handler
		secure  func(net.Listener) net.Listener
	}{
		{health, diagnostics.Health(p.Pulse.Check, p.answered), func(l net.Listener) net.Listener { return l }},
		{metrics, protected, diagnostics.Secure},
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
		serving.Go(func() {
			if err := diagnostics.Serve(ctx, endpoint.secure(listener), endpoint.handler); err != nil {
				log.FromContext(ctx).Info("not serving any more", "address", endpoint.address, "reason", err.Error())
			}
		})
	}
	<-ctx.Done()
	return nil
}

// answered fails until the member's own API has answered.
func (p *Probes) answered() error {
	if !p.Ready.Load() {
		return errors.New("the cluster's own API has not answered yet")
	}
	return nil
}
