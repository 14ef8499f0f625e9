package hub

import (
	"sigs.k8s.io/controller-runtime/pkg/cache"

	"github.com/towline/towline/internal/hub/fluxsources"
	"github.com/towline/towline/internal/source"
)

// newFluxWatcher returns the watcher of Flux sources, and makes artifacts read source objects from it.
func (h *hub) newFluxWatcher(artifacts *source.Artifacts) *fluxsources.Watcher {
	watcher := fluxsources.New()
	watcher.Mapper = h.GetRESTMapper()
	watcher.NewCache = func(options cache.Options) (cache.Cache, error) {
		options.Scheme, options.Mapper = h.GetScheme(), h.GetRESTMapper()
		options.NewInformer, options.DefaultTransform = newInformer, cache.TransformStripManagedFields()
		return cache.New(h.GetConfig(), options)
	}
	artifacts.Objects = watcher.Get
	return watcher
}
