package survey

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
)

const (
	// retryFirst and retryLast bound the growing delay between attempts to list and watch; jitter at most doubles it.
	retryFirst = time.Second
	retryLast  = 30 * time.Second
	retrySteps = 8
	// pageSize is the number of objects per page on clusters that cannot stream lists.
	pageSize = 500
)

// Run maintains the counters of nodes and pods until ctx ends, and returns nil. It retries while the cluster does not
// answer or denies list and watch; Observe reports the known counters and the failure.
func (o *Observer) Run(ctx context.Context) error {
	// Conditions report these failures. A log line for each attempt adds nothing.
	ctx = klog.NewContext(ctx, logr.Discard())
	var all sync.WaitGroup
	defer all.Wait()
	all.Go(func() {
		runReflector(ctx, &corev1.Node{}, o.nodeListerWatcher(), &entryStore[*corev1.Node, node]{convert: newNodeEntry, put: o.counters.setNode, replace: o.counters.setNodes})
	})
	all.Go(func() {
		runReflector(ctx, &corev1.Pod{}, o.podListerWatcher(), &entryStore[*corev1.Pod, pod]{convert: newPodEntry, put: o.counters.setPod, replace: o.counters.setPods})
	})
	return nil
}

// runReflector updates store with the objects of source until ctx ends.
func runReflector(ctx context.Context, kind runtime.Object, source cache.ListerWatcher, store cache.TransformingStore) {
	cache.NewReflectorWithOptions(source, kind, store, cache.ReflectorOptions{
		Name: "survey", Backoff: &wait.Backoff{Duration: retryFirst, Cap: retryLast, Steps: retrySteps, Factor: 2, Jitter: 1},
	}).RunWithContext(ctx)
}

// nodeListerWatcher lists and watches the nodes.
func (o *Observer) nodeListerWatcher() cache.ListerWatcher {
	return cache.ToListWatcherWithWatchListSemantics(o.trackFailures(&o.counters.nodeWatch, &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, _ metav1.ListOptions) (runtime.Object, error) {
			all := &corev1.NodeList{}
			err := listPages(func(options metav1.ListOptions) (*metav1.ListMeta, error) {
				page, err := o.coreClient.Nodes().List(ctx, options)
				if err != nil {
					return nil, err
				}
				for i := range page.Items {
					all.Items = append(all.Items, trimNode(&page.Items[i]))
				}
				all.ListMeta = page.ListMeta
				return &all.ListMeta, nil
			})
			return all, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			return o.coreClient.Nodes().Watch(ctx, options)
		},
	}), o.coreClient)
}

// podListerWatcher lists and watches the pods that are neither succeeded nor failed.
func (o *Observer) podListerWatcher() cache.ListerWatcher {
	unfinished := fields.AndSelectors(
		fields.OneTermNotEqualSelector("status.phase", string(corev1.PodSucceeded)),
		fields.OneTermNotEqualSelector("status.phase", string(corev1.PodFailed)),
	).String()
	pods := o.coreClient.Pods(metav1.NamespaceAll)
	return cache.ToListWatcherWithWatchListSemantics(o.trackFailures(&o.counters.podWatch, &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, _ metav1.ListOptions) (runtime.Object, error) {
			all := &corev1.PodList{}
			err := listPages(func(options metav1.ListOptions) (*metav1.ListMeta, error) {
				options.FieldSelector = unfinished
				page, err := pods.List(ctx, options)
				if err != nil {
					return nil, err
				}
				for i := range page.Items {
					all.Items = append(all.Items, trimPod(&page.Items[i]))
				}
				all.ListMeta = page.ListMeta
				return &all.ListMeta, nil
			})
			return all, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.FieldSelector = unfinished
			return pods.Watch(ctx, options)
		},
	}), o.coreClient)
}

// listPages calls list for each page, on clusters that cannot stream lists. The pages have no resource version: for the
// version 0, which a reflector requests, an API server ignores the limit.
func listPages(list func(metav1.ListOptions) (*metav1.ListMeta, error)) error {
	options := metav1.ListOptions{Limit: pageSize}
	for {
		page, err := list(options)
		if err != nil {
			return err
		}
		if page.Continue == "" {
			return nil
		}
		options.Continue = page.Continue
	}
}

// trimNode returns a copy of n that has only the fields which are counted.
func trimNode(n *corev1.Node) corev1.Node {
	return corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID},
		Status:     corev1.NodeStatus{Allocatable: n.Status.Allocatable, Conditions: n.Status.Conditions},
	}
}

// trimPod returns a copy of p that has only the fields which are counted.
func trimPod(p *corev1.Pod) corev1.Pod {
	trimmed := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name, UID: p.UID}}
	trimmed.Spec.NodeName, trimmed.Spec.Overhead, trimmed.Spec.Resources = p.Spec.NodeName, p.Spec.Overhead, p.Spec.Resources
	trimmed.Status.Phase = p.Status.Phase
	trimmed.Spec.Containers, trimmed.Spec.InitContainers = trimContainers(p.Spec.Containers), trimContainers(p.Spec.InitContainers)
	return trimmed
}

func trimContainers(all []corev1.Container) []corev1.Container {
	trimmed := make([]corev1.Container, 0, len(all))
	for i := range all {
		trimmed = append(trimmed, corev1.Container{
			RestartPolicy: all[i].RestartPolicy, Resources: corev1.ResourceRequirements{Requests: all[i].Resources.Requests},
		})
	}
	return trimmed
}

// entryStore is the store of a reflector for one kind. It converts each object to an entry, passes it to the counters
// and keeps nothing itself.
type entryStore[K runtime.Object, T any] struct {
	convert func(K) entry[T]
	put     func(entry[T])
	replace func([]entry[T])
}

var _ cache.TransformingStore = &entryStore[*corev1.Pod, pod]{}

// toEntry converts an object, unless Transformer has converted it already.
func (s *entryStore[K, T]) toEntry(obj any) (entry[T], bool) {
	switch obj := obj.(type) {
	case entry[T]:
		return obj, true
	case K:
		return s.convert(obj), true
	}
	return entry[T]{}, false
}

// Add counts a new object.
func (s *entryStore[K, T]) Add(obj any) error { return s.Update(obj) }

// Update counts the current state of an object.
func (s *entryStore[K, T]) Update(obj any) error {
	if e, ok := s.toEntry(obj); ok {
		s.put(e)
	}
	return nil
}

// Delete removes an object from the counters.
func (s *entryStore[K, T]) Delete(obj any) error {
	if e, ok := s.toEntry(obj); ok {
		e.isRemoved = true
		s.put(e)
	}
	return nil
}

// Replace counts these objects and removes all others.
func (s *entryStore[K, T]) Replace(objects []any, _ string) error {
	all := make([]entry[T], 0, len(objects))
	for _, obj := range objects {
		if e, ok := s.toEntry(obj); ok {
			all = append(all, e)
		}
	}
	s.replace(all)
	return nil
}

// Resync does nothing.
func (*entryStore[K, T]) Resync() error { return nil }

// Transformer returns a function that converts objects to entries, so that the reflector does not hold whole objects
// while it receives the first list.
func (s *entryStore[K, T]) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) {
		if e, ok := s.toEntry(obj); ok {
			return e, nil
		}
		return obj, nil
	}
}
