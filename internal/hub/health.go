package hub

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/cache"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
)

const (
	// lookInterval is the time between two looks at the API server and the caches, and lookLimit how long one may take.
	lookInterval = 5 * time.Second
	lookLimit    = 5 * time.Second
	// latelyLimit is how old the API server's last answer may be for the hub to be ready: two looks that failed.
	latelyLimit = 3*lookInterval + lookLimit
	// gapLimit is the longest time between two answers if one look fails between them. A longer one is an outage. Only an
	// outage starts the limits of silent agents again: single failures would do so without bound, and hide dead agents.
	gapLimit = 2*lookInterval + lookLimit
	// stuckLimit is how long a process may go without looking, although it looks every few seconds, before it is to be
	// started anew.
	stuckLimit = time.Minute
	// fillLimit is how long caches may take to fill, although the API server answers, before the process is to be started
	// anew.
	fillLimit = 10 * time.Minute
)

// health is what is known of how the hub is.
type health struct {
	clock        clock.WithTicker
	leaseTracker *leaseTracker
	// ask reads something small from the storage of the API server.
	ask func(context.Context) error

	// mu guards what follows.
	mu sync.Mutex
	// filled says whether the caches are full; nil while the hub starts.
	filled func(context.Context) (bool, error)
	ready  bool
	// looked is when the last look ended, answered when the API server last answered, and unfilled since when it has
	// answered without the caches being full; zero if they are, or if it does not answer. sees is the first answer after
	// the last outage.
	looked, answered, unfilled, sees time.Time
}

func newHealth(cfg *rest.Config, clock clock.WithTicker) (*health, error) {
	cfg = rest.CopyConfig(cfg)
	cfg.Timeout = lookLimit
	api, err := discovery.NewDiscoveryClientForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("make a client of the hub: %w", err)
	}
	return &health{
		clock: clock, leaseTracker: &leaseTracker{clock: clock}, looked: clock.Now(),
		ask: func(ctx context.Context) error {
			return api.RESTClient().Get().AbsPath("/api/v1/namespaces", metav1.NamespaceSystem).Do(ctx).Error()
		},
	}, nil
}

// expect makes the hub ready only when the caches are full, as filled says.
func (h *health) expect(filled func(context.Context) (bool, error)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.filled = filled
}

// watch looks now and then until ctx ends.
func (h *health) watch(ctx context.Context) {
	ticker := h.clock.NewTicker(lookInterval)
	defer ticker.Stop()
	for {
		h.look(ctx)
		h.mu.Lock()
		wait := ticker.C()
		if !h.ready && h.filled != nil && h.clock.Since(h.answered) < lookInterval {
			// Somebody waits for us to be ready.
			wait = h.clock.After(lookInterval / 10)
		}
		h.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-wait:
		}
	}
}

func (h *health) look(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, lookLimit)
	defer cancel()
	answer := h.ask(ctx)
	h.mu.Lock()
	filled := h.filled
	h.mu.Unlock()
	full := false
	if filled != nil {
		// What cannot be asked is not full.
		full, _ = filled(ctx)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.looked, h.ready = h.clock.Now(), full
	if answer == nil {
		if h.looked.Sub(h.answered) > gapLimit {
			h.sees = h.looked
		}
		h.answered = h.looked
	}
	switch {
	case full || answer != nil:
		h.unfilled = time.Time{}
	case h.unfilled.IsZero():
		h.unfilled = h.looked
	}
}

// availableSince returns since when the API server has answered without an outage; the present time during an outage.
func (h *health) availableSince() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	if now := h.clock.Now(); now.Sub(h.answered) > gapLimit {
		return now
	}
	return h.sees
}

// Alive fails if nothing but a new start of the process helps.
func (h *health) Alive() error {
	if h.leaseTracker.lapsed() {
		return errors.New("the lead was lost")
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.clock.Since(h.looked) > stuckLimit:
		return errors.New("the process hangs")
	case !h.unfilled.IsZero() && h.clock.Since(h.unfilled) > fillLimit:
		return errors.New("the caches do not fill")
	default:
		return nil
	}
}

// Ready fails unless this hub works, or could at once if it had the lead.
func (h *health) Ready() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.clock.Since(h.answered) > latelyLimit:
		return errors.New("the API server of the hub does not answer")
	case !h.ready:
		return errors.New("the caches are not full yet")
	default:
		return nil
	}
}

// allFull asks whether informers has everything that the controllers look at.
func allFull(informers cache.Informers) func(context.Context) (bool, error) {
	kinds := append(fleet.Kinds(), &libv1beta1.ConfigurationGroup{}, &configv1beta1.ClusterSummary{}, &coordinationv1.Lease{})
	return func(ctx context.Context) (bool, error) {
		for _, kind := range kinds {
			informer, err := informers.GetInformer(ctx, kind, cache.BlockUntilSynced(false))
			if err != nil {
				return false, fmt.Errorf("look into the cache of %T: %w", kind, err)
			}
			if !informer.HasSynced() {
				return false, nil
			}
		}
		return true, nil
	}
}
