package hub

import (
	"fmt"

	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/hub/resources"
)

// newResources returns the watcher of the objects that templates refer to (templateResourceRefs). It has its own cache,
// so that it can stop watching a kind that templates no longer refer to.
func newResources(mgr ctrl.Manager, live client.Client) (*resources.Watcher, error) {
	kinds, err := cache.New(mgr.GetConfig(), cache.Options{
		Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(), HTTPClient: mgr.GetHTTPClient(),
		DefaultTransform: resources.StripObject, NewInformer: newInformer, ReaderFailOnMissingInformer: true,
	})
	if err != nil {
		return nil, fmt.Errorf("create the cache for objects of templates: %w", err)
	}
	watcher := resources.New(live, kinds, mgr.GetCache())
	if err := mgr.Add(watcher); err != nil {
		return nil, fmt.Errorf("add the reader of objects of templates: %w", err)
	}
	return watcher, nil
}
