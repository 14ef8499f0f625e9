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

// contentTracker records which ConfigurationBundles exist on the hub, to save requests, and which ones deliveries use,
// so that the garbage collector deletes no bundle whose group is not written yet. It may be lost. If another client
// deletes a bundle, an agent reports it as missing, and it is written again.
type contentTracker struct {
	clock clock.Clock

	// mu guards the fields below.
	mu       sync.Mutex
	contents map[client.ObjectKey]*trackedContent
	// unprovisioned has the groups that are not provisioned yet. Their bundles can be deleted afterwards.
	unprovisioned map[client.ObjectKey]struct{}
}

// trackedContent is the state of one bundle.
type trackedContent struct {
	// exists is true if the bundle is known to exist.
	isKnown bool
	// deliveries is the number of running deliveries with the bundle; lastUse is the end of the last one.
	deliveries int
	lastUse    time.Time
	// deleted is closed when the garbage collector has deleted the bundle. It is nil while no deletion is running.
	deletion chan struct{}
}

func newContentTracker() *contentTracker {
	return &contentTracker{clock: clock.RealClock{}, contents: map[client.ObjectKey]*trackedContent{}, unprovisioned: map[client.ObjectKey]struct{}{}}
}

// get returns the state of bundle. The caller must hold mu.
func (t *contentTracker) get(key client.ObjectKey) *trackedContent {
	tracked := t.contents[key]
	if tracked == nil {
		tracked = &trackedContent{}
		t.contents[key] = tracked
	}
	return tracked
}

// beginUse must be called before a delivery writes bundle. It waits for the end of a running deletion. The delivery
// calls end after its group refers to the bundle.
func (t *contentTracker) beginUse(ctx context.Context, key client.ObjectKey) (end func(), err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for {
		tracked := t.get(key)
		if tracked.deletion == nil {
			tracked.deliveries++
			return func() { t.endUse(tracked) }, nil
		}
		deletion := tracked.deletion
		t.mu.Unlock()
		select {
		case <-deletion:
		case <-ctx.Done():
			err = ctx.Err()
		}
		t.mu.Lock()
		if err != nil {
			return nil, err
		}
	}
}

func (t *contentTracker) endUse(tracked *trackedContent) {
	t.mu.Lock()
	defer t.mu.Unlock()
	tracked.deliveries--
	tracked.lastUse = t.clock.Now()
}

// beginDeletion returns true if no delivery uses bundle or has used it since the given time. Then new deliveries with
// the bundle wait until end is called.
func (t *contentTracker) beginDeletion(key client.ObjectKey, since time.Time) (end func(), ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	tracked := t.get(key)
	if tracked.deliveries > 0 || !tracked.lastUse.Before(since) || tracked.deletion != nil {
		return nil, false
	}
	tracked.deletion = make(chan struct{})
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.contents, key)
		close(tracked.deletion)
	}, true
}

// exists returns whether bundle is known to exist.
func (t *contentTracker) isKnown(key client.ObjectKey) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	tracked := t.contents[key]
	return tracked != nil && tracked.isKnown
}

// setExists records that bundle exists on the hub, or that it may not exist.
func (t *contentTracker) setKnown(key client.ObjectKey, isKnown bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if isKnown {
		t.get(key).isKnown = true
	} else if tracked := t.contents[key]; tracked != nil {
		tracked.isKnown = false
	}
}

// removeMissing removes the bundles that are not in listed, a list that was read from the hub after the given time. The
// namespace of a member that was deregistered is deleted with its bundles. A bundle that a delivery uses, or has used
// since then, stays: it may have been written after the list was read.
func (t *contentTracker) removeMissing(listed map[client.ObjectKey]types.UID, since time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	maps.DeleteFunc(t.contents, func(key client.ObjectKey, tracked *trackedContent) bool {
		_, isListed := listed[key]
		return !isListed && tracked.deliveries == 0 && tracked.deletion == nil && tracked.lastUse.Before(since)
	})
}

// addUnprovisioned adds a group that is not provisioned yet.
func (t *contentTracker) addUnprovisioned(group client.ObjectKey) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.unprovisioned[group] = struct{}{}
}

// removeUnprovisioned removes a group that no longer needs its bundles, and returns whether it was tracked.
func (t *contentTracker) removeUnprovisioned(group client.ObjectKey) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, tracked := t.unprovisioned[group]
	delete(t.unprovisioned, group)
	return tracked
}
