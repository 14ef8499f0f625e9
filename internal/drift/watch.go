package drift

import (
	"cmp"
	"context"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// watchedKind is a kind and the resource by which it is watched.
type watchedKind struct {
	gk       schema.GroupKind
	resource kube.Resource
}

// watchSet has one metadata-only watch for each kind in Store.WatchedKinds, and one for the Secrets of the records. The
// watches of kinds select the objects with Towline's label.
type watchSet struct {
	corrector *Corrector
	running   map[watchedKind]context.CancelFunc
	// unwatched is the number of kinds beyond maxWatched.
	unwatched int
	// limit and memory limit the number and the size of the objects in the lists of all watches together. A limit for each
	// list is not enough, because users of the member can add kinds, by changing records.
	limit      *kube.ObjectLimit
	memory     *kube.Reservation
	reflectors sync.WaitGroup
}

const (
	// maxWatched is the maximum number of watched kinds, except on the cluster of the hub. The objects of further kinds
	// are only compared at each resync.
	maxWatched = 250
	// maxListed is the maximum number of objects in the lists of a member that are read at the same time. The cluster
	// of the hub, which has the objects of all clusters for deploymentType Local, has no maximum.
	maxListed = 200_000
	// pageSize is the number of objects per page on clusters that cannot stream lists.
	pageSize = 500
)

func newWatchSet(c *Corrector) *watchSet {
	maximum := int64(maxListed)
	if c.Store.IsHubCluster() {
		maximum = math.MaxInt64
	}
	return &watchSet{
		corrector: c, running: map[watchedKind]context.CancelFunc{},
		limit: kube.NewObjectLimit(maximum, "objects"), memory: c.Store.ReserveLists(),
	}
}

// update starts and stops watches so that there is one for each of the kinds, at most maxWatched. It omits kinds that
// the API server does not serve. If the definition of a kind is created later, the next call adds the kind: it follows
// the next change of a record or the next resync. If discovery fails, the running watches of the kind continue.
func (w *watchSet) update(ctx context.Context, kinds []schema.GroupVersionKind) {
	wanted := map[watchedKind]bool{}
	for _, gvk := range kinds {
		resource, err := w.corrector.Mapper.ResourceInAnyVersion(gvk)
		if err == nil {
			wanted[watchedKind{gvk.GroupKind(), resource}] = true
			continue
		}
		for kind := range w.running {
			if kind.gk == gvk.GroupKind() && !meta.IsNoMatchError(err) {
				wanted[kind] = true
			}
		}
	}
	for kind, cancel := range w.running {
		if !wanted[kind] {
			cancel()
			delete(w.running, kind)
		}
		delete(wanted, kind)
	}
	added := slices.SortedFunc(maps.Keys(wanted), func(a, b watchedKind) int {
		return cmp.Or(strings.Compare(a.gk.String(), b.gk.String()), strings.Compare(a.resource.GVR.String(), b.resource.GVR.String()))
	})
	if maximum := max(0, maxWatched-len(w.running)); !w.corrector.Store.IsHubCluster() {
		added = added[:min(len(added), maximum)]
	}
	for _, kind := range added {
		w.start(ctx, kind)
	}
	w.setUnwatched(ctx, len(wanted)-len(added))
}

// setUnwatched sets the number of kinds that are not watched, and logs it if it has changed.
func (w *watchSet) setUnwatched(ctx context.Context, n int) {
	if n != w.unwatched {
		log.FromContext(ctx).Info("drift of kinds that are not watched is corrected only every 10 minutes", "watched", maxWatched, "unwatched", n)
	}
	w.unwatched = n
}

func (w *watchSet) start(ctx context.Context, kind watchedKind) {
	ctx, cancel := context.WithCancel(ctx)
	w.running[kind] = cancel
	api := w.corrector.Metadata.Resource(kind.resource.GVR)
	lister := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
			opts.LabelSelector = kube.LabelReason
			return api.List(ctx, opts)
		},
		WatchFuncWithContext: func(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
			opts.LabelSelector = kube.LabelReason
			return api.Watch(ctx, opts)
		},
	}
	sink := &objectSink{corrector: w.corrector, gk: kind.gk}
	w.runReflector(ctx, "engine "+kind.gk.String(), lister, kube.NewLimitedStore(sink, w.limit, w.memory, sink.trim))
}

// watchRecords starts the watch on the Secrets of the records.
func (w *watchSet) watchRecords(ctx context.Context) {
	sink := &recordSink{w.corrector}
	w.runReflector(ctx, "engine records", w.corrector.Store.ListWatch(), kube.NewLimitedStore(sink, w.limit, w.memory, sink.trim))
}

// runReflector runs a reflector from lister to store in the background until ctx ends. While it lists, store trims each
// object, and counts it in limit and memory until the list is complete. Objects of watch events are not trimmed.
func (w *watchSet) runReflector(ctx context.Context, name string, lister *cache.ListWatch, store *kube.LimitedStore) {
	source := store.ListWatch(lister, pageSize)
	reflector := cache.NewReflectorWithOptions(source, &metav1.PartialObjectMetadata{}, store, cache.ReflectorOptions{Name: name})
	w.reflectors.Go(func() {
		defer store.Close()
		reflector.RunWithContext(ctx)
	})
}

func (w *watchSet) stop() {
	for _, cancel := range w.running {
		cancel()
	}
	w.reflectors.Wait()
	w.memory.Close()
}

// objectSink is a ReflectorStore that passes the events of one kind to the Corrector. It stores nothing.
type objectSink struct {
	corrector *Corrector
	gk        schema.GroupKind
}

var _ cache.ReflectorStore = (*objectSink)(nil)

func (s *objectSink) key(obj *metav1.PartialObjectMetadata) kube.Ref {
	return kube.Ref{Group: s.gk.Group, Kind: s.gk.Kind, Namespace: obj.Namespace, Name: obj.Name}
}

// trim returns the listedObject of an object, and the size of its observation in bytes.
func (s *objectSink) trim(obj runtime.Object) (trimmed runtime.Object, size int) {
	meta, ok := obj.(*metav1.PartialObjectMetadata)
	if !ok {
		return obj, 0
	}
	o := observationOf(meta)
	return &listedObject{key: s.key(meta), observation: o}, o.size()
}

// Add reports an object that exists.
func (s *objectSink) Add(obj any) error {
	if meta, ok := obj.(*metav1.PartialObjectMetadata); ok {
		s.corrector.onEvent(s.key(meta), observationOf(meta))
	}
	return nil
}

// Update is like Add.
func (s *objectSink) Update(obj any) error { return s.Add(obj) }

// Delete reports an object that was deleted, or whose label was removed.
func (s *objectSink) Delete(obj any) error {
	if meta, ok := obj.(*metav1.PartialObjectMetadata); ok {
		// LiveMetaOf cuts a UID that is too long, as the record does.
		s.corrector.onEvent(s.key(meta), observation{deleted: true, uid: inventory.LiveMetaOf(meta).UID})
	}
	return nil
}

// Replace reports all listed objects as existing, and all tracked objects that the list does not contain as deleted.
func (s *objectSink) Replace(objects []any, _ string) error {
	existing := map[kube.Ref]bool{}
	for _, obj := range objects {
		if listed, ok := obj.(*listedObject); ok {
			existing[listed.key] = true
			s.corrector.onEvent(listed.key, listed.observation)
		}
	}
	for _, rec := range s.corrector.Store.ListCached() {
		if !rec.NeedsWatch() {
			continue
		}
		for _, key := range rec.TrackedOfKind(s.gk) {
			if !existing[key] {
				s.corrector.onEvent(key, observation{deleted: true})
			}
		}
	}
	return nil
}

// Resync does nothing: the Corrector has its own resync.
func (s *objectSink) Resync() error { return nil }

// recordSink is a ReflectorStore that queues a check of each record with a deleted Secret. It stores nothing.
type recordSink struct{ corrector *Corrector }

var _ cache.ReflectorStore = (*recordSink)(nil)

// trim returns the metadata of a Secret with nothing but its name.
func (*recordSink) trim(obj runtime.Object) (trimmed runtime.Object, size int) {
	if meta, ok := obj.(*metav1.PartialObjectMetadata); ok {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: meta.Name}}, 0
	}
	return obj, 0
}

// Add does nothing: only this process writes the Secrets.
func (*recordSink) Add(any) error { return nil }

// Update does nothing, like Add.
func (*recordSink) Update(any) error { return nil }

// Delete queues a check of the record with a deleted Secret. It ignores a Secret whose record is no longer cached,
// because the engine itself has deleted it.
func (s *recordSink) Delete(obj any) error {
	if meta, ok := obj.(*metav1.PartialObjectMetadata); ok {
		if rec := s.corrector.Store.FindBySecret(meta.Name); rec != nil {
			s.corrector.queueRecordCheck(rec.ID, recordCheckDelay)
		}
	}
	return nil
}

// Replace queues a check of each cached record with a Secret that is not in the list.
func (s *recordSink) Replace(objects []any, _ string) error {
	existing := map[string]bool{}
	for _, obj := range objects {
		if meta, ok := obj.(*metav1.PartialObjectMetadata); ok {
			existing[meta.Name] = true
		}
	}
	for _, rec := range s.corrector.Store.ListCached() {
		if slices.ContainsFunc(s.corrector.Store.SecretNames(rec), func(name string) bool { return !existing[name] }) {
			s.corrector.queueRecordCheck(rec.ID, recordCheckDelay)
		}
	}
	return nil
}

// Resync does nothing.
func (*recordSink) Resync() error { return nil }
