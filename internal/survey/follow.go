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
	// retryFirst and retryLast bound the growing time between attempts to watch a cluster that does not answer; jitter doubles it at most.
	retryFirst = time.Second
	retryLast  = 30 * time.Second
	retrySteps = 8
	// pageSize is how many objects are read at once from a cluster that cannot stream them.
	pageSize = 500
)

// Run keeps the sums of nodes and pods until ctx ends. A cluster that does not answer, or does not let us watch, is tried again from time
// to time: Observe says what is known.
func (o *Observer) Run(ctx context.Context) error {
	// The conditions tell of a cluster that does not answer, or does not let us watch. A log line for each attempt tells no more.
	ctx = klog.NewContext(ctx, logr.Discard())
	var all sync.WaitGroup
	defer all.Wait()
	all.Go(func() {
		follow(ctx, &corev1.Node{}, o.nodes(), &shelf[*corev1.Node, node]{take: nodeOf, put: o.tally.setNode, replace: o.tally.setNodes})
	})
	all.Go(func() {
		follow(ctx, &corev1.Pod{}, o.unfinishedPods(), &shelf[*corev1.Pod, pod]{take: podOf, put: o.tally.setPod, replace: o.tally.setPods})
	})
	return nil
}

// follow keeps store up to date with what source lists until ctx ends.
func follow(ctx context.Context, kind runtime.Object, source cache.ListerWatcher, store cache.TransformingStore) {
	cache.NewReflectorWithOptions(source, kind, store, cache.ReflectorOptions{
		Name: "survey", Backoff: &wait.Backoff{Duration: retryFirst, Cap: retryLast, Steps: retrySteps, Factor: 2, Jitter: 1},
	}).RunWithContext(ctx)
}

// nodes lists and watches the nodes.
func (o *Observer) nodes() cache.ListerWatcher {
	return cache.ToListWatcherWithWatchListSemantics(o.reported(&o.tally.nodeFeed, &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, _ metav1.ListOptions) (runtime.Object, error) {
			all := &corev1.NodeList{}
			err := paged(func(options metav1.ListOptions) (*metav1.ListMeta, error) {
				page, err := o.core.Nodes().List(ctx, options)
				if err != nil {
					return nil, err
				}
				for i := range page.Items {
					all.Items = append(all.Items, thinNode(&page.Items[i]))
				}
				all.ListMeta = page.ListMeta
				return &all.ListMeta, nil
			})
			return all, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			return o.core.Nodes().Watch(ctx, options)
		},
	}), o.core)
}

// unfinishedPods lists and watches the pods that have not finished.
func (o *Observer) unfinishedPods() cache.ListerWatcher {
	unfinished := fields.AndSelectors(
		fields.OneTermNotEqualSelector("status.phase", string(corev1.PodSucceeded)),
		fields.OneTermNotEqualSelector("status.phase", string(corev1.PodFailed)),
	).String()
	pods := o.core.Pods(metav1.NamespaceAll)
	return cache.ToListWatcherWithWatchListSemantics(o.reported(&o.tally.podFeed, &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, _ metav1.ListOptions) (runtime.Object, error) {
			all := &corev1.PodList{}
			err := paged(func(options metav1.ListOptions) (*metav1.ListMeta, error) {
				options.FieldSelector = unfinished
				page, err := pods.List(ctx, options)
				if err != nil {
					return nil, err
				}
				for i := range page.Items {
					all.Items = append(all.Items, thinPod(&page.Items[i]))
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
	}), o.core)
}

// paged calls list for one page after the other. It is for clusters that cannot stream what they have.
func paged(list func(metav1.ListOptions) (*metav1.ListMeta, error)) error {
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

// thinNode returns n with nothing but what counts.
func thinNode(n *corev1.Node) corev1.Node {
	return corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID},
		Status:     corev1.NodeStatus{Allocatable: n.Status.Allocatable, Conditions: n.Status.Conditions},
	}
}

// thinPod returns p with nothing but what counts.
func thinPod(p *corev1.Pod) corev1.Pod {
	thin := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name, UID: p.UID}}
	thin.Spec.NodeName, thin.Spec.Overhead, thin.Spec.Resources = p.Spec.NodeName, p.Spec.Overhead, p.Spec.Resources
	thin.Status.Phase = p.Status.Phase
	thin.Spec.Containers, thin.Spec.InitContainers = thinContainers(p.Spec.Containers), thinContainers(p.Spec.InitContainers)
	return thin
}

func thinContainers(all []corev1.Container) []corev1.Container {
	thin := make([]corev1.Container, 0, len(all))
	for i := range all {
		thin = append(thin, corev1.Container{
			RestartPolicy: all[i].RestartPolicy, Resources: corev1.ResourceRequirements{Requests: all[i].Resources.Requests},
		})
	}
	return thin
}

// shelf is a reflector's store that passes on what is kept of objects of one kind, and keeps nothing itself.
type shelf[K runtime.Object, T any] struct {
	take    func(K) seen[T]
	put     func(seen[T])
	replace func([]seen[T])
}

var _ cache.TransformingStore = &shelf[*corev1.Pod, pod]{}

// taken returns what is kept of an object, which may have been taken before.
func (s *shelf[K, T]) taken(obj any) (seen[T], bool) {
	switch obj := obj.(type) {
	case seen[T]:
		return obj, true
	case K:
		return s.take(obj), true
	}
	return seen[T]{}, false
}

// Add counts an object.
func (s *shelf[K, T]) Add(obj any) error { return s.Update(obj) }

// Update counts an object as it is now.
func (s *shelf[K, T]) Update(obj any) error {
	if is, ok := s.taken(obj); ok {
		s.put(is)
	}
	return nil
}

// Delete counts an object no more.
func (s *shelf[K, T]) Delete(obj any) error {
	if was, ok := s.taken(obj); ok {
		was.over = true
		s.put(was)
	}
	return nil
}

// Replace counts these objects and no others.
func (s *shelf[K, T]) Replace(objects []any, _ string) error {
	all := make([]seen[T], 0, len(objects))
	for _, obj := range objects {
		if is, ok := s.taken(obj); ok {
			all = append(all, is)
		}
	}
	s.replace(all)
	return nil
}

// Resync does nothing.
func (*shelf[K, T]) Resync() error { return nil }

// Transformer makes the reflector keep, while it collects the first list, no more of an object than we do.
func (s *shelf[K, T]) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) {
		if is, ok := s.taken(obj); ok {
			return is, nil
		}
		return obj, nil
	}
}
