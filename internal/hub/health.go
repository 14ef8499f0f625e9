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
	// checkInterval is the time between two checks of the API server and the caches. checkTimeout limits one check.
	checkInterval = 5 * time.Second
	checkTimeout  = 5 * time.Second
	// maxAnswerAge is the maximum age of the API server's last answer while the hub is ready. Two failed checks in a row
	// keep the hub ready.
	maxAnswerAge = 3*checkInterval + checkTimeout
	// maxAnswerGap is the maximum time between two answers; a longer gap is an outage. After an outage the heartbeat limit
	// of each agent starts again. A single failed check is no outage: otherwise, with frequent single failures, the hub
	// would never find that an agent is silent.
	maxAnswerGap = 2*checkInterval + checkTimeout
	// maxCheckAge is the maximum time since the last check. If it is exceeded, the process hangs and must be restarted.
	maxCheckAge = time.Minute
	// cacheSyncTimeout is the maximum time for the caches to sync while the API server answers. After that the process
	// must be restarted.
	cacheSyncTimeout = 10 * time.Minute
)

// health checks the API server and the caches of the hub in the background, and keeps the last results.
type health struct {
	clock        clock.WithTicker
	leaseTracker *leaseTracker
	// probe reads a small object from the storage of the API server.
	probe func(context.Context) error

	// mu guards the following fields.
	mu sync.Mutex
	// checkCaches returns whether all caches are synced; it is nil until setCacheCheck is called. areCachesSynced is its
	// last result.
	checkCaches     func(context.Context) (bool, error)
	areCachesSynced bool
	// checkedAt is the end of the last check, and answeredAt the time of the API server's last answer. unsyncedSince is
	// the first check with an answer and caches that are not synced; zero if they are synced or there is no answer.
	// availableFrom is the time of the first answer after the last outage.
	checkedAt, answeredAt, unsyncedSince, availableFrom time.Time
}

func newHealth(cfg *rest.Config, clock clock.WithTickerAndDelayedExecution) (*health, error) {
	cfg = rest.CopyConfig(cfg)
	cfg.Timeout = checkTimeout
	api, err := discovery.NewDiscoveryClientForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("create a client of the hub: %w", err)
	}
	return &health{
		clock: clock, leaseTracker: newLeaseTracker(clock), checkedAt: clock.Now(),
		probe: func(ctx context.Context) error {
			return api.RESTClient().Get().AbsPath("/api/v1/namespaces", metav1.NamespaceSystem).Do(ctx).Error()
		},
	}, nil
}

// setCacheCheck sets checkCaches. The hub is not ready until it is called.
func (h *health) setCacheCheck(areSynced func(context.Context) (bool, error)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.checkCaches = areSynced
}

// run checks the API server and the caches periodically until ctx ends.
func (h *health) run(ctx context.Context) {
	ticker := h.clock.NewTicker(checkInterval)
	defer ticker.Stop()
	for {
		h.check(ctx)
		h.mu.Lock()
		wait := ticker.C()
		if !h.areCachesSynced && h.checkCaches != nil && h.clock.Since(h.answeredAt) < checkInterval {
			// Check more often, so that the hub is ready soon after the caches are synced.
			wait = h.clock.After(checkInterval / 10)
		}
		h.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-wait:
		}
	}
}

func (h *health) check(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	probeErr := h.probe(ctx)
	h.mu.Lock()
	areSynced := h.checkCaches
	h.mu.Unlock()
	synced := false
	if areSynced != nil {
		// An error means that the caches are not synced.
		synced, _ = areSynced(ctx)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.checkedAt, h.areCachesSynced = h.clock.Now(), synced
	if probeErr == nil {
		if h.checkedAt.Sub(h.answeredAt) > maxAnswerGap {
			h.availableFrom = h.checkedAt
		}
		h.answeredAt = h.checkedAt
	}
	switch {
	case synced || probeErr != nil:
		h.unsyncedSince = time.Time{}
	case h.unsyncedSince.IsZero():
		h.unsyncedSince = h.checkedAt
	}
}

// availableSince returns the end of the API server's last outage, or the present time during an outage. The heartbeats
// of agents count from then.
func (h *health) availableSince() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	if now := h.clock.Now(); now.Sub(h.answeredAt) > maxAnswerGap {
		return now
	}
	return h.availableFrom
}

// Alive returns an error if the process must be restarted.
func (h *health) Alive() error {
	if h.leaseTracker.isOverdue() {
		return errors.New("the leader lease expired")
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.clock.Since(h.checkedAt) > maxCheckAge:
		return errors.New("the process hangs")
	case !h.unsyncedSince.IsZero() && h.clock.Since(h.unsyncedSince) > cacheSyncTimeout:
		return errors.New("informer caches did not sync")
	default:
		return nil
	}
}

// Ready returns an error unless the hub works, or is a standby that could become the leader at once.
func (h *health) Ready() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.clock.Since(h.answeredAt) > maxAnswerAge:
		return errors.New("the API server of the hub does not answer")
	case !h.areCachesSynced:
		return errors.New("informer caches are not synced yet")
	default:
		return nil
	}
}

// cacheCheckFunc returns a function for setCacheCheck. It checks the informers of the main kinds.
func cacheCheckFunc(informers cache.Informers) func(context.Context) (bool, error) {
	kinds := append(fleet.NewObjects(), &libv1beta1.ConfigurationGroup{}, &configv1beta1.ClusterSummary{}, &coordinationv1.Lease{})
	return func(ctx context.Context) (bool, error) {
		for _, kind := range kinds {
			informer, err := informers.GetInformer(ctx, kind, cache.BlockUntilSynced(false))
			if err != nil {
				return false, fmt.Errorf("get the informer of %T: %w", kind, err)
			}
			if !informer.HasSynced() {
				return false, nil
			}
		}
		return true, nil
	}
}
