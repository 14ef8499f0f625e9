package engine

import (
	"context"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// maxObservedStatus is how many bytes of a status are remembered; an object with a longer one is read each time.
const maxObservedStatus = 16 << 10

// observedState is an observation of one object in one version.
type observedState struct {
	uid types.UID
	// version is the resourceVersion of the object, "" if it did not exist under uid.
	version     string
	observation Observation
}

func unobserved(item inventory.Entry) observedState {
	return observedState{uid: item.UID, observation: Observation{Ref: item.Ref, Health: Unknown}}
}

// observedStates remembers the last observations of each bundle, so that news of one object costs reading one object.
type observedStates struct {
	// mu guards byID. The maps in it are replaced, never changed.
	mu   sync.Mutex
	byID map[bundle.ID]map[kube.Ref]observedState
}

func (o *observedStates) of(id bundle.ID) map[kube.Ref]observedState {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.byID[id]
}

// set remembers the states of all objects of id, except those that were not read.
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

// forget drops the observations of id.
func (o *observedStates) forget(id bundle.ID) { o.set(id, nil, nil) }

// unchanged returns the states of the objects in known that need not be read whole: they are as they were, or do not exist. It asks only where
// metadata costs fewer requests than that: for many objects of one kind and namespace. It calls giveUp after a request without an answer.
func (e *Engine) unchanged(
	ctx context.Context, giveUp context.CancelCauseFunc, items []inventory.Entry, known map[kube.Ref]observedState,
) map[kube.Ref]observedState {
	areas := map[area][]spot{}
	for _, item := range items {
		if state, ok := known[item.Ref.Key()]; !ok || state.uid != item.UID {
			continue
		}
		resource, err := e.member.mapper.AnyVersion(item.Ref.GVK())
		if err != nil {
			continue // reading the object whole deals with it
		}
		a := area{resource, item.Ref.Namespace}
		areas[a] = append(areas[a], spot{key: item.Ref.Key(), resource: resource})
	}
	var spots []spot
	for _, some := range areas {
		if len(some) > getLimit {
			spots = append(spots, some...)
		}
	}
	found, unread := e.member.observeEach(ctx, spots)
	same := map[kube.Ref]observedState{}
	for _, s := range spots {
		state, seen, err := known[s.key], found[s.key], unread[s.key]
		switch {
		case unanswered(err):
			giveUp(err)
		case err != nil:
		case seen == nil || seen.UID != state.uid:
			state.version, state.observation.Status, state.observation.Health = "", nil, Unknown
			same[s.key] = state
		case seen.Version == state.version:
			same[s.key] = state
		}
	}
	return same
}
