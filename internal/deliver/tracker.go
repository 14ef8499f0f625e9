package deliver

import (
	"context"
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// bundleTracker records which ConfigurationBundles exist on the hub, to save requests, and which ones deliveries use,
// so that the garbage collector deletes no bundle whose group is not written yet. It may be lost. If another client
// deletes a bundle, an agent reports it as missing, and it is written again.
type bundleTracker struct {
	clock clock.Clock

	// mu guards the fields below.
	mu      sync.Mutex
	bundles map[client.ObjectKey]*trackedBundle
	// unprovisioned has the groups that are not provisioned yet. Their bundles can be deleted afterwards.
	unprovisioned map[client.ObjectKey]struct{}
}

// trackedBundle is the state of one bundle.
type trackedBundle struct {
	// exists is true if the bundle is known to exist.
	exists bool
	// deliveries is the number of running deliveries with the bundle; lastUse is the end of the last one.
	deliveries int
	lastUse    time.Time
	// deleted is closed when the garbage collector has deleted the bundle. It is nil while no deletion is running.
	deleted chan struct{}
}

func newBundleTracker() *bundleTracker {
	return &bundleTracker{clock: clock.RealClock{}, bundles: map[client.ObjectKey]*trackedBundle{}, unprovisioned: map[client.ObjectKey]struct{}{}}
}

// get returns the state of bundle. The caller must hold mu.
func (t *bundleTracker) get(bundle client.ObjectKey) *trackedBundle {
	tracked := t.bundles[bundle]
	if tracked == nil {
		tracked = &trackedBundle{}
		t.bundles[bundle] = tracked
	}
	return tracked
}

// beginUse must be called before a delivery writes bundle. It waits for the end of a running deletion. The delivery
// calls end after its group refers to the bundle.
func (t *bundleTracker) beginUse(ctx context.Context, bundle client.ObjectKey) (end func(), err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for {
		tracked := t.get(bundle)
		if tracked.deleted == nil {
			tracked.deliveries++
			return func() { t.endUse(tracked) }, nil
		}
		deleted := tracked.deleted
		t.mu.Unlock()
		select {
		case <-deleted:
		case <-ctx.Done():
			err = ctx.Err()
		}
		t.mu.Lock()
		if err != nil {
			return nil, err
		}
	}
}

func (t *bundleTracker) endUse(tracked *trackedBundle) {
	t.mu.Lock()
	defer t.mu.Unlock()
	tracked.deliveries--
	tracked.lastUse = t.clock.Now()
}

// beginDeletion returns true if no delivery uses bundle or has used it since the given time. Then new deliveries with
// the bundle wait until end is called.
func (t *bundleTracker) beginDeletion(bundle client.ObjectKey, since time.Time) (end func(), ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	tracked := t.get(bundle)
	if tracked.deliveries > 0 || !tracked.lastUse.Before(since) || tracked.deleted != nil {
		return nil, false
	}
	tracked.deleted = make(chan struct{})
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.bundles, bundle)
		close(tracked.deleted)
	}, true
}

// exists returns whether bundle is known to exist.
func (t *bundleTracker) exists(bundle client.ObjectKey) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	tracked := t.bundles[bundle]
	return tracked != nil && tracked.exists
}

// setExists records that bundle exists on the hub, or that it may not exist.
func (t *bundleTracker) setExists(bundle client.ObjectKey, exists bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if exists {
		t.get(bundle).exists = true
	} else if tracked := t.bundles[bundle]; tracked != nil {
		tracked.exists = false
	}
}

// removeMissing removes the bundles that are not in listed, a list that was read from the hub after the given time. The
// namespace of a member that was deregistered is deleted with its bundles. A bundle that a delivery uses, or has used
// since then, stays: it may have been written after the list was read.
func (t *bundleTracker) removeMissing(listed map[client.ObjectKey]types.UID, since time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	maps.DeleteFunc(t.bundles, func(key client.ObjectKey, tracked *trackedBundle) bool {
		_, isListed := listed[key]
		return !isListed && tracked.deliveries == 0 && tracked.deleted == nil && tracked.lastUse.Before(since)
	})
}

// trackGroup adds a group that is not provisioned yet.
func (t *bundleTracker) trackGroup(group client.ObjectKey) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.unprovisioned[group] = struct{}{}
}

// untrackGroup removes a group that no longer needs its bundles, and returns whether it was tracked.
func (t *bundleTracker) untrackGroup(group client.ObjectKey) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, tracked := t.unprovisioned[group]
	delete(t.unprovisioned, group)
	return tracked
}
