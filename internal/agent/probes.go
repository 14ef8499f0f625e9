package agent

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

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

// probes serves health and metrics until ctx ends.
type probes struct {
	ready   atomic.Bool
	metrics *metrics
	// member is whom to ask who may read the metrics.
	member *rest.Config
	pulse  *pulse
}

// pulse notes that the loop which keeps in touch with the hub turns.
type pulse struct {
	clock clock.PassiveClock
	limit time.Duration
	// last is when it turned last, in Unix nanoseconds.
	last atomic.Int64
}

func newPulse(clock clock.PassiveClock, heartbeat time.Duration) *pulse {
	p := &pulse{clock: clock, limit: max(stillLimit, missedTurns*heartbeat)}
	p.turned()
	return p
}

func (p *pulse) turned() { p.last.Store(p.clock.Now().UnixNano()) }

// check fails if the loop stands still.
func (p *pulse) check() error {
	if p.clock.Since(time.Unix(0, p.last.Load())) > p.limit {
		return errors.New("the loop that keeps in touch with the hub stands still")
	}
	return nil
}

// run serves at the two addresses; an empty one serves nothing. An address that another process on this machine has is left out with a
// message: agents of several clusters may share a machine, and their work does not depend on it.
func (p *probes) run(ctx context.Context, health, metrics string) error {
	guarded, err := diagnostics.Guard(p.member, promhttp.HandlerFor(p.metrics.registry, promhttp.HandlerOpts{}))
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
		{health, diagnostics.Health(p.pulse.check, p.answered), func(l net.Listener) net.Listener { return l }},
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
func (p *probes) answered() error {
	if !p.ready.Load() {
		return errors.New("the cluster's own API has not answered yet")
	}
	return nil
}
