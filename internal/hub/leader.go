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

// If a hub is killed, another one becomes the leader within 15 s: the Lease expires leaseDuration after its last
// renewal, and other hubs try to acquire it every retryPeriod. A leader that cannot renew the Lease stops after
// renewDeadline, before the Lease expires. It then starts again with empty caches. The deadline is
// long enough that an API server which does not respond for some seconds does not cause this.
const (
	leaseDuration = 10 * time.Second
	renewDeadline = 8 * time.Second
	retryPeriod   = time.Second
)

// leaseName returns the name of the Lease in kube.AgentNamespace for the leader election of a shard.
func leaseName(shard fleet.Shard) string {
	if shard.IsDefault() {
		return "towline-hub"
	}
	return "towline-hub-" + string(shard)
}

// leaseTracker records when this process renewed its Lease.
type leaseTracker struct {
	clock clock.PassiveClock
	// mu guards renewed, which is zero while this process is not the leader.
	mu      sync.Mutex
	renewed time.Time
}

// hasExpired returns whether the Lease of this process has expired without a release: another hub may be the leader.
func (t *leaseTracker) hasExpired() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return !t.renewed.IsZero() && t.clock.Since(t.renewed) > leaseDuration
}

// recordWrite records a write of the Lease. identity is the holder identity of this process.
func (t *leaseTracker) recordWrite(record resourcelock.LeaderElectionRecord, identity string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.renewed = time.Time{}
	if record.HolderIdentity == identity {
		t.renewed = t.clock.Now()
	}
}

// trackedLock is a lock that records the renewals of its lease.
type trackedLock struct {
	resourcelock.Interface
	leaseTracker *leaseTracker
}

// newLock returns the lock for the leader election of a shard.
func newLock(cfg *rest.Config, shard fleet.Shard, leaseTracker *leaseTracker) (resourcelock.Interface, error) {
	host, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("read the host name: %w", err)
	}
	lock, err := resourcelock.NewFromKubeconfig(resourcelock.LeasesResourceLock, kube.AgentNamespace, leaseName(shard),
		resourcelock.ResourceLockConfig{Identity: host + "_" + string(uuid.NewUUID())}, cfg, renewDeadline)
	if err != nil {
		return nil, fmt.Errorf("create the lock for the leader election: %w", err)
	}
	return &trackedLock{Interface: lock, leaseTracker: leaseTracker}, nil
}

// Create creates the lease.
func (l *trackedLock) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	err := l.Interface.Create(ctx, record)
	if err == nil {
		l.leaseTracker.recordWrite(record, l.Identity())
	}
	return err
}

// Update acquires, renews or releases the lease.
func (l *trackedLock) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	err := l.Interface.Update(ctx, record)
	if err == nil {
		l.leaseTracker.recordWrite(record, l.Identity())
	}
	return err
}
