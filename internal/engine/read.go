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
	// getLimit is up to how many objects of one kind and namespace are read one by one; more are read as a list first.
	getLimit = 3
	// listFactor is how many objects of a list cost about as much as one object that is read by itself. A list that is longer is given up.
	listFactor = 10
	// pageSize is how many objects one list request asks for.
	pageSize = 500
)

// spot names one object by the resource under which it is read.
type spot struct {
	key      kube.Ref // the Ref.Key of the object
	resource kube.Resource
}

// area is one kind in one namespace.
type area struct {
	resource  kube.Resource
	namespace string
}

// observe reads the metadata of the objects at spots; those that do not exist are not in the result.
func (m *member) observe(ctx context.Context, spots []spot) (map[kube.Ref]*live, error) {
	found, unread := m.observeEach(ctx, spots)
	for _, s := range spots {
		if err := unread[s.key]; err != nil {
			return nil, err
		}
	}
	return found, nil
}

// observeEach does what observe does, and returns the error for each object that it could not read. It makes no further request after one that
// got no answer.
func (m *member) observeEach(ctx context.Context, spots []spot) (found map[kube.Ref]*live, unread map[kube.Ref]error) {
	ctx, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	r := &reader{member: m, giveUp: giveUp, found: make(map[kube.Ref]*live, len(spots)), unread: map[kube.Ref]error{}}
	areas := map[area][]kube.Ref{}
	for _, s := range spots {
		if s.resource != (kube.Resource{}) {
			a := area{s.resource, s.key.Namespace}
			areas[a] = append(areas[a], s.key)
		}
	}
	r.readAreas(ctx, areas)
	for _, s := range spots {
		if seen := r.found[s.key]; seen != nil && seen.role == roleUnlisted {
			if err := unlessGivenUp(ctx, giveUp, func() error { return m.readRole(ctx, s, seen) }); err != nil {
				r.unread[s.key] = err
			}
		}
	}
	return r.found, r.unread
}

// reader reads the metadata of objects, several at once.
type reader struct {
	member *member
	giveUp context.CancelCauseFunc

	// mu guards what follows.
	mu     sync.Mutex
	found  map[kube.Ref]*live
	unread map[kube.Ref]error
}

// readAreas lists the areas of which many objects are wanted, and then reads one by one those of which the lists do not tell whether they exist.
// The number of requests depends on how many objects are wanted, not on how many others there are.
func (r *reader) readAreas(ctx context.Context, areas map[area][]kube.Ref) {
	var lists, gets errgroup.Group
	lists.SetLimit(parallel)
	gets.SetLimit(parallel)
	rest := make(map[area][]kube.Ref, len(areas))
	var mu sync.Mutex // guards rest
	for a, keys := range areas {
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
	// What could not be read is in unread, no error of a group.
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

// try makes requests for keys, and notes their error.
func (r *reader) try(ctx context.Context, keys []kube.Ref, request func() error) {
	if err := unlessGivenUp(ctx, r.giveUp, request); err != nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, key := range keys {
			r.unread[key] = err
		}
	}
}

func (r *reader) add(key kube.Ref, obj *metav1.PartialObjectMetadata) {
	seen := liveOf(obj)
	if isClusterRole(key) {
		seen.role = roleStateOf(obj)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.found[key] = seen
}

func (r *reader) get(ctx context.Context, a area, key kube.Ref) error {
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

// list reads objects of one area as lists, and returns those of which it does not know whether they exist. After the first delivery nearly all
// of them have our label; before it they are absent or somebody else's.
func (r *reader) list(ctx context.Context, a area, keys []kube.Ref) (missing []kube.Ref, err error) {
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

// listSome lists objects of one area until it has all of keys, at most listFactor objects for each of them. all says that the list is complete.
func (r *reader) listSome(ctx context.Context, a area, keys []kube.Ref, selector string) (missing []kube.Ref, all bool, err error) {
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
			return nil, true, nil // the kind is gone
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

// unlessGivenUp makes a request, and gives all of ctx up if it gets no answer. Requests that were given up have the error of the one that was
// not answered.
func unlessGivenUp(ctx context.Context, giveUp context.CancelCauseFunc, request func() error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	err := request()
	if unanswered(err) {
		giveUp(err)
	}
	if err != nil && ctx.Err() != nil {
		// One that was not sent yet ends with the error of the context alone.
		return context.Cause(ctx)
	}
	return err
}
