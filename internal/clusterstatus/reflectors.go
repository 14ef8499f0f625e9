package clusterstatus

import (
	"context"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/towline/towline/internal/kube"
)

const (
	// retryMin and retryMax bound the delay before a failed list or watch is retried. The delay doubles with each failure,
	// and jitter at most doubles it again. retrySteps is enough for the delay to reach retryMax.
	retryMin   = time.Second
	retryMax   = 30 * time.Second
	retrySteps = 8
	// pageSize is the number of objects per page on clusters that cannot stream lists. A hub can read pages of many
	// clusters at a time, and a decoded pod needs much memory.
	pageSize = 100
)

// Run maintains the counters of nodes and pods until ctx ends, closes Options.Memory, and returns nil. A list or watch
// fails if the cluster does not answer, denies it, or returns too many objects. Run retries it, and Observe reports the
// failure.
func (o *Observer) Run(ctx context.Context) error {
	// Conditions report these failures. A log line for each attempt adds nothing.
	ctx = klog.NewContext(ctx, logr.Discard())
	listMemory := o.counters.reservation.ForLists()
	nodes, pods := o.counters.newStores(listMemory)
	var all sync.WaitGroup
	defer func() {
		all.Wait()
		listMemory.Close()
		o.counters.reservation.Close()
	}()
	all.Go(func() {
		source := o.trackFailures(&o.counters.nodeWatch, nodes.ListWatch(o.nodeListWatch(), pageSize))
		runReflector(ctx, &corev1.Node{}, cache.ToListWatcherWithWatchListSemantics(source, o.coreClient), nodes)
	})
	all.Go(func() {
		source := o.trackFailures(&o.counters.podWatch, pods.ListWatch(o.podListWatch(), pageSize))
		runReflector(ctx, &corev1.Pod{}, cache.ToListWatcherWithWatchListSemantics(source, o.coreClient), pods)
	})
	return nil
}

// runReflector updates store with the objects of source until ctx ends.
func runReflector(ctx context.Context, kind runtime.Object, source cache.ListerWatcher, store cache.TransformingStore) {
	cache.NewReflectorWithOptions(source, kind, store, cache.ReflectorOptions{
		Name: "survey", Backoff: &wait.Backoff{Duration: retryMin, Cap: retryMax, Steps: retrySteps, Factor: 2, Jitter: 1},
	}).RunWithContext(ctx)
}

// nodeListWatch lists and watches the nodes.
func (o *Observer) nodeListWatch() *cache.ListWatch {
	nodes := o.coreClient.Nodes()
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			return nodes.List(ctx, options)
		},
		WatchFuncWithContext: nodes.Watch,
	}
}

// podListWatch lists and watches the pods that are neither succeeded nor failed.
func (o *Observer) podListWatch() *cache.ListWatch {
	unfinished := fields.AndSelectors(
		fields.OneTermNotEqualSelector("status.phase", string(corev1.PodSucceeded)),
		fields.OneTermNotEqualSelector("status.phase", string(corev1.PodFailed)),
	).String()
	pods := o.coreClient.Pods(metav1.NamespaceAll)
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			options.FieldSelector = unfinished
			return pods.List(ctx, options)
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.FieldSelector = unfinished
			return pods.Watch(ctx, options)
		},
	}
}

// newStores returns the stores of the two reflectors, which update c. The lists of both use listMemory.
func (c *counters) newStores(listMemory *kube.Reservation) (nodes, pods *kube.LimitedStore) {
	nodeStore := &entryStore[*corev1.Node, node]{convert: newNodeEntry, put: c.setNode, replace: c.replaceNodes}
	podStore := &entryStore[*corev1.Pod, pod]{convert: newPodEntry, put: c.setPod, replace: c.replacePods}
	return kube.NewLimitedStore(nodeStore, kube.NewObjectLimit(c.maxNodes, "nodes"), listMemory, nodeStore.trim),
		kube.NewLimitedStore(podStore, kube.NewObjectLimit(c.maxPods, "pods"), listMemory, podStore.trim)
}

// entryStore is the store of a reflector for one kind. It converts each object to an entry, passes it to the counters
// and keeps nothing itself.
type entryStore[K runtime.Object, T countedPart] struct {
	convert func(K) *entry[T]
	put     func(*entry[T]) error
	replace func([]*entry[T]) error
}

var _ cache.ReflectorStore = &entryStore[*corev1.Pod, pod]{}

// toEntry converts an object, unless trim has converted it already.
func (s *entryStore[K, T]) toEntry(obj any) (*entry[T], bool) {
	switch obj := obj.(type) {
	case *entry[T]:
		return obj, true
	case K:
		return s.convert(obj), true
	}
	return nil, false
}

// trim converts an object of a list. LimitedStore calls it for each page, so that few whole objects are in memory.
func (s *entryStore[K, T]) trim(obj runtime.Object) (trimmed runtime.Object, size int) {
	if e, ok := s.toEntry(obj); ok {
		return e, e.value.extraBytes()
	}
	return obj, 0
}

// Add counts a new object.
func (s *entryStore[K, T]) Add(obj any) error { return s.Update(obj) }

// Update counts the current state of an object.
func (s *entryStore[K, T]) Update(obj any) error {
	if e, ok := s.toEntry(obj); ok {
		return s.put(e)
	}
	return nil
}

// Delete removes an object from the counters.
func (s *entryStore[K, T]) Delete(obj any) error {
	if e, ok := s.toEntry(obj); ok {
		e.isIgnored = true
		return s.put(e)
	}
	return nil
}

// Replace counts these objects and removes all others.
func (s *entryStore[K, T]) Replace(objects []any, _ string) error {
	all := make([]*entry[T], 0, len(objects))
	for _, obj := range objects {
		if e, ok := s.toEntry(obj); ok {
			all = append(all, e)
		}
	}
	return s.replace(all)
}

// Resync does nothing.
func (*entryStore[K, T]) Resync() error { return nil }
