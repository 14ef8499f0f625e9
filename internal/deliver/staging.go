package deliver

import (
	"sync"

	"sigs.k8s.io/controller-runtime/pkg/client"
)

// staging remembers what this process knows to be on the hub, to save requests. Losing it costs requests, nothing else: what it says
// wrongly (somebody else deleted a bundle) an agent finds missing, and the bundle is written again.
type staging struct {
	// delivery is held for reading from before the first bundle of a delivery is written until its group points at it, and for
	// writing while the sweeper deletes: no bundle goes between being written and being pointed at. It is taken before mu.
	delivery sync.RWMutex

	// mu guards the fields below.
	mu sync.Mutex
	// bundles maps every bundle known to exist to the number of the sweep in or before which it was last used.
	bundles map[client.ObjectKey]uint64
	// awaiting holds the groups whose provisioning lets bundles go.
	awaiting map[client.ObjectKey]struct{}
	sweep    uint64
}

func newStaging() *staging {
	return &staging{bundles: map[client.ObjectKey]uint64{}, awaiting: map[client.ObjectKey]struct{}{}}
}

// knows says whether bundle is known to exist.
func (s *staging) knows(bundle client.ObjectKey) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.bundles[bundle]
	return ok
}

// use says whether bundle is known to exist and, if so, that it is wanted now. The caller holds delivery for reading.
func (s *staging) use(bundle client.ObjectKey) (known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known = s.bundles[bundle]; known {
		s.bundles[bundle] = s.sweep
	}
	return known
}

// note notes that bundle was seen on the hub or written there, and is wanted now.
func (s *staging) note(bundle client.ObjectKey) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bundles[bundle] = s.sweep
}

// forget notes that bundle may not exist.
func (s *staging) forget(bundle client.ObjectKey) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.bundles, bundle)
}

// await notes that group is to be provisioned.
func (s *staging) await(group client.ObjectKey) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.awaiting[group] = struct{}{}
}

// arrived notes that group needs no bundles any more, and says whether that is news.
func (s *staging) arrived(group client.ObjectKey) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, news := s.awaiting[group]
	delete(s.awaiting, group)
	return news
}

// begin starts a sweep and returns its number. Every delivery that began before has ended: its group can be read.
func (s *staging) begin() uint64 {
	s.delivery.Lock()
	defer s.delivery.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sweep++
	return s.sweep
}

// release forgets bundle and returns true, unless a delivery used it since sweep began. The caller holds delivery for writing.
func (s *staging) release(bundle client.ObjectKey, sweep uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if used, ok := s.bundles[bundle]; ok && used >= sweep {
		return false
	}
	delete(s.bundles, bundle)
	return true
}
