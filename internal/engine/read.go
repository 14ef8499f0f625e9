package engine

import (
	"context"
	"fmt"
	"sync"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/towline/towline/internal/kube"
)

const (
	// getLimit is the maximum number of objects of one kind and namespace that are read with get requests. More objects
	// are read with a list request first.
	getLimit = 3
	// listFactor is the number of listed objects that cost about as much as one get request. A list ends after listFactor
	// objects per wanted object.
	listFactor = 10
	// pageSize is the maximum number of objects per list request.
	pageSize = 500
)

// objectLocation identifies an object by the resource with which it is read.
type objectLocation struct {
	key      kube.Ref // the Ref.Key of the object
	resource kube.Resource
}

// collection is a resource in one namespace.
type collection struct {
	resource  kube.Resource
	namespace string
}

// readMetadata reads the metadata of the objects. Objects that do not exist are not in the result.
func (m *memberClient) readMetadata(ctx context.Context, locations []objectLocation) (map[kube.Ref]*live, error) {
	found, unread := m.readMetadataEach(ctx, locations)
	for _, location := range locations {
		if err := unread[location.key]; err != nil {
			return nil, err
		}
	}
	return found, nil
}

// readMetadataEach is like readMetadata, and returns the error of each object that it could not read. It stops after a
// request without a response. It reads as this engine, without impersonation.
func (m *memberClient) readMetadataEach(ctx context.Context, locations []objectLocation) (found map[kube.Ref]*live, unread map[kube.Ref]error) {
	ctx, abort := context.WithCancelCause(withAccount(ctx, ""))
	defer abort(nil)
	r := &reader{member: m, abort: abort, found: make(map[kube.Ref]*live, len(locations)), unread: map[kube.Ref]error{}}
	collections := map[collection][]kube.Ref{}
	for _, location := range locations {
		if location.resource != (kube.Resource{}) {
			c := collection{location.resource, location.key.Namespace}
			collections[c] = append(collections[c], location.key)
		}
	}
	r.readCollections(ctx, collections)
	for _, location := range locations {
		if existing := r.found[location.key]; existing != nil && existing.role == roleUnknown {
			if err := requestUnlessAborted(ctx, abort, func() error { return m.resolveRoleState(ctx, location, existing) }); err != nil {
				r.unread[location.key] = err
			}
		}
	}
	return r.found, r.unread
}

// reader reads the metadata of objects concurrently.
type reader struct {
	member *memberClient
	abort  context.CancelCauseFunc

	// mu guards the fields below.
	mu     sync.Mutex
	found  map[kube.Ref]*live
	unread map[kube.Ref]error
}

// readCollections lists each collection of which many objects are wanted. Then it gets each object that may exist and
// was not listed. The number of requests depends on the number of wanted objects, and not on the size of the
// collections.
func (r *reader) readCollections(ctx context.Context, collections map[collection][]kube.Ref) {
	var lists, gets errgroup.Group
	lists.SetLimit(maxConcurrent)
	gets.SetLimit(maxConcurrent)
	toGet, toList := map[collection][]kube.Ref{}, map[collection][]kube.Ref{}
	for c, keys := range collections {
		if len(keys) <= getLimit {
			toGet[c] = keys
		} else {
			toList[c] = keys
		}
	}
	var mu sync.Mutex // guards toGet until all lists have ended
	for c, keys := range toList {
		lists.Go(func() error {
			var undecided []kube.Ref
			r.try(ctx, keys, func() (err error) {
				undecided, err = r.list(ctx, c, keys)
				return err
			})
			mu.Lock()
			defer mu.Unlock()
			toGet[c] = undecided
			return nil
		})
	}
	// Errors are in unread and not in the group.
	_ = lists.Wait()
	for c, keys := range toGet {
		for _, key := range keys {
			gets.Go(func() error {
				r.try(ctx, []kube.Ref{key}, func() error { return r.get(ctx, c, key) })
				return nil
			})
		}
	}
	_ = gets.Wait()
}

// try sends a request for keys and stores its error for each key.
func (r *reader) try(ctx context.Context, keys []kube.Ref, request func() error) {
	if err := requestUnlessAborted(ctx, r.abort, request); err != nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, key := range keys {
			r.unread[key] = err
		}
	}
}

func (r *reader) add(key kube.Ref, obj *metav1.PartialObjectMetadata) {
	existing := liveOf(obj)
	if isClusterRole(key) {
		existing.role = roleStateOf(obj)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.found[key] = existing
}

func (r *reader) get(ctx context.Context, c collection, key kube.Ref) error {
	obj, err := r.member.metadataAt(c.resource, c.namespace).Get(ctx, key.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", key, err)
	}
	r.add(key, obj)
	return nil
}

// list reads objects of one collection with list requests. undecided are the keys of the objects that may exist
// although it has not found them. First it lists the objects with our label: after the first delivery nearly all
// objects have it. Then it lists the other objects.
func (r *reader) list(ctx context.Context, c collection, keys []kube.Ref) (undecided []kube.Ref, err error) {
	undecided, isComplete, err := r.listUntilFound(ctx, c, keys, kube.LabelReason)
	if err != nil || !isComplete || len(undecided) <= getLimit {
		return undecided, err
	}
	undecided, isComplete, err = r.listUntilFound(ctx, c, undecided, "!"+kube.LabelReason)
	if isComplete {
		undecided = nil // they do not exist
	}
	return undecided, err
}

// listUntilFound lists the selected objects of one collection until it has found all keys, at most listFactor objects
// per key. unfound are the keys that it has not found. isComplete is true if it has listed all selected objects.
func (r *reader) listUntilFound(ctx context.Context, c collection, keys []kube.Ref, selector string) (unfound []kube.Ref, isComplete bool, err error) {
	wanted := make(map[string]kube.Ref, len(keys))
	for _, key := range keys {
		wanted[key.Name] = key
	}
	budget := listFactor * len(keys)
	opts := metav1.ListOptions{LabelSelector: selector}
	for budget > 0 && len(wanted) > 0 && !isComplete {
		opts.Limit = int64(min(budget, pageSize))
		page, err := r.member.metadataAt(c.resource, c.namespace).List(ctx, opts)
		if apierrors.IsNotFound(err) {
			return nil, true, nil // the kind is no longer served
		}
		if err != nil {
			return nil, false, fmt.Errorf("list %s in namespace %q: %w", keys[0].Kind, keys[0].Namespace, err)
		}
		for i := range page.Items {
			if key, ok := wanted[page.Items[i].Name]; ok {
				r.add(key, &page.Items[i])
				delete(wanted, key.Name)
			}
		}
		budget -= max(1, len(page.Items)) // a cluster could return empty pages without end
		opts.Continue, isComplete = page.Continue, page.Continue == ""
	}
	for _, key := range wanted {
		unfound = append(unfound, key)
	}
	return unfound, isComplete, nil
}

// requestUnlessAborted sends a request, and cancels ctx if there is no response. All later requests with ctx fail with
// the error of that request.
func requestUnlessAborted(ctx context.Context, abort context.CancelCauseFunc, request func() error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	err := request()
	if isUnanswered(err) {
		abort(err)
	}
	if err != nil && ctx.Err() != nil {
		// A request that was not sent fails with the error of the context.
		return context.Cause(ctx)
	}
	return err
}
