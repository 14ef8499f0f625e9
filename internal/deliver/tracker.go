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
// so that the garbage collector deletes no content whose group is not written yet. It is kept in memory only: after a
// restart existence is read again, and the collector waits for its grace period. If another client deletes content, the
// agent reports it as missing, and it is written again.
type contentTracker struct {
	clock clock.Clock

	// mu guards the fields below.
	mu       sync.Mutex
	contents map[client.ObjectKey]*trackedContent
	// unprovisioned has the groups that are not provisioned yet. When one becomes provisioned, its content can be deleted,
	// and the collector is triggered.
	unprovisioned map[client.ObjectKey]struct{}
}

// trackedContent is the state of one ConfigurationBundle.
type trackedContent struct {
	// isKnownToExist is true if the object is known to exist.
	isKnownToExist bool
	// deliveries is the number of running deliveries that use the object; lastUse is the end of the last one.
	deliveries int
	lastUse    time.Time
	// deletion is closed at the end of the garbage collector's request to delete the object, also if the request fails. It
	// is nil while there is none.
	deletion chan struct{}
}

func newContentTracker() *contentTracker {
	return &contentTracker{clock: clock.RealClock{}, contents: map[client.ObjectKey]*trackedContent{}, unprovisioned: map[client.ObjectKey]struct{}{}}
}

// getOrAdd returns the state of an object, and adds it if it is new. The caller must hold mu.
func (t *contentTracker) getOrAdd(key client.ObjectKey) *trackedContent {
	tracked := t.contents[key]
	if tracked == nil {
		tracked = &trackedContent{}
		t.contents[key] = tracked
	}
	return tracked
}

// beginUse must be called before a delivery writes an object. It waits for the end of a running deletion. The delivery
// calls end after its group refers to the object.
func (t *contentTracker) beginUse(ctx context.Context, key client.ObjectKey) (end func(), err error) {
	for {
		tracked, deletion := t.tryUse(key)
		if deletion == nil {
			return func() { t.endUse(tracked) }, nil
		}
		select {
		case <-deletion:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// tryUse begins a use, unless a deletion is running, which it returns.
func (t *contentTracker) tryUse(key client.ObjectKey) (tracked *trackedContent, deletion <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	tracked = t.getOrAdd(key)
	if tracked.deletion == nil {
		tracked.deliveries++
	}
	return tracked, tracked.deletion
}

func (t *contentTracker) endUse(tracked *trackedContent) {
	t.mu.Lock()
	defer t.mu.Unlock()
	tracked.deliveries--
	tracked.lastUse = t.clock.Now()
}

// beginDeletion reserves the object for a deletion. ok is false if a delivery uses it or has used it since cutoff, or
// if a deletion is running. Deliveries that need the object then wait until end is called.
func (t *contentTracker) beginDeletion(key client.ObjectKey, cutoff time.Time) (end func(), ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	tracked := t.getOrAdd(key)
	if tracked.deliveries > 0 || !tracked.lastUse.Before(cutoff) || tracked.deletion != nil {
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

// isKnownToExist returns whether the object is known to exist.
func (t *contentTracker) isKnownToExist(key client.ObjectKey) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	tracked := t.contents[key]
	return tracked != nil && tracked.isKnownToExist
}

// setKnownToExist records that the object exists on the hub, or that it may not exist.
func (t *contentTracker) setKnownToExist(key client.ObjectKey, exists bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if exists {
		t.getOrAdd(key).isKnownToExist = true
	} else if tracked := t.contents[key]; tracked != nil {
		tracked.isKnownToExist = false
	}
}

// removeUnlisted removes the objects that are not in listed, a list that was read from the hub after cutoff: another
// client has deleted them, for example with the namespace of a deregistered member. An object that a delivery uses, or
// has used since cutoff, stays: it may have been written after the list was read.
func (t *contentTracker) removeUnlisted(listed map[client.ObjectKey]types.UID, cutoff time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	maps.DeleteFunc(t.contents, func(key client.ObjectKey, tracked *trackedContent) bool {
		_, isListed := listed[key]
		return !isListed && tracked.deliveries == 0 && tracked.deletion == nil && tracked.lastUse.Before(cutoff)
	})
}

// addUnprovisioned adds a group that is not provisioned yet.
func (t *contentTracker) addUnprovisioned(group client.ObjectKey) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.unprovisioned[group] = struct{}{}
}

// removeUnprovisioned removes a group that is provisioned or deleted, and returns whether it was in the set.
func (t *contentTracker) removeUnprovisioned(group client.ObjectKey) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, tracked := t.unprovisioned[group]
	delete(t.unprovisioned, group)
	return tracked
}
