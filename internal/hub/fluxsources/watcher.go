package fluxsources

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/source"
)

const (
	// checkInterval is the interval of the checks which kinds are referenced and have a CRD.
	checkInterval = 10 * time.Second
	// syncDelay is the delay until a source is read again while its kind is being listed.
	syncDelay = time.Second
)

// Watcher reads Flux sources from a cache and reports changes of their artifacts.
type Watcher struct {
	// NewCache returns a new cache for the hub. The Watcher starts it.
	NewCache func(cache.Options) (cache.Cache, error)
	Mapper   meta.RESTMapper
	// IsReferenced returns whether a summary refers to a source of the kind.
	IsReferenced func(kind string) bool
	// Changed is called when the content of a source may have changed.
	Changed func(source.Reference)

	// wake makes Start check the kinds before the interval ends.
	wake  chan struct{}
	mu    sync.Mutex // guards kinds; no other lock is acquired while it is held
	kinds map[string]*watch
}

// watch is the watch of one kind.
type watch struct {
	objects  client.Reader
	informer cache.Informer
	stop     context.CancelFunc
	// err is the last error of the discovery of the kind, or of the list. It is nil until the first attempt ends.
	err error
}

// New returns a Watcher. The caller must set its exported fields, and add it to the hub's manager.
func New() *Watcher {
	return &Watcher{wake: make(chan struct{}, 1), kinds: map[string]*watch{}}
}

// Get returns a source from the cache. The caller must not change it. IsReferenced must return true for the kind,
// otherwise Get always returns source.NewPendingFluxError. See source.Artifacts for the errors.
func (w *Watcher) Get(ctx context.Context, ref source.Reference) (*unstructured.Unstructured, error) {
	known, err := w.find(ref)
	if err != nil {
		return nil, err
	}
	if !known.informer.HasSynced() {
		return nil, source.NewPendingFluxError(ref, syncDelay)
	}
	object := newObject(ref.Kind)
	err = known.objects.Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, object, client.UnsafeDisableDeepCopy)
	return object, err
}

// find returns the watch of a kind, or the error why there is none.
func (w *Watcher) find(ref source.Reference) (watch, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	known, ok := w.kinds[ref.Kind]
	switch {
	case !ok:
		select {
		case w.wake <- struct{}{}:
		default: // the check is already requested
		}
		return watch{}, source.NewPendingFluxError(ref, syncDelay)
	case meta.IsNoMatchError(known.err):
		return watch{}, fmt.Errorf("%s: the hub has no kind %s of %s; is Flux's source-controller installed?", ref, ref.Kind, source.FluxGroupVersion())
	case known.err != nil && (known.informer == nil || !known.informer.HasSynced()):
		return watch{}, fmt.Errorf("%s: list the kind %s on the hub: %w", ref, ref.Kind, known.err)
	case known.informer == nil:
		return watch{}, source.NewPendingFluxError(ref, syncDelay)
	}
	return *known, nil
}

// Start watches the kinds that summaries refer to until ctx ends.
func (w *Watcher) Start(ctx context.Context) error {
	ticker := time.NewTicker(checkInterval)
	defer ticker.Stop()
	for {
		for _, kind := range source.FluxKinds() {
			w.check(ctx, kind)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		case <-w.wake:
		}
	}
}

// check starts or stops the watch of a kind.
func (w *Watcher) check(ctx context.Context, kind string) {
	w.mu.Lock()
	known := w.kinds[kind]
	w.mu.Unlock()
	isWatched := known != nil && known.informer != nil
	isReferenced := w.IsReferenced(kind)
	switch {
	case isWatched && !isReferenced:
		known.stop()
		w.set(kind, nil)
	case known != nil && !isReferenced:
		w.set(kind, nil)
	case !isWatched && isReferenced:
		gvk := source.FluxGroupVersion().WithKind(kind)
		_, err := w.Mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
		if err == nil {
			err = w.start(ctx, kind)
		}
		if err != nil {
			w.set(kind, &watch{err: err})
		}
	}
}

func (w *Watcher) set(kind string, changed *watch) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if changed == nil {
		delete(w.kinds, kind)
		return
	}
	w.kinds[kind] = changed
}

// start starts the watch of a kind whose CRD is installed. Each watch has its own cache, so that it can be stopped.
func (w *Watcher) start(ctx context.Context, kind string) error {
	objects, err := w.NewCache(cache.Options{DefaultWatchErrorHandler: func(ctx context.Context, reflector *toolscache.Reflector, err error) {
		toolscache.DefaultWatchErrorHandler(ctx, reflector, err)
		w.mu.Lock()
		defer w.mu.Unlock()
		if known := w.kinds[kind]; known != nil {
			known.err = err
		}
	}})
	if err != nil {
		return fmt.Errorf("create a cache: %w", err)
	}
	informer, err := objects.GetInformer(ctx, newObject(kind), cache.BlockUntilSynced(false))
	if err != nil {
		return fmt.Errorf("create an informer: %w", err)
	}
	if _, err := informer.AddEventHandler(w.handler(kind)); err != nil {
		return fmt.Errorf("add an event handler: %w", err)
	}
	watchCtx, stop := context.WithCancel(ctx)
	w.set(kind, &watch{objects: objects, informer: informer, stop: stop})
	go func() {
		if err := objects.Start(watchCtx); err != nil {
			log.FromContext(ctx).Error(err, "watch the sources of Flux", "kind", kind)
		}
	}()
	return nil
}

// handler returns an event handler that calls Changed for objects that are created, deleted, or have another artifact.
// It ignores other changes of the status, which Flux writes after each check.
func (w *Watcher) handler(kind string) toolscache.ResourceEventHandler {
	changed := func(obj any) {
		if unknown, ok := obj.(toolscache.DeletedFinalStateUnknown); ok {
			obj = unknown.Obj
		}
		if object, ok := obj.(client.Object); ok {
			w.Changed(source.Reference{Kind: kind, Namespace: object.GetNamespace(), Name: object.GetName()})
		}
	}
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc:    changed,
		DeleteFunc: changed,
		UpdateFunc: func(before, after any) {
			if isContentChanged(before.(*unstructured.Unstructured), after.(*unstructured.Unstructured)) {
				changed(after)
			}
		},
	}
}

// isContentChanged returns whether an object has another artifact: another URL or digest, or other annotations that
// mark the content as a template or a script.
func isContentChanged(before, after *unstructured.Unstructured) bool {
	return source.ArtifactOf(before) != source.ArtifactOf(after)
}

func newObject(kind string) *unstructured.Unstructured {
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(source.FluxGroupVersion().WithKind(kind))
	return object
}
