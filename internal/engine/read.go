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
	// listFactor is the number of objects in a list that cost about as much as one get request. A longer list is not read
	// to its end.
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

// observe reads the metadata of the objects. Objects that do not exist are not in the result.
func (m *memberClient) observe(ctx context.Context, locations []objectLocation) (map[kube.Ref]*live, error) {
	found, unread := m.observeEach(ctx, locations)
	for _, s := range locations {
		if err := unread[s.key]; err != nil {
			return nil, err
		}
	}
	return found, nil
}

// observeEach is like observe, and returns an error for each object that it could not read. It sends no further request
// after a request without a response. It reads with the identity of this engine.
func (m *memberClient) observeEach(ctx context.Context, locations []objectLocation) (found map[kube.Ref]*live, unread map[kube.Ref]error) {
	ctx, abort := context.WithCancelCause(withAccount(ctx, ""))
	defer abort(nil)
	r := &reader{member: m, abort: abort, found: make(map[kube.Ref]*live, len(locations)), unread: map[kube.Ref]error{}}
	collections := map[collection][]kube.Ref{}
	for _, s := range locations {
		if s.resource != (kube.Resource{}) {
			a := collection{s.resource, s.key.Namespace}
			collections[a] = append(collections[a], s.key)
		}
	}
	r.readCollections(ctx, collections)
	for _, s := range locations {
		if existing := r.found[s.key]; existing != nil && existing.role == roleUnlisted {
			if err := requestUnlessAborted(ctx, abort, func() error { return m.readRole(ctx, s, existing) }); err != nil {
				r.unread[s.key] = err
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

// readCollections lists the collections from which many objects are requested. It then reads each object with a get
// request that the lists do not show as present or missing. The number of requests depends on the number of requested
// objects, and not on the size of the collections.
func (r *reader) readCollections(ctx context.Context, collections map[collection][]kube.Ref) {
	var lists, gets errgroup.Group
	lists.SetLimit(parallel)
	gets.SetLimit(parallel)
	rest := make(map[collection][]kube.Ref, len(collections))
	var mu sync.Mutex // guards rest
	for a, keys := range collections {
		if len(keys) <= getLimit {
			rest[a] = keys
			continue
		}
		lists.Go(func() error {
			var missing []kube.Ref
			r.try(ctx, keys, func() (err error) {
				missing, err = r.list(ctx, a, keys)
				return err
			})
			mu.Lock()
			defer mu.Unlock()
			rest[a] = missing
			return nil
		})
	}
	// Errors are in unread and not in the group.
	_ = lists.Wait()
	for a, keys := range rest {
		for _, key := range keys {
			gets.Go(func() error {
				r.try(ctx, []kube.Ref{key}, func() error { return r.get(ctx, a, key) })
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

func (r *reader) get(ctx context.Context, a collection, key kube.Ref) error {
	obj, err := r.member.at(a.resource, a.namespace).Get(ctx, key.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", key, err)
	}
	r.add(key, obj)
	return nil
}

// list reads objects of one collection with list requests, and returns the keys that it could not decide. First it
// lists the objects with our label: after the first delivery nearly all objects have it. Then it lists the other
// objects.
func (r *reader) list(ctx context.Context, a collection, keys []kube.Ref) (missing []kube.Ref, err error) {
	missing, all, err := r.listSome(ctx, a, keys, kube.LabelReason)
	if err != nil || !all || len(missing) <= getLimit {
		return missing, err
	}
	missing, all, err = r.listSome(ctx, a, missing, "!"+kube.LabelReason)
	if all {
		missing = nil
	}
	return missing, err
}

// listSome lists objects of one collection until it has found all keys, at most listFactor objects per key. all is true
// if the list is complete.
func (r *reader) listSome(ctx context.Context, a collection, keys []kube.Ref, selector string) (missing []kube.Ref, all bool, err error) {
	wanted := make(map[string]kube.Ref, len(keys))
	for _, key := range keys {
		wanted[key.Name] = key
	}
	budget := listFactor * len(keys)
	opts := metav1.ListOptions{LabelSelector: selector}
	for budget > 0 && len(wanted) > 0 && !all {
		opts.Limit = int64(min(budget, pageSize))
		page, err := r.member.at(a.resource, a.namespace).List(ctx, opts)
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
		budget -= len(page.Items)
		opts.Continue, all = page.Continue, page.Continue == ""
	}
	for _, key := range wanted {
		missing = append(missing, key)
	}
	return missing, all, nil
}

// requestUnlessAborted sends a request, and cancels ctx if there is no response. After that all requests fail with the
// error of the request without a response.
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
