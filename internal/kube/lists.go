package kube

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/pager"
)

// bytesPerObject is the size, in bytes, that an ObjectLimit counts as one more object.
const bytesPerObject = 512

// ObjectLimit limits how many objects of a cluster are in memory: the cluster could return objects without end. Several
// lists can share one. It is safe for concurrent use.
type ObjectLimit struct {
	maximum  int64
	resource string
	count    atomic.Int64
}

// NewObjectLimit returns a limit of maximum objects. resource is their plural name in the error.
func NewObjectLimit(maximum int64, resource string) *ObjectLimit {
	return &ObjectLimit{maximum: maximum, resource: resource}
}

// Add counts an object of size bytes. A large object counts as several objects. If there would be more objects than the
// maximum, Add returns an error and does not count the object.
func (l *ObjectLimit) Add(size int) error {
	if n := countOf(size); l.count.Add(n) > l.maximum {
		l.count.Add(-n)
		return fmt.Errorf("the cluster returned more than %d %s", l.maximum, l.resource)
	}
	return nil
}

// Remove is the reverse of Add.
func (l *ObjectLimit) Remove(size int) { l.count.Add(-countOf(size)) }

// countOf returns the number of objects for which an object of size bytes counts.
func countOf(size int) int64 { return 1 + int64(size/bytesPerObject) }

// metadataPageSize is the number of objects in a page of EachMetadata.
const metadataPageSize = 500

// EachMetadata calls visit for the metadata of each object that a label selector selects, page by page, until visit
// returns an error. It adds each page to limit, because a cluster can return empty pages without end. visit must add
// the objects that it keeps.
func EachMetadata(ctx context.Context, objects metadata.ResourceInterface, selector string, limit *ObjectLimit, visit func(*metav1.PartialObjectMetadata) error) error {
	options := metav1.ListOptions{LabelSelector: selector, Limit: metadataPageSize}
	for {
		page, err := objects.List(ctx, options)
		if err != nil {
			return err
		}
		if err := limit.Add(0); err != nil {
			return err
		}
		for i := range page.Items {
			if err := visit(&page.Items[i]); err != nil {
				return err
			}
		}
		if options.Continue = page.Continue; options.Continue == "" {
			return nil
		}
	}
}

const (
	// listedMemory is the memory of an object in a list of a LimitedStore without its texts, in bytes. Until the list is
	// passed, the object is also in slices and maps, whose keys repeat its name.
	listedMemory = 512
	// uncountedOfLists are the bytes of all lists of a cluster that need no reservation. 5,000 objects need less.
	uncountedOfLists = 4 << 20
)

// LimitedStore is the store of a reflector. While the reflector reads a list, streamed or in pages, an ObjectLimit
// limits the objects, and memory is reserved for them: a cluster that delays the last page keeps all other pages in
// memory. It passes the objects to another store: trimmed objects of a list, and whole objects of a watch. If the other
// store returns an error, the list fails or the watch ends: the next request of the reflector fails with that error,
// and after its backoff the reflector lists again.
//
// Its methods are called by one reflector, except Close.
type LimitedStore struct {
	cache.ReflectorStore
	limit  *ObjectLimit
	memory *Reservation
	trim   func(runtime.Object) (trimmed runtime.Object, size int)

	// events is the current watch. storeErr is the error with which the next request must fail.
	events   watch.Interface
	storeErr error

	// mu guards the fields below.
	mu sync.Mutex
	// count and reserved are the objects and the bytes that the current list has added to limit and to memory.
	count, reserved int64
	isClosed        bool
}

var _ cache.TransformingStore = (*LimitedStore)(nil)

// NewLimitedStore returns a LimitedStore that passes objects to store. trim returns the part of an object that store
// uses, and the size of that part in bytes, without the name and the namespace of the object. Replace of store gets
// trimmed objects; Add, Update and Delete get untrimmed ones. Several LimitedStores can share limit and memory, which
// is nil or from ForLists.
func NewLimitedStore(store cache.ReflectorStore, limit *ObjectLimit, memory *Reservation, trim func(runtime.Object) (trimmed runtime.Object, size int)) *LimitedStore {
	return &LimitedStore{ReflectorStore: store, limit: limit, memory: memory, trim: trim}
}

// ListWatch wraps source for the reflector of s. It lists in pages of pageSize objects, without a resource version: for
// the version 0, which a reflector requests, an API server returns all objects in one page.
func (s *LimitedStore) ListWatch(source *cache.ListWatch, pageSize int64) *cache.ListWatch {
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, _ metav1.ListOptions) (runtime.Object, error) {
			s.releaseList()
			if err := s.takeStoreErr(); err != nil {
				return nil, err
			}
			pages := pager.ListPager{PageSize: pageSize, PageFn: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
				page, err := source.ListWithContextFunc(ctx, options)
				if err != nil {
					return nil, err
				}
				return s.trimPage(ctx, page)
			}}
			list, _, err := pages.List(ctx, metav1.ListOptions{})
			if err != nil {
				s.releaseList()
			}
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			if s.storeErr != nil {
				s.releaseList()
				if options.SendInitialEvents != nil {
					return nil, s.storeErr // the reflector then lists, and the list returns and clears the error
				}
				return nil, s.takeStoreErr()
			}
			if options.SendInitialEvents != nil { // the watch begins with a list
				s.releaseList()
			}
			events, err := source.WatchFuncWithContext(ctx, options)
			s.events = events
			return events, err
		},
	}
}

// takeStoreErr returns storeErr, and clears it.
func (s *LimitedStore) takeStoreErr() error {
	err := s.storeErr
	s.storeErr = nil
	return err
}

// trimPage returns a page with the trimmed objects. An empty page counts as one object.
func (s *LimitedStore) trimPage(ctx context.Context, page runtime.Object) (runtime.Object, error) {
	listMeta, err := meta.ListAccessor(page)
	if err != nil {
		return nil, err
	}
	trimmed := &internalversion.List{ListMeta: metav1.ListMeta{ResourceVersion: listMeta.GetResourceVersion(), Continue: listMeta.GetContinue()}}
	if meta.LenList(page) == 0 {
		return trimmed, s.add(ctx, 0)
	}
	err = meta.EachListItem(page, func(object runtime.Object) error {
		obj, err := s.trimAndCount(ctx, object)
		trimmed.Items = append(trimmed.Items, obj)
		return err
	})
	return trimmed, err
}

// trimAndCount trims an object of a list, and adds it to the limit and to the memory.
func (s *LimitedStore) trimAndCount(ctx context.Context, object runtime.Object) (trimmed runtime.Object, err error) {
	trimmed, size := s.trim(object)
	if metadata, err := meta.Accessor(object); err == nil {
		size += len(metadata.GetNamespace()) + len(metadata.GetName())
	}
	return trimmed, s.add(ctx, size)
}

// add adds an object of the current list to the limit and to the memory. It fails with context.Canceled after Close.
func (s *LimitedStore) add(ctx context.Context, size int) error {
	needed := int64(listedMemory + 2*size)
	if err := s.memory.Add(ctx, needed); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	err := context.Canceled
	if !s.isClosed {
		err = s.limit.Add(size)
	}
	if err != nil {
		s.memory.Subtract(needed)
		return err
	}
	s.count, s.reserved = s.count+countOf(size), s.reserved+needed
	return nil
}

// releaseList removes the objects of the current list from the limit and from the memory.
func (s *LimitedStore) releaseList() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limit.count.Add(-s.count)
	s.memory.Subtract(s.reserved)
	s.count, s.reserved = 0, 0
}

// Close removes the objects of the current list from the limit and from the memory. If other stores share them, it must
// be called after the reflector has ended. A list that is still running then fails.
func (s *LimitedStore) Close() {
	s.mu.Lock()
	s.isClosed = true
	s.mu.Unlock()
	s.releaseList()
}

// Transformer returns a function that trims and counts the objects of a streamed list. If there are too many, it ends
// the stream.
func (s *LimitedStore) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) {
		object, ok := obj.(runtime.Object)
		if !ok {
			return obj, nil
		}
		// A TransformFunc has no context. The wait is limited.
		trimmed, err := s.trimAndCount(context.Background(), object)
		s.endWatch(err)
		return trimmed, nil
	}
}

// endWatch ends the current watch if err is not nil. A reflector only logs an error of its store.
func (s *LimitedStore) endWatch(err error) {
	if err != nil && s.storeErr == nil {
		s.storeErr = err
		s.events.Stop()
	}
}

// Add passes a new object of a watch.
func (s *LimitedStore) Add(obj any) error {
	s.endWatch(s.ReflectorStore.Add(obj))
	return nil
}

// Update passes a changed object of a watch.
func (s *LimitedStore) Update(obj any) error {
	s.endWatch(s.ReflectorStore.Update(obj))
	return nil
}

// Replace passes the objects of a list, and removes them from the limit and from the memory.
func (s *LimitedStore) Replace(objects []any, version string) error {
	defer s.releaseList()
	err := s.ReflectorStore.Replace(objects, version)
	if err != nil {
		s.storeErr = err
		if s.events != nil {
			s.events.Stop() // a reflector does not stop the watch with which the list began
		}
	}
	return err
}
