package karmada

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
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

// workQueue has the last known Works of the execution namespace, and a queue of the names of Works to execute. It is a
// reflector's store. Objects are deleted only for a Work with a deletionTimestamp, not for a missing Work.
type workQueue struct {
	hub       client.WithWatch
	namespace string
	clock     clock.WithTicker
	resync    time.Duration
	// startDeliveries sets gate, executor and clusterState, which returns the current state of the member.
	gate         *session.Gate
	executor     *works.Executor
	clusterState func() works.ClusterState
	queue        workqueue.TypedRateLimitingInterface[string]

	// mu guards the fields below.
	mu     sync.Mutex
	byName map[string]*workv1alpha1.Work
	// runsOfVersion counts the executions of each Work since its version in byName was stored.
	runsOfVersion map[string]int
}

var _ cache.ReflectorStore = (*workQueue)(nil)

func newWorkQueue(hub client.WithWatch, namespace string, o Options) *workQueue {
	rateLimiter := workqueue.NewTypedMaxOfRateLimiter(
		workqueue.NewTypedItemExponentialFailureRateLimiter[string](o.RetryBase, o.RetryMax),
		&workqueue.TypedBucketRateLimiter[string]{Limiter: rate.NewLimiter(rate.Limit(o.RetryQPS), o.RetryBurst)},
	)
	return &workQueue{
		hub: hub, namespace: namespace, clock: o.Clock, resync: o.ResyncPeriod,
		queue: workqueue.NewTypedRateLimitingQueue(rateLimiter), byName: map[string]*workv1alpha1.Work{}, runsOfVersion: map[string]int{},
	}
}

// run watches and executes Works until ctx ends, with this number of workers.
func (w *workQueue) run(ctx context.Context, workers int) {
	reflector := cache.NewReflectorWithOptions(w.listWatch(), &workv1alpha1.Work{}, w, cache.ReflectorOptions{
		Name: "works", ResyncPeriod: w.resync, Clock: w.clock, Backoff: kube.WatchBackoff(),
	})
	var goroutines sync.WaitGroup
	goroutines.Go(func() { reflector.RunWithContext(ctx) })
	for range workers {
		goroutines.Go(func() {
			for w.processNext(ctx) {
			}
		})
	}
	<-ctx.Done()
	w.queue.ShutDown()
	goroutines.Wait()
}

func (w *workQueue) listWatch() cache.ListerWatcher {
	options := func(raw metav1.ListOptions) []client.ListOption {
		return []client.ListOption{client.InNamespace(w.namespace), &client.ListOptions{Raw: &raw, Limit: raw.Limit, Continue: raw.Continue}}
	}
	return cache.ToListWatcherWithWatchListSemantics(kube.RetryConnection(kube.DetectRestore(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, raw metav1.ListOptions) (runtime.Object, error) {
			list := &workv1alpha1.WorkList{}
			err := w.hub.List(ctx, list, options(raw)...)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, raw metav1.ListOptions) (watch.Interface, error) {
			return w.hub.Watch(ctx, &workv1alpha1.WorkList{}, options(raw)...)
		},
	}), kube.AgentReconnectInterval), w.hub)
}

// processNext waits for the next Work and for the open gate, and executes it. It returns false after the shutdown of
// the queue.
func (w *workQueue) processNext(ctx context.Context) bool {
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
		w.runsOfVersion[name]++
		work = work.DeepCopy()
	}
	w.mu.Unlock()
	if work == nil {
		w.queue.Forget(name)
		return true
	}
	if err := w.executor.Execute(ctx, work, w.clusterState()); err != nil {
		if ctx.Err() == nil && !errors.Is(err, works.ErrStale) {
			log.FromContext(ctx).Error(err, "execute Work; retrying", "work", name)
		}
		if kube.IsUnreachable(err) {
			// The Work itself did not fail: its delay must not grow during an outage.
			w.queue.AddAfter(name, session.Jitter(session.MaxRetryDelay))
			return true
		}
		w.queue.AddRateLimited(name)
		return true
	}
	w.queue.Forget(name)
	return true
}

// requeue queues the Work of bundle id. It does nothing for a bundle of a profile.
func (w *workQueue) requeue(id bundle.ID) {
	if id.RequestorKind == workv1alpha1.WorkKind {
		w.queue.Add(id.RequestorName)
	}
}

// requeueAll queues all Works.
func (w *workQueue) requeueAll() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for name := range w.byName {
		w.queue.Add(name)
	}
}

// Add stores a new Work.
func (w *workQueue) Add(obj any) error { return w.Update(obj) }

// Update stores a new version of a Work, and queues the Work if it must be executed again.
func (w *workQueue) Update(obj any) error {
	work, ok := obj.(*workv1alpha1.Work)
	if !ok {
		return fmt.Errorf("store Work: got %T", obj)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	old := w.byName[work.Name]
	w.byName[work.Name] = work
	if old != nil && old.ResourceVersion == work.ResourceVersion {
		return nil
	}
	// The second execution of one version has compared its result with an outdated status, so the Work is executed again.
	if hasMoreChangesThanStatus(old, work) || w.runsOfVersion[work.Name] > 1 {
		w.queue.Add(work.Name)
	}
	w.runsOfVersion[work.Name] = 0
	return nil
}

// hasMoreChangesThanStatus returns true if old is nil, or if more than the status has changed.
func hasMoreChangesThanStatus(old, work *workv1alpha1.Work) bool {
	return old == nil || old.UID != work.UID || old.Generation != work.Generation || old.DeletionTimestamp.IsZero() != work.DeletionTimestamp.IsZero() ||
		!slices.Equal(old.Finalizers, work.Finalizers) || !maps.Equal(old.Annotations, work.Annotations) || !maps.Equal(old.Labels, work.Labels)
}

// Delete removes a Work from the store.
func (w *workQueue) Delete(obj any) error {
	work, ok := obj.(*workv1alpha1.Work)
	if !ok {
		return fmt.Errorf("store Work: got %T", obj)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.byName, work.Name)
	delete(w.runsOfVersion, work.Name)
	return nil
}

// Replace stores the listed Works and removes all others.
func (w *workQueue) Replace(objects []any, _ string) error {
	present := map[string]bool{}
	for _, obj := range objects {
		if err := w.Update(obj); err != nil {
			return err
		}
		present[obj.(*workv1alpha1.Work).Name] = true //nolint:forcetypeassert // Update has checked it
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	maps.DeleteFunc(w.byName, func(name string, _ *workv1alpha1.Work) bool { return !present[name] })
	maps.DeleteFunc(w.runsOfVersion, func(name string, _ int) bool { return !present[name] })
	return nil
}

// Resync queues all Works, if resync is enabled.
func (w *workQueue) Resync() error {
	if w.resync > 0 {
		w.requeueAll()
	}
	return nil
}
