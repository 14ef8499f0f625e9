package hub

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
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

// If a hub is killed, another hub becomes the leader within 15 s: the Lease expires leaseDuration after its last
// renewal, and other hubs try to acquire it every retryPeriod.
//
// A leader that cannot renew the Lease starts no writes after writeDeadline, and cancels the writes without a response.
// So it sends no write after the Lease has expired, but an API server can still execute a write that it has received.
// The leader keeps its caches and tries to renew the Lease until renewDeadline, since the restart of an API server
// takes longer than writeDeadline. It stays the leader if it succeeds before another hub acquires the Lease. The
// process ends after renewDeadline, or when it reads that another hub has acquired the Lease.
const (
	leaseDuration = 10 * time.Second
	writeDeadline = 8 * time.Second
	renewDeadline = 40 * time.Second
	// electorDuration is the LeaseDuration in the configuration of client-go's elector, which must be longer than its
	// RenewDeadline. trackedLock writes leaseDuration to the Lease instead.
	electorDuration = 45 * time.Second
	// lockTimeout limits one request for the Lease.
	lockTimeout = 4 * time.Second
	retryPeriod = time.Second
)

var (
	errNotRenewed     = errors.New("the hub has not renewed its leader lease: another hub may be the leader")
	errLeadershipLost = errors.New("the hub is no longer the leader")
)

// leaseName returns the name of the Lease in kube.AgentNamespace for the leader election of a shard.
func leaseName(shard fleet.Shard) string {
	if shard.IsDefault() {
		return "towline-hub"
	}
	return "towline-hub-" + string(shard)
}

// leaseTracker records when this process renewed its Lease, and cancels writes that are too late. Create it with
// newLeaseTracker.
type leaseTracker struct {
	clock clock.WithDelayedExecution
	// lost is closed when this process was the leader and reads that another process holds its Lease.
	lost chan struct{}
	// mu guards the fields below. renewed is the time of the last renewal, zero while this process is not the leader.
	// ended is true after this process was the leader and has released its Lease, or has read that another process holds
	// it. writes has, for each write without a response, the function that cancels it.
	mu      sync.Mutex
	renewed time.Time
	ended   bool
	writes  map[*http.Request]context.CancelCauseFunc
}

func newLeaseTracker(clock clock.WithDelayedExecution) *leaseTracker {
	return &leaseTracker{clock: clock, lost: make(chan struct{}), writes: map[*http.Request]context.CancelCauseFunc{}}
}

// Start implements manager.Runnable. It returns an error, which ends the manager, when another hub is the leader.
func (t *leaseTracker) Start(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-t.lost:
		return errLeadershipLost
	}
}

// isOverdue returns whether the last renewal is so old that the elector must have ended this process.
func (t *leaseTracker) isOverdue() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.isRenewalOlderThan(electorDuration)
}

// isRenewalOlderThan returns whether this process is the leader and its last renewal is at least as old as age. The
// caller must hold mu.
func (t *leaseTracker) isRenewalOlderThan(age time.Duration) bool {
	return !t.renewed.IsZero() && t.clock.Since(t.renewed) >= age
}

// canWrite returns false if another hub may be the leader. The caller must hold mu.
func (t *leaseTracker) canWrite() bool { return !t.ended && !t.isRenewalOlderThan(writeDeadline) }

// beginWrite returns whether a write may be sent. If so, the write is canceled when canWrite becomes false, and the
// caller must call endWrite.
func (t *leaseTracker) beginWrite(request *http.Request, cancel context.CancelCauseFunc) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.canWrite() {
		return false
	}
	t.writes[request] = cancel
	return true
}

// endWrite records that a write has a response or has failed.
func (t *leaseTracker) endWrite(request *http.Request) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.writes, request)
}

// cancelWrites cancels the writes without a response. The caller must hold mu.
func (t *leaseTracker) cancelWrites() {
	for _, cancel := range t.writes {
		cancel(errNotRenewed)
	}
}

// recordLeaseWrite records that this process wrote the Lease: it acquired or renewed it, or released it, with an empty
// holder identity. sent is the time before the request, since other hubs may count the Lease from then. identity is the
// holder identity of this process.
func (t *leaseTracker) recordLeaseWrite(sent time.Time, record resourcelock.LeaderElectionRecord, identity string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if record.HolderIdentity != identity {
		t.renewed, t.ended = time.Time{}, true
		t.cancelWrites()
		return
	}
	t.renewed = sent
	t.clock.AfterFunc(writeDeadline-t.clock.Since(sent), func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.renewed.Equal(sent) {
			t.cancelWrites()
		}
	})
}

// recordLeaseRead records the holder of the Lease that was read.
func (t *leaseTracker) recordLeaseRead(holder, identity string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended || t.renewed.IsZero() || holder == identity {
		return
	}
	t.ended = true
	t.cancelWrites()
	close(t.lost)
}

// isLeadershipLost returns whether this process was the leader and is no longer.
func (t *leaseTracker) isLeadershipLost() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.ended
}

// fenceWrites wraps a transport so that it sends writes only while canWrite returns true. When canWrite becomes false,
// it cancels the writes without a response. Otherwise a leader that can reach members, but not the hub's API server,
// would change members concurrently with the next leader.
func (t *leaseTracker) fenceWrites(next http.RoundTripper) http.RoundTripper {
	return fence{next: next, leaseTracker: t}
}

// fence is the transport of fenceWrites.
type fence struct {
	next         http.RoundTripper
	leaseTracker *leaseTracker
}

// RoundTrip implements http.RoundTripper.
func (f fence) RoundTrip(request *http.Request) (*http.Response, error) {
	if request.Method == http.MethodGet || request.Method == http.MethodHead {
		return f.next.RoundTrip(request)
	}
	ctx, cancel := context.WithCancelCause(request.Context())
	write := request.WithContext(ctx)
	if !f.leaseTracker.beginWrite(write, cancel) {
		cancel(nil)
		if request.Body != nil {
			_ = request.Body.Close()
		}
		return nil, errNotRenewed
	}
	response, err := f.next.RoundTrip(write)
	f.leaseTracker.endWrite(write)
	if err != nil {
		if cause := context.Cause(ctx); errors.Is(cause, errNotRenewed) {
			err = cause
		}
		cancel(nil)
		return nil, err
	}
	response.Body = responseBody{response.Body, cancel}
	return response, nil
}

// responseBody is the body of a response. Close cancels the context of the request.
type responseBody struct {
	io.ReadCloser

	cancel context.CancelCauseFunc
}

// Close implements io.Closer.
func (b responseBody) Close() error {
	defer b.cancel(nil)
	return b.ReadCloser.Close()
}

// WrappedRoundTripper returns the next transport, so that client-go can close its idle connections.
func (f fence) WrappedRoundTripper() http.RoundTripper { return f.next }

// trackedLock is a lock that reports its reads and writes of the Lease to the leaseTracker, and writes leaseDuration to
// the Lease.
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
		resourcelock.ResourceLockConfig{Identity: host + "_" + string(uuid.NewUUID())}, cfg, 2*lockTimeout) // its request timeout is half of the argument
	if err != nil {
		return nil, fmt.Errorf("create the lock for the leader election: %w", err)
	}
	return &trackedLock{Interface: lock, leaseTracker: leaseTracker}, nil
}

// Get reads the Lease.
func (l *trackedLock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	record, raw, err := l.Interface.Get(ctx)
	if err == nil {
		l.leaseTracker.recordLeaseRead(record.HolderIdentity, l.Identity())
	}
	return record, raw, err
}

// Create creates the Lease.
func (l *trackedLock) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	return l.write(ctx, record, l.Interface.Create)
}

// Update acquires, renews or releases the Lease.
func (l *trackedLock) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	return l.write(ctx, record, l.Interface.Update)
}

// write writes the Lease. It fails if this process has been the leader before: another hub may have been the leader
// since, so this process must end and not become the leader again.
func (l *trackedLock) write(
	ctx context.Context, record resourcelock.LeaderElectionRecord, write func(context.Context, resourcelock.LeaderElectionRecord) error,
) error {
	if l.leaseTracker.isLeadershipLost() {
		return errLeadershipLost
	}
	if record.HolderIdentity == l.Identity() {
		record.LeaseDurationSeconds = int(leaseDuration.Seconds())
	}
	sent := l.leaseTracker.clock.Now()
	err := write(ctx, record)
	if err == nil {
		l.leaseTracker.recordLeaseWrite(sent, record, l.Identity())
	}
	return err
}
