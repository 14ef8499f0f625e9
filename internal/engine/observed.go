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

func newObservedState(item inventory.Entry) observedState {
	return observedState{uid: item.UID, observation: Observation{Ref: item.Ref, Health: Unknown}}
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
		named := state.version != "" || state.observation.Health == Unknown
		if unread[i] == nil && state.uid != "" && named && len(state.observation.Status) <= maxObservedStatus {
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

// unchanged returns the cached states of the objects that have not changed or do not exist, which need not be read
// whole. It reads metadata only for many objects of one kind and namespace, where that costs fewer requests. It calls
// abort after a request without a response.
func (e *Engine) unchanged(
	ctx context.Context, abort context.CancelCauseFunc, items []inventory.Entry, known map[kube.Ref]observedState,
) map[kube.Ref]observedState {
	collections := map[collection][]objectLocation{}
	for _, item := range items {
		if state, ok := known[item.Ref.Key()]; !ok || state.uid != item.UID {
			continue
		}
		resource, err := e.member.mapper.AnyVersion(item.Ref.GVK())
		if err != nil {
			continue // reading the object whole deals with it
		}
		a := collection{resource, item.Ref.Namespace}
		collections[a] = append(collections[a], objectLocation{key: item.Ref.Key(), resource: resource})
	}
	var locations []objectLocation
	for _, group := range collections {
		if len(group) > getLimit {
			locations = append(locations, group...)
		}
	}
	found, unread := e.member.observeEach(ctx, locations)
	unchanged := map[kube.Ref]observedState{}
	for _, s := range locations {
		state, existing, err := known[s.key], found[s.key], unread[s.key]
		switch {
		case isUnanswered(err):
			abort(err)
		case err != nil:
		case existing == nil || existing.UID != state.uid:
			state.version, state.observation.Status, state.observation.Health = "", nil, Unknown
			unchanged[s.key] = state
		case existing.Version == state.version:
			unchanged[s.key] = state
		}
	}
	return unchanged
}
