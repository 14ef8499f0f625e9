package deliver

import (
	"sync"

	"sigs.k8s.io/controller-runtime/pkg/client"
)

// bundleTracker caches which ConfigurationBundles exist on the hub, to save requests. It may be lost. If another client
// deletes a bundle, an agent reports it as missing, and it is written again.
type bundleTracker struct {
	// delivery is locked for reading from before the first bundle of a delivery is written until its group refers to it,
	// and for writing while the garbage collector deletes. So no bundle is deleted before its group is written. It is
	// locked before mu.
	delivery sync.RWMutex

	// mu guards the fields below.
	mu sync.Mutex
	// bundles has every bundle that is known to exist, with the number of the last collection before its last use.
	bundles map[client.ObjectKey]uint64
	// unprovisioned has the groups that are not provisioned yet. Their bundles can be deleted afterwards.
	unprovisioned map[client.ObjectKey]struct{}
	collection    uint64
}

func newBundleTracker() *bundleTracker {
	return &bundleTracker{bundles: map[client.ObjectKey]uint64{}, unprovisioned: map[client.ObjectKey]struct{}{}}
}

// isKnown returns whether bundle is known to exist.
func (t *bundleTracker) isKnown(bundle client.ObjectKey) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, ok := t.bundles[bundle]
	return ok
}

// markUsed returns whether bundle is known to exist, and then marks it as used. The caller must hold delivery for
// reading.
func (t *bundleTracker) markUsed(bundle client.ObjectKey) (known bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, known = t.bundles[bundle]; known {
		t.bundles[bundle] = t.collection
	}
	return known
}

// add adds a bundle that exists on the hub, and marks it as used.
func (t *bundleTracker) add(bundle client.ObjectKey) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.bundles[bundle] = t.collection
}

// remove removes a bundle that may not exist.
func (t *bundleTracker) remove(bundle client.ObjectKey) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.bundles, bundle)
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

// beginCollection starts a collection and returns its number. It waits for running deliveries, so that their groups can
// be read.
func (t *bundleTracker) beginCollection() uint64 {
	t.delivery.Lock()
	defer t.delivery.Unlock()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.collection++
	return t.collection
}

// removeUnused removes bundle and returns true, unless a delivery has used it since collection began. The caller must
// hold delivery for writing.
func (t *bundleTracker) removeUnused(bundle client.ObjectKey, collection uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if used, ok := t.bundles[bundle]; ok && used >= collection {
		return false
	}
	delete(t.bundles, bundle)
	return true
}
