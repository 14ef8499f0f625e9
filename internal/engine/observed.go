package engine

import (
	"context"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// maxObservedStatus is the maximum size of a cached status in bytes. An object with a larger status is read each time.
const maxObservedStatus = 16 << 10

// observedState is an observation of one object in one version.
type observedState struct {
	uid types.UID
	// version is the resourceVersion of the object, "" if it did not exist under uid.
	version     string
	observation Observation
}

func newObservedState(entry inventory.Entry) observedState {
	return observedState{uid: entry.UID, observation: Observation{Ref: entry.Ref, Health: Unknown}}
}

// observedStates caches the last observations of each bundle, so that a change of one object costs one read.
type observedStates struct {
	// mu guards byID. The maps in it are replaced, never changed.
	mu   sync.Mutex
	byID map[bundle.ID]map[kube.Ref]observedState
}

func (o *observedStates) get(id bundle.ID) map[kube.Ref]observedState {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.byID[id]
}

// set caches the states of all objects of id, except those that were not read.
func (o *observedStates) set(id bundle.ID, states []observedState, unread []error) {
	known := make(map[kube.Ref]observedState, len(states))
	for i, state := range states {
		// An object that did not exist has no version, and Unknown health.
		hasVersion := state.version != "" || state.observation.Health == Unknown
		if unread[i] == nil && state.uid != "" && hasVersion && len(state.observation.Status) <= maxObservedStatus {
			known[state.observation.Ref.Key()] = state
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(known) == 0 {
		delete(o.byID, id)
		return
	}
	o.byID[id] = known
}

// forget deletes the observations of id.
func (o *observedStates) forget(id bundle.ID) { o.set(id, nil, nil) }

// findUnchanged returns the states of the objects that the caller need not read: their metadata shows that they have
// not changed, or no longer exist. It reads metadata only where a list costs fewer requests than the objects: for more
// than getLimit objects of one kind and namespace. It calls abort after a request without a response.
func (e *Engine) findUnchanged(
	ctx context.Context, abort context.CancelCauseFunc, entries []inventory.Entry, known map[kube.Ref]observedState,
) map[kube.Ref]observedState {
	collections := map[collection][]objectLocation{}
	for _, entry := range entries {
		if state, ok := known[entry.Ref.Key()]; !ok || state.uid != entry.UID {
			continue
		}
		resource, err := e.member.mapper.ResourceInAnyVersion(entry.Ref.GVK())
		if err != nil {
			continue // the caller reads the object, and gets the error
		}
		c := collection{resource, entry.Ref.Namespace}
		collections[c] = append(collections[c], objectLocation{key: entry.Ref.Key(), resource: resource})
	}
	var locations []objectLocation
	for _, group := range collections {
		if len(group) > getLimit {
			locations = append(locations, group...)
		}
	}
	found, unread := e.member.readMetadataEach(ctx, locations)
	unchanged := map[kube.Ref]observedState{}
	for _, location := range locations {
		state, existing, err := known[location.key], found[location.key], unread[location.key]
		switch {
		case isUnanswered(err):
			abort(err)
		case err != nil:
		case existing == nil || existing.UID != state.uid:
			state.version, state.observation.Status, state.observation.Health = "", nil, Unknown
			unchanged[location.key] = state
		case existing.Version == state.version:
			unchanged[location.key] = state
		}
	}
	return unchanged
}
