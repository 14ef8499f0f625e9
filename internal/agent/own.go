package agent

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

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// redialFirst and redialLast bound the growing time between attempts to reach a hub that does not answer; jitter doubles it at most.
const (
	redialFirst = 500 * time.Millisecond
	redialLast  = 15 * time.Second
	redialSteps = 6
)

// own watches the cluster object that the agent works for, and nothing else, until ctx ends. tell is called for each version of it.
func own(ctx context.Context, hub client.WithWatch, key client.ObjectKey, tell func(context.Context, *libv1beta1.SveltosCluster)) {
	options := func(raw metav1.ListOptions) []client.ListOption {
		// The agent's Role names this one object, which the API server matches with this selector.
		raw.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, key.Name).String()
		return []client.ListOption{client.InNamespace(key.Namespace), &client.ListOptions{Raw: &raw}}
	}
	lister := cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, raw metav1.ListOptions) (runtime.Object, error) {
			list := &libv1beta1.SveltosClusterList{}
			err := hub.List(ctx, list, options(raw)...)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, raw metav1.ListOptions) (watch.Interface, error) {
			return hub.Watch(ctx, &libv1beta1.SveltosClusterList{}, options(raw)...)
		},
	}, hub)
	reflector := cache.NewReflectorWithOptions(lister, &libv1beta1.SveltosCluster{}, listener{ctx, tell}, cache.ReflectorOptions{
		Name:    "own cluster",
		Backoff: &wait.Backoff{Duration: redialFirst, Cap: redialLast, Steps: redialSteps, Factor: 2, Jitter: 1},
	})
	reflector.RunWithContext(ctx)
}

// listener is a reflector's store that keeps nothing.
type listener struct {
	// The reflector's store interface carries no context; this is the one that its owner runs it with.
	ctx  context.Context //nolint:containedctx // see above
	tell func(context.Context, *libv1beta1.SveltosCluster)
}

var _ cache.ReflectorStore = listener{}

// Add tells of the cluster object.
func (l listener) Add(obj any) error { return l.Update(obj) }

// Update tells of the cluster object.
func (l listener) Update(obj any) error {
	if cluster, ok := obj.(*libv1beta1.SveltosCluster); ok {
		l.tell(l.ctx, cluster)
	}
	return nil
}

// Delete tells nothing: a cluster object that is gone changes nothing on the member.
func (listener) Delete(any) error { return nil }

// Replace tells of the cluster object as it is after the connection was lost.
func (l listener) Replace(objects []any, _ string) error {
	for _, obj := range objects {
		if err := l.Update(obj); err != nil {
			return err
		}
	}
	return nil
}

// Resync tells nothing.
func (listener) Resync() error { return nil }
