package hub

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// A hub that was killed is followed by another one within 15 s: the lease ends leaseDuration after its last renewal, and the next one asks
// every retryPeriod. A leader that cannot renew gives up after renewDeadline, which is before anybody else may lead.
const (
	leaseDuration = 8 * time.Second
	renewDeadline = 5 * time.Second
	retryPeriod   = time.Second
)

// leaseName names the Lease in kube.AgentNamespace that the active hub of a shard holds.
func leaseName(shard fleet.Shard) string {
	if shard.IsDefault() {
		return "towline-hub"
	}
	return "towline-hub-" + string(shard)
}

// tenure is what a process knows of its own lead.
type tenure struct {
	clock clock.PassiveClock
	// mu guards renewed, which is zero while this process does not lead.
	mu      sync.Mutex
	renewed time.Time
}

// lapsed says whether this process leads as far as it knows, although its lease has ended.
func (t *tenure) lapsed() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return !t.renewed.IsZero() && t.clock.Since(t.renewed) > leaseDuration
}

func (t *tenure) wrote(record resourcelock.LeaderElectionRecord, identity string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.renewed = time.Time{}
	if record.HolderIdentity == identity {
		t.renewed = t.clock.Now()
	}
}

// watchedLock is a lock that notes when its lease was renewed.
type watchedLock struct {
	resourcelock.Interface
	tenure *tenure
}

// newLock returns the lock that the hubs of a shard elect their leader with.
func newLock(cfg *rest.Config, shard fleet.Shard, tenure *tenure) (resourcelock.Interface, error) {
	host, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("find the name of this host: %w", err)
	}
	lock, err := resourcelock.NewFromKubeconfig(resourcelock.LeasesResourceLock, kube.AgentNamespace, leaseName(shard),
		resourcelock.ResourceLockConfig{Identity: host + "_" + string(uuid.NewUUID())}, cfg, renewDeadline)
	if err != nil {
		return nil, fmt.Errorf("make the lock of the lead: %w", err)
	}
	return &watchedLock{Interface: lock, tenure: tenure}, nil
}

// Create takes the lead where nobody had it.
func (l *watchedLock) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	err := l.Interface.Create(ctx, record)
	if err == nil {
		l.tenure.wrote(record, l.Identity())
	}
	return err
}

// Update takes, keeps or gives up the lead.
func (l *watchedLock) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	err := l.Interface.Update(ctx, record)
	if err == nil {
		l.tenure.wrote(record, l.Identity())
	}
	return err
}
