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

// redialPause is the time between two attempts of one informer to reach an API server that does not answer; jitter doubles it at most.
// An attempt is one connection, which is refused.
const redialPause = 2 * time.Second

// newInformer makes an informer that is back within seconds when the API server is: one of client-go soon asks only once in up to a
// minute, and has no setting for that.
func newInformer(lw toolscache.ListerWatcher, obj runtime.Object, resync time.Duration, indexers toolscache.Indexers) toolscache.SharedIndexInformer {
	inner := kube.DetectRestore(lw)
	patient := &toolscache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
			return redial(ctx, func() (runtime.Object, error) { return inner.ListWithContext(ctx, opts) })
		},
		WatchFuncWithContext: func(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
			return redial(ctx, func() (watch.Interface, error) { return inner.WatchWithContext(ctx, opts) })
		},
	}
	return toolscache.NewSharedIndexInformer(toolscache.ToListWatcherWithWatchListSemantics(patient, lw), obj, resync, indexers)
}

// redial asks until there is a connection or ctx ends.
func redial[T any](ctx context.Context, ask func() (T, error)) (T, error) {
	for {
		answer, err := ask()
		var unreachable *net.OpError
		if !errors.As(err, &unreachable) {
			return answer, err
		}
		select {
		case <-ctx.Done():
			return answer, err
		case <-time.After(wait.Jitter(redialPause, 1)):
		}
	}
}
