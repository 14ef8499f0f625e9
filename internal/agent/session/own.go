package session

import (
	"context"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

// redialFirst and redialLast bound the growing time between attempts to reach a hub that does not answer; jitter doubles it at most.
const (
	redialFirst = 500 * time.Millisecond
	redialLast  = 15 * time.Second
	redialSteps = 6
)

// Redial returns how a watch waits for a hub that does not answer.
func Redial() *wait.Backoff {
	return &wait.Backoff{Duration: redialFirst, Cap: redialLast, Steps: redialSteps, Factor: 2, Jitter: 1}
}

// Own watches the one cluster object that an agent works for.
type Own[T client.Object] struct {
	// Key of the object; Empty is one of its kind, and List returns a list of them to fill.
	Key   client.ObjectKey
	Empty T
	List  func() client.ObjectList
	// Tell is called for each version of the object. An object that is gone changes nothing on the member, and is not told of.
	Tell func(context.Context, T)
}

// Run watches the object, and nothing else, until ctx ends.
func (o Own[T]) Run(ctx context.Context, hub client.WithWatch) {
	options := func(raw metav1.ListOptions) []client.ListOption {
		// The agent's role names this one object, which the API server matches with this selector.
		raw.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, o.Key.Name).String()
		return []client.ListOption{client.InNamespace(o.Key.Namespace), &client.ListOptions{Raw: &raw, Limit: raw.Limit, Continue: raw.Continue}}
	}
	lister := cache.ToListWatcherWithWatchListSemantics(kube.DetectRestore(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, raw metav1.ListOptions) (runtime.Object, error) {
			list := o.List()
			err := hub.List(ctx, list, options(raw)...)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, raw metav1.ListOptions) (watch.Interface, error) {
			return hub.Watch(ctx, o.List(), options(raw)...)
		},
	}), hub)
	reflector := cache.NewReflectorWithOptions(lister, o.Empty, listener[T]{ctx, o.Tell}, cache.ReflectorOptions{Name: "own cluster", Backoff: Redial()})
	reflector.RunWithContext(ctx)
}

// listener is a reflector's store that keeps nothing.
type listener[T client.Object] struct {
	// The reflector's store interface carries no context; this is the one that its owner runs it with.
	ctx  context.Context //nolint:containedctx // see above
	tell func(context.Context, T)
}

// Add tells of the cluster object.
func (l listener[T]) Add(obj any) error { return l.Update(obj) }

// Update tells of the cluster object.
func (l listener[T]) Update(obj any) error {
	if cluster, ok := obj.(T); ok {
		l.tell(l.ctx, cluster)
	}
	return nil
}

// Delete tells nothing: a cluster object that is gone changes nothing on the member.
func (listener[T]) Delete(any) error { return nil }

// Replace tells of the cluster object as it is after the connection was lost.
func (l listener[T]) Replace(objects []any, _ string) error {
	for _, obj := range objects {
		if err := l.Update(obj); err != nil {
			return err
		}
	}
	return nil
}

// Resync tells nothing.
func (listener[T]) Resync() error { return nil }
