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

// reconnectInterval is the minimum time between two attempts of an informer to connect to an unreachable API server. A
// random jitter of up to the same time is added. An attempt is one connection.
const reconnectInterval = 2 * time.Second

// newInformer returns an informer that reconnects within seconds after the API server becomes reachable. The backoff of
// client-go's informers grows to a minute and cannot be configured.
func newInformer(lw toolscache.ListerWatcher, obj runtime.Object, resync time.Duration, indexers toolscache.Indexers) toolscache.SharedIndexInformer {
	inner := kube.DetectRestore(lw)
	retrying := &toolscache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
			return retryConnection(ctx, func() (runtime.Object, error) { return inner.ListWithContext(ctx, opts) })
		},
		WatchFuncWithContext: func(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
			return retryConnection(ctx, func() (watch.Interface, error) { return inner.WatchWithContext(ctx, opts) })
		},
	}
	return toolscache.NewSharedIndexInformer(toolscache.ToListWatcherWithWatchListSemantics(retrying, lw), obj, resync, indexers)
}

// retryConnection calls request until it gets a connection or ctx ends.
func retryConnection[T any](ctx context.Context, request func() (T, error)) (T, error) {
	for {
		result, err := request()
		var unreachable *net.OpError
		if !errors.As(err, &unreachable) {
			return result, err
		}
		select {
		case <-ctx.Done():
			return result, err
		case <-time.After(wait.Jitter(reconnectInterval, 1)):
		}
	}
}
