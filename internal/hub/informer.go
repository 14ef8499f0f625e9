package hub

import (
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/towline/towline/internal/kube"
)

// reconnectInterval is the interval of kube.RetryConnection for the hub.
const reconnectInterval = 2 * time.Second

// newInformer returns an informer that reconnects within seconds after the API server becomes reachable. The backoff of
// client-go's informers grows to a minute and cannot be configured.
func newInformer(lw toolscache.ListerWatcher, obj runtime.Object, resync time.Duration, indexers toolscache.Indexers) toolscache.SharedIndexInformer {
	retrying := kube.RetryConnection(kube.DetectRestore(lw), reconnectInterval)
	return toolscache.NewSharedIndexInformer(toolscache.ToListWatcherWithWatchListSemantics(retrying, lw), obj, resync, indexers)
}
