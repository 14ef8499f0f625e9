package hub

import (
	"context"
	"errors"
	"net"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/towline/towline/internal/kube"
)

// redialInterval is the time between two attempts of an informer to connect to an unreachable API server; the jitter at
// most doubles it. An attempt is one connection.
const redialInterval = 2 * time.Second

// newInformer returns an informer that reconnects within seconds when the API server is reachable again. The backoff of
// client-go's informers grows to a minute and is not configurable.
func newInformer(lw toolscache.ListerWatcher, obj runtime.Object, resync time.Duration, indexers toolscache.Indexers) toolscache.SharedIndexInformer {
	inner := kube.DetectRestore(lw)
	retrying := &toolscache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
			return redial(ctx, func() (runtime.Object, error) { return inner.ListWithContext(ctx, opts) })
		},
		WatchFuncWithContext: func(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
			return redial(ctx, func() (watch.Interface, error) { return inner.WatchWithContext(ctx, opts) })
		},
	}
	return toolscache.NewSharedIndexInformer(toolscache.ToListWatcherWithWatchListSemantics(retrying, lw), obj, resync, indexers)
}

// redial calls request until it gets a connection or ctx ends.
func redial[T any](ctx context.Context, request func() (T, error)) (T, error) {
	for {
		result, err := request()
		var unreachable *net.OpError
		if !errors.As(err, &unreachable) {
			return result, err
		}
		select {
		case <-ctx.Done():
			return result, err
		case <-time.After(wait.Jitter(redialInterval, 1)):
		}
	}
}
