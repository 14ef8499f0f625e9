package session

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

// ClusterWatcher watches the cluster object of an agent.
type ClusterWatcher[T client.Object] struct {
	// Key is the key of the object. Example is an empty object of its kind, and NewList returns an empty list of that
	// kind.
	Key     client.ObjectKey
	Example T
	NewList func() client.ObjectList
	// OnChange is called for each version of the object. It is not called after a deletion, which changes nothing on
	// the member.
	OnChange func(context.Context, T)
}

// Run watches the object until ctx ends.
func (w ClusterWatcher[T]) Run(ctx context.Context, hub client.WithWatch) {
	options := func(raw metav1.ListOptions) []client.ListOption {
		// The agent's role allows only this object, and the API server authorises the request by this selector.
		raw.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, w.Key.Name).String()
		return []client.ListOption{client.InNamespace(w.Key.Namespace), &client.ListOptions{Raw: &raw, Limit: raw.Limit, Continue: raw.Continue}}
	}
	// RetryConnection repeats requests while the API server is away, and DetectRestore lists again after a restore of
	// etcd.
	lister := cache.ToListWatcherWithWatchListSemantics(kube.RetryConnection(kube.DetectRestore(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, raw metav1.ListOptions) (runtime.Object, error) {
			list := w.NewList()
			err := hub.List(ctx, list, options(raw)...)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, raw metav1.ListOptions) (watch.Interface, error) {
			return hub.Watch(ctx, w.NewList(), options(raw)...)
		},
	}), kube.AgentReconnectInterval), hub)
	reflector := cache.NewReflectorWithOptions(lister, w.Example, watchStore[T]{ctx, w.OnChange}, cache.ReflectorOptions{Name: "own cluster", Backoff: kube.WatchBackoff()})
	reflector.RunWithContext(ctx)
}

// watchStore is a reflector's store that calls onChange and stores nothing.
type watchStore[T client.Object] struct {
	// The store interface has no context parameter. This is the context of ClusterWatcher.Run.
	ctx      context.Context //nolint:containedctx // see above
	onChange func(context.Context, T)
}

// Add calls onChange.
func (l watchStore[T]) Add(obj any) error { return l.Update(obj) }

// Update calls onChange.
func (l watchStore[T]) Update(obj any) error {
	if cluster, ok := obj.(T); ok {
		l.onChange(l.ctx, cluster)
	}
	return nil
}

// Delete does nothing, see ClusterWatcher.OnChange.
func (watchStore[T]) Delete(any) error { return nil }

// Replace calls onChange for the object that a list returned.
func (l watchStore[T]) Replace(objects []any, _ string) error {
	for _, obj := range objects {
		if err := l.Update(obj); err != nil {
			return err
		}
	}
	return nil
}

// Resync does nothing.
func (watchStore[T]) Resync() error { return nil }
