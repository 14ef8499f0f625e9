package resources

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/log"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/source"
)

const (
	// maxKinds is the maximum number of watched kinds, since each takes memory. maxKindsOfNamespace is the maximum for the
	// Profiles of one namespace, so that one tenant cannot use all. A kind that Profiles of several namespaces refer to
	// counts for one of the namespaces. ClusterProfiles have only the limit maxKinds.
	maxKinds, maxKindsOfNamespace = 100, 25
	// minKindDelay and maxKindDelay bound the delay until a kind that cannot be watched is requested again.
	minKindDelay, maxKindDelay = time.Second, 10 * time.Second
	// minReadInterval is the minimum time between two reads of an object after events.
	minReadInterval = time.Second
	// probeTimeout is the timeout of the first request for a kind.
	probeTimeout = 10 * time.Second
	// objectWorkers and kindWorkers are the numbers of workers for the two queues.
	objectWorkers, kindWorkers = 4, 4
)

// objectKey identifies an object. The namespace is empty for a cluster-scoped object.
type objectKey struct {
	gvk             schema.GroupVersionKind
	namespace, name string
}

func keyOf(r source.ResourceReference) objectKey {
	return objectKey{gvk: schema.FromAPIVersionAndKind(r.APIVersion, r.Kind), namespace: r.Namespace, name: r.Name}
}

// watchedObject is an object that summaries refer to.
type watchedObject struct {
	// readMu is held while the object is read, so that concurrent callers read it once. It is acquired before Watcher.mu.
	readMu sync.Mutex

	// summaries has the summaries that refer to the object, by reference.
	summaries map[source.ResourceReference]map[types.NamespacedName]struct{}
	// isRead is true after the object was read. Then latest is the version that was read last, at the time readAt.
	isRead bool
	latest version
	readAt time.Time
	// pins has the pin of each reference for which Load has read the object.
	pins map[source.ResourceReference]pin
}

// Watcher reads and watches objects. Create it with New, and add it to the manager of the hub.
type Watcher struct {
	// Changed receives the ClusterSummaries to reconcile.
	Changed chan event.GenericEvent

	live client.Client
	// kindCache watches the metadata of all kinds in use except ConfigMaps and Secrets. contentCache watches the metadata
	// of these two.
	kindCache, contentCache cache.Cache
	// objectQueue has the objects for refresh, and kindQueue the kinds for ensureKind.
	objectQueue workqueue.TypedRateLimitingInterface[objectKey]
	kindQueue   workqueue.TypedRateLimitingInterface[schema.GroupVersionKind]

	mu      sync.Mutex // guards the fields below, and the fields of the objects
	objects map[objectKey]*watchedObject
	// references has the references of each summary.
	references map[types.NamespacedName]summaryReferences
	// kindUses has the number of references to each kind, by namespace of the Profile ("" for ClusterProfiles). kindErrors
	// has the reason why a kind cannot be watched.
	kindUses   map[schema.GroupVersionKind]map[string]int
	kindErrors map[schema.GroupVersionKind]error
	// watchedKinds has the watched kinds, with the namespace whose limit maxKindsOfNamespace counts them.
	watchedKinds map[schema.GroupVersionKind]string
}

// summaryReferences are the references of a summary. namespace is the namespace of its Profile, "" for a
// ClusterProfile.
type summaryReferences struct {
	namespace string
	all       []source.ResourceReference
}

// New returns a Watcher that reads objects by live. kindCache must be a cache for this Watcher only, with the transform
// StripObject and ReaderFailOnMissingInformer; the Watcher starts it. contentCache is the hub's cache of the metadata
// of ConfigMaps and Secrets.
func New(live client.Client, kindCache, contentCache cache.Cache) *Watcher {
	return &Watcher{
		Changed: make(chan event.GenericEvent), live: live, kindCache: kindCache, contentCache: contentCache,
		objectQueue: workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[objectKey](minReadInterval, time.Minute)),
		kindQueue:   workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[schema.GroupVersionKind](minKindDelay, maxKindDelay)),
		objects:     map[objectKey]*watchedObject{}, references: map[types.NamespacedName]summaryReferences{},
		kindUses: map[schema.GroupVersionKind]map[string]int{}, kindErrors: map[schema.GroupVersionKind]error{}, watchedKinds: map[schema.GroupVersionKind]string{},
	}
}

// StripObject returns the metadata of an object with its name and its version only.
func StripObject(obj any) (any, error) {
	full, ok := obj.(*metav1.PartialObjectMetadata)
	if !ok {
		return obj, nil
	}
	return &metav1.PartialObjectMetadata{TypeMeta: full.TypeMeta, ObjectMeta: metav1.ObjectMeta{
		Namespace: full.Namespace, Name: full.Name, UID: full.UID, ResourceVersion: full.ResourceVersion,
	}}, nil
}

// Start runs the Watcher until ctx ends.
func (w *Watcher) Start(ctx context.Context) error {
	for _, kind := range []string{"ConfigMap", "Secret"} {
		if err := w.watch(ctx, w.contentCache, corev1.SchemeGroupVersion.WithKind(kind)); err != nil {
			return err
		}
	}
	var running sync.WaitGroup
	for range objectWorkers {
		running.Go(func() { runWorker(ctx, w.objectQueue, w.refresh) })
	}
	for range kindWorkers {
		running.Go(func() { runWorker(ctx, w.kindQueue, w.ensureKind) })
	}
	err := w.kindCache.Start(ctx)
	w.objectQueue.ShutDown()
	w.kindQueue.ShutDown()
	running.Wait()
	return err
}

// runWorker calls do for the items of a queue until it is shut down. After an error it repeats the call with backoff.
func runWorker[T comparable](ctx context.Context, queue workqueue.TypedRateLimitingInterface[T], do func(context.Context, T) error) {
	for {
		item, isShutDown := queue.Get()
		if isShutDown {
			return
		}
		if err := do(ctx, item); err != nil {
			log.FromContext(ctx).V(1).Info("an object for templates cannot be read or watched yet", "object", item, "reason", err.Error())
			queue.AddRateLimited(item)
		} else {
			queue.Forget(item)
		}
		queue.Done(item)
	}
}

// setReferences replaces the references of a summary.
func (w *Watcher) setReferences(summary types.NamespacedName, references summaryReferences) {
	w.mu.Lock()
	defer w.mu.Unlock()
	former := w.references[summary]
	w.references[summary] = references
	for _, reference := range references.all {
		w.addReference(summary, reference)
		w.addKindUse(keyOf(reference).gvk, references.namespace)
	}
	for _, reference := range former.all {
		if !slices.Contains(references.all, reference) {
			w.deleteReference(summary, reference)
		}
		w.removeKindUse(keyOf(reference).gvk, former.namespace)
	}
	if len(references.all) == 0 {
		delete(w.references, summary)
	}
}

// addKindUse counts a reference of a namespace to a kind. A kind that is not watched is queued again for each new
// namespace, since the other namespaces may have reached maxKindsOfNamespace. The caller must hold mu.
func (w *Watcher) addKindUse(gvk schema.GroupVersionKind, namespace string) {
	if w.kindUses[gvk] == nil {
		w.kindUses[gvk] = map[string]int{}
	}
	_, isWatched := w.watchedKinds[gvk]
	if w.kindUses[gvk][namespace]++; w.kindUses[gvk][namespace] == 1 && !isWatched && !isHubCached(gvk) {
		w.kindQueue.Add(gvk)
	}
}

// removeKindUse reverts addKindUse. The caller must hold mu.
func (w *Watcher) removeKindUse(gvk schema.GroupVersionKind, namespace string) {
	if w.kindUses[gvk][namespace]--; w.kindUses[gvk][namespace] == 0 {
		delete(w.kindUses[gvk], namespace)
	}
	if len(w.kindUses[gvk]) == 0 {
		delete(w.kindUses, gvk)
		w.kindQueue.Add(gvk)
	}
}

// addReference adds summary to the object of a reference. The caller must hold mu.
func (w *Watcher) addReference(summary types.NamespacedName, reference source.ResourceReference) {
	key := keyOf(reference)
	watched := w.objects[key]
	if watched == nil {
		watched = &watchedObject{summaries: map[source.ResourceReference]map[types.NamespacedName]struct{}{}, pins: map[source.ResourceReference]pin{}}
		w.objects[key] = watched
	}
	if watched.summaries[reference] == nil {
		watched.summaries[reference] = map[types.NamespacedName]struct{}{}
	}
	watched.summaries[reference][summary] = struct{}{}
}

// deleteReference reverts addReference, and deletes the pin and the object if no other summary needs them. The caller
// must hold mu.
func (w *Watcher) deleteReference(summary types.NamespacedName, reference source.ResourceReference) {
	key := keyOf(reference)
	watched := w.objects[key]
	if watched == nil {
		return // another identifier of the summary named the same object
	}
	if delete(watched.summaries[reference], summary); len(watched.summaries[reference]) > 0 {
		return
	}
	delete(watched.summaries, reference)
	delete(watched.pins, reference)
	if len(watched.summaries) > 0 {
		return
	}
	delete(w.objects, key)
}

// isHubCached returns whether the hub's cache has the metadata of all objects of a kind.
func isHubCached(gvk schema.GroupVersionKind) bool {
	return gvk == corev1.SchemeGroupVersion.WithKind("ConfigMap") || gvk == corev1.SchemeGroupVersion.WithKind("Secret")
}

func metadataOf(gvk schema.GroupVersionKind) *metav1.PartialObjectMetadata {
	object := &metav1.PartialObjectMetadata{}
	object.SetGroupVersionKind(gvk)
	return object
}

// ensureKind watches a kind that is in use, and stops the watch of a kind that is not.
func (w *Watcher) ensureKind(ctx context.Context, gvk schema.GroupVersionKind) error {
	w.mu.Lock()
	_, isWatched := w.watchedKinds[gvk]
	isNeeded := len(w.kindUses[gvk]) > 0 && !isHubCached(gvk)
	namespace, err := w.assignNamespace(gvk)
	if !isNeeded {
		delete(w.kindErrors, gvk) // otherwise kinds that do not exist would remain in memory
	}
	w.mu.Unlock()
	switch {
	case isNeeded == isWatched:
		return nil
	case !isNeeded:
		err = w.kindCache.RemoveInformer(ctx, metadataOf(gvk))
	case err == nil:
		if err = w.probe(ctx, gvk); err == nil {
			err = w.watch(ctx, w.kindCache, gvk)
		}
	}
	w.mu.Lock()
	// Load returns the error, so the summaries must be reconciled if it changes.
	isChanged := (err == nil) != (w.kindErrors[gvk] == nil)
	if w.kindErrors[gvk] = err; err == nil {
		delete(w.kindErrors, gvk)
		if delete(w.watchedKinds, gvk); isNeeded {
			w.watchedKinds[gvk] = namespace
		}
		w.kindQueue.Add(gvk) // check again, since the references can have changed meanwhile
	}
	summaries := w.summariesOf(gvk)
	w.mu.Unlock()
	if isChanged {
		w.enqueue(ctx, summaries)
	}
	return err
}

// assignNamespace returns the namespace for which a watched kind counts: "" if a ClusterProfile refers to it, or else a
// namespace with a reference to it and fewer than maxKindsOfNamespace kinds. The caller must hold mu.
func (w *Watcher) assignNamespace(gvk schema.GroupVersionKind) (string, error) {
	if len(w.watchedKinds) >= maxKinds {
		return "", errTooManyKinds
	}
	kinds := map[string]int{} // by namespace
	for kind, namespace := range w.watchedKinds {
		if uses := w.kindUses[kind]; uses[namespace] == 0 && len(uses) > 0 {
			namespace = slices.Min(slices.Collect(maps.Keys(uses))) // the former namespace has no reference left
			w.watchedKinds[kind] = namespace
		}
		kinds[namespace]++
	}
	for _, namespace := range slices.Sorted(maps.Keys(w.kindUses[gvk])) {
		if namespace == "" || kinds[namespace] < maxKindsOfNamespace {
			return namespace, nil
		}
	}
	return "", errTooManyKindsOfNamespace
}

// summariesOf returns the summaries that refer to an object of a kind. The caller must hold mu.
func (w *Watcher) summariesOf(gvk schema.GroupVersionKind) map[types.NamespacedName]struct{} {
	all := map[types.NamespacedName]struct{}{}
	for key, watched := range w.objects {
		if key.gvk != gvk {
			continue
		}
		for _, summaries := range watched.summaries {
			for summary := range summaries {
				all[summary] = struct{}{}
			}
		}
	}
	return all
}

// probe returns an error if the API server does not serve a kind, or the hub may not list it: an informer would only
// log this.
func (w *Watcher) probe(ctx context.Context, gvk schema.GroupVersionKind) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(gvk.GroupVersion().WithKind(gvk.Kind + "List"))
	return w.live.List(ctx, list, client.Limit(1))
}

// watch creates the informer of a kind if necessary, and adds the event handler.
func (w *Watcher) watch(ctx context.Context, informers cache.Cache, gvk schema.GroupVersionKind) error {
	informer, err := informers.GetInformer(ctx, metadataOf(gvk), cache.BlockUntilSynced(false))
	if err != nil {
		return err
	}
	_, err = informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { w.onEvent(gvk, obj, false) },
		UpdateFunc: func(_, obj any) { w.onEvent(gvk, obj, false) },
		DeleteFunc: func(obj any) { w.onEvent(gvk, obj, true) },
	})
	return err
}

// onEvent enqueues a referenced object for refresh, unless this version of it was read.
func (w *Watcher) onEvent(gvk schema.GroupVersionKind, obj any, isDeleted bool) {
	if unknown, ok := obj.(toolscache.DeletedFinalStateUnknown); ok {
		obj = unknown.Obj
	}
	changed, ok := obj.(client.Object)
	if !ok {
		return
	}
	key := objectKey{gvk: gvk, namespace: changed.GetNamespace(), name: changed.GetName()}
	w.mu.Lock()
	defer w.mu.Unlock()
	watched := w.objects[key]
	if watched == nil || !isDeleted && watched.isRead && watched.latest.resourceVersion == changed.GetResourceVersion() {
		return
	}
	w.objectQueue.AddAfter(key, minReadInterval-time.Since(watched.readAt))
}

// enqueue sends summaries to Changed. It waits until the controller has received them, or until ctx ends.
func (w *Watcher) enqueue(ctx context.Context, summaries map[types.NamespacedName]struct{}) {
	for name := range summaries {
		summary := &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}}
		select {
		case w.Changed <- event.GenericEvent{Object: summary}:
		case <-ctx.Done():
			return
		}
	}
}
