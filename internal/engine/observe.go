package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	kstatus "github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// Health is the health of an object.
type Health string

// The healths of an object. An object of a kind for which kstatus has no rules is Healthy while it exists.
const (
	Healthy   Health = "Healthy"
	Unhealthy Health = "Unhealthy" // it failed, is in progress, or is being deleted
	Unknown   Health = "Unknown"   // it does not exist, does not belong to the bundle, or could not be read
)

// Observation is the state of one object of a bundle.
type Observation struct {
	Ref kube.Ref
	// Resource is the plural name of the kind, "" if the cluster does not know the kind.
	Resource string
	// Status is the object's status in JSON; nil if it has none.
	Status []byte
	Health Health
}

// Observe returns the state of the objects in the record of id, in a fixed order, and nothing without a record. If more
// than getLimit objects have the same kind and namespace, it reads their metadata first, and then only the changed
// objects. With an error, the health of the objects that could not be read is Unknown; without a readable record there
// are no observations. After a request without a response it sends no further request.
func (e *Engine) Observe(ctx context.Context, id bundle.ID) ([]Observation, error) {
	rec, err := e.loadCached(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("observe %s: %w", id, err)
	}
	entries := rec.SortedEntries()
	states := make([]observedState, len(entries))
	unread := make(applyErrors, len(entries))
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)
	unchanged := e.findUnchanged(ctx, abort, entries, e.observed.get(id))
	var work errgroup.Group
	work.SetLimit(maxConcurrent)
	for i, entry := range entries {
		if state, ok := unchanged[entry.Ref.Key()]; ok {
			states[i] = state
			continue
		}
		states[i] = newObservedState(entry)
		work.Go(func() error {
			unread[i] = requestUnlessAborted(ctx, abort, func() (err error) {
				states[i], err = e.member.observeObject(ctx, entry)
				return err
			})
			return nil
		})
	}
	// Errors are in unread and not in the group.
	_ = work.Wait()
	e.observed.set(id, states, unread)
	observations := make([]Observation, len(entries))
	for i, state := range states {
		observations[i] = state.observation
	}
	if unread = slices.DeleteFunc(unread, func(err error) bool { return err == nil }); len(unread) > 0 {
		return observations, fmt.Errorf("observe %s: %w", id, unread)
	}
	return observations, nil
}

// loadCached returns the record of id from the cache, else from the cluster. The record is empty if there is none.
func (e *Engine) loadCached(ctx context.Context, id bundle.ID) (*inventory.Record, error) {
	if rec := e.store.Cached(id); rec != nil {
		return rec, nil
	}
	unlock, err := e.bundleLocks.acquire(ctx, id)
	if err != nil {
		return nil, err
	}
	defer unlock()
	rec, err := e.store.Load(ctx, id)
	if errors.Is(err, inventory.ErrIncomplete) {
		return rec, nil
	}
	return rec, err
}

// observeObject reads one object of a record.
func (m *memberClient) observeObject(ctx context.Context, entry inventory.Entry) (observedState, error) {
	state := newObservedState(entry)
	observation := &state.observation
	resource, err := m.mapper.ResourceInAnyVersion(entry.Ref.GVK())
	if meta.IsNoMatchError(err) {
		return state, nil
	}
	if err != nil {
		return state, err
	}
	observation.Resource = resource.GVR.Resource
	if entry.UID == "" {
		return state, nil
	}
	obj, err := m.dynamicAt(resource, entry.Ref.Namespace).Get(ctx, entry.Ref.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || (err == nil && obj.GetUID() != entry.UID) {
		return state, nil
	}
	if err != nil {
		return state, fmt.Errorf("read %s: %w", entry.Ref, err)
	}
	if status, ok := obj.Object["status"]; ok {
		if observation.Status, err = json.Marshal(status); err != nil {
			return state, fmt.Errorf("encode the status of %s: %w", entry.Ref, err)
		}
	}
	state.version, observation.Health = obj.GetResourceVersion(), healthOf(obj)
	return state, nil
}

// healthOf returns the health of an object by the rules of kstatus.
func healthOf(obj *unstructured.Unstructured) Health {
	result, err := kstatus.Compute(obj)
	if err != nil {
		return Unknown
	}
	switch result.Status {
	case kstatus.CurrentStatus:
		return Healthy
	case kstatus.InProgressStatus, kstatus.FailedStatus, kstatus.TerminatingStatus:
		return Unhealthy
	case kstatus.NotFoundStatus, kstatus.UnknownStatus:
	}
	return Unknown
}
