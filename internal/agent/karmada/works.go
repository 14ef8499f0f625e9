package karmada

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/works"
)

// workload are the Works of the execution space as the hub last told of them, and a queue of the names of those that are to be looked at. It is
// a reflector's store. A Work that vanishes leaves what it deployed: only one that is being deleted takes it away.
type workload struct {
	hub       client.WithWatch
	namespace string
	clock     clock.WithTicker
	resync    time.Duration
	gate      *session.Gate
	executor  *works.Executor
	// circumstances are those of the cluster now.
	circumstances func() works.ClusterState
	queue         workqueue.TypedRateLimitingInterface[string]
	// ready says that the hub was reached once.
	ready atomic.Bool

	// mu guards what follows.
	mu     sync.Mutex
	byName map[string]*workv1alpha1.Work
	// looks counts how often each Work was executed as it is in byName.
	looks map[string]int
}

var _ cache.ReflectorStore = (*workload)(nil)

func newWorkload(hub client.WithWatch, namespace string, o Options) *workload {
	limits := workqueue.NewTypedMaxOfRateLimiter(
		workqueue.NewTypedItemExponentialFailureRateLimiter[string](o.RetryBase, o.RetryMost),
		&workqueue.TypedBucketRateLimiter[string]{Limiter: rate.NewLimiter(rate.Limit(o.RetryQPS), o.RetryBurst)},
	)
	return &workload{
		hub: hub, namespace: namespace, clock: o.Clock, resync: o.ResyncPeriod,
		queue: workqueue.NewTypedRateLimitingQueue(limits), byName: map[string]*workv1alpha1.Work{}, looks: map[string]int{},
	}
}

// run watches the Works and executes them, several at once, until ctx ends.
func (w *workload) run(ctx context.Context, workers int) {
	reflector := cache.NewReflectorWithOptions(w.listWatch(), &workv1alpha1.Work{}, w, cache.ReflectorOptions{
		Name: "works", ResyncPeriod: w.resync, Clock: w.clock, Backoff: session.HubBackoff(),
	})
	var running sync.WaitGroup
	running.Go(func() { reflector.RunWithContext(ctx) })
	for range workers {
		running.Go(func() {
			for w.next(ctx) {
			}
		})
	}
	<-ctx.Done()
	w.queue.ShutDown()
	running.Wait()
}

func (w *workload) listWatch() cache.ListerWatcher {
	options := func(raw metav1.ListOptions) []client.ListOption {
		return []client.ListOption{client.InNamespace(w.namespace), &client.ListOptions{Raw: &raw, Limit: raw.Limit, Continue: raw.Continue}}
	}
	return cache.ToListWatcherWithWatchListSemantics(kube.DetectRestore(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, raw metav1.ListOptions) (runtime.Object, error) {
			list := &workv1alpha1.WorkList{}
			err := w.hub.List(ctx, list, options(raw)...)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, raw metav1.ListOptions) (watch.Interface, error) {
			return w.hub.Watch(ctx, &workv1alpha1.WorkList{}, options(raw)...)
		},
	}), w.hub)
}

// next executes one Work; it returns false when there will be no more.
func (w *workload) next(ctx context.Context) bool {
	name, shutdown := w.queue.Get()
	if shutdown {
		return false
	}
	defer w.queue.Done(name)
	if _, ok := w.gate.WaitOpen(ctx); !ok {
		return true
	}
	w.mu.Lock()
	work := w.byName[name]
	if work != nil {
		w.looks[name]++
		work = work.DeepCopy()
	}
	w.mu.Unlock()
	if work == nil {
		w.queue.Forget(name)
		return true
	}
	again, err := w.executor.Execute(ctx, work, w.circumstances())
	switch {
	case err != nil:
		if ctx.Err() == nil && !errors.Is(err, works.ErrStale) {
			log.FromContext(ctx).Error(err, "execute Work; trying again", "work", name)
		}
		w.queue.AddRateLimited(name)
		return true
	case again > 0:
		w.queue.AddAfter(name, again)
	}
	w.queue.Forget(name)
	return true
}

// wake has the Work that id is for looked at, if it is for one.
func (w *workload) wake(id bundle.ID) {
	if id.RequestorKind == workv1alpha1.WorkKind {
		w.queue.Add(id.RequestorName)
	}
}

// wakeAll has all Works looked at.
func (w *workload) wakeAll() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for name := range w.byName {
		w.queue.Add(name)
	}
}

// Add takes a Work that the watch saw for the first time.
func (w *workload) Add(obj any) error { return w.Update(obj) }

// Update takes a Work that changed.
func (w *workload) Update(obj any) error {
	work, ok := obj.(*workv1alpha1.Work)
	if !ok {
		return fmt.Errorf("take Work: got %T", obj)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	old := w.byName[work.Name]
	w.byName[work.Name] = work
	if old != nil && old.ResourceVersion == work.ResourceVersion {
		return nil
	}
	// One that was looked at again before the watch told what the first look wrote was compared with what is not so any more.
	if news(old, work) || w.looks[work.Name] > 1 {
		w.queue.Add(work.Name)
	}
	w.looks[work.Name] = 0
	return nil
}

// news says whether there is more in work than what became of it.
func news(old, work *workv1alpha1.Work) bool {
	return old == nil || old.UID != work.UID || old.Generation != work.Generation || old.DeletionTimestamp.IsZero() != work.DeletionTimestamp.IsZero() ||
		!slices.Equal(old.Finalizers, work.Finalizers) || !maps.Equal(old.Annotations, work.Annotations) || !maps.Equal(old.Labels, work.Labels)
}

// Delete forgets a Work.
func (w *workload) Delete(obj any) error {
	work, ok := obj.(*workv1alpha1.Work)
	if !ok {
		return fmt.Errorf("take Work: got %T", obj)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.byName, work.Name)
	delete(w.looks, work.Name)
	return nil
}

// Replace takes all Works that the hub has now.
func (w *workload) Replace(objects []any, _ string) error {
	present := map[string]bool{}
	for _, obj := range objects {
		if err := w.Update(obj); err != nil {
			return err
		}
		present[obj.(*workv1alpha1.Work).Name] = true //nolint:forcetypeassert // Update has looked
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	maps.DeleteFunc(w.byName, func(name string, _ *workv1alpha1.Work) bool { return !present[name] })
	maps.DeleteFunc(w.looks, func(name string, _ int) bool { return !present[name] })
	w.ready.Store(true)
	return nil
}

// Resync has all Works looked at.
func (w *workload) Resync() error {
	if w.resync > 0 {
		w.wakeAll()
	}
	return nil
}
