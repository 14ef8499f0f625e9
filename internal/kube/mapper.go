package kube

import (
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/restmapper"
)

// Resource is the API resource of a kind. The zero Resource stands for no kind.
type Resource struct {
	GVR        schema.GroupVersionResource
	Namespaced bool
}

// Mapper finds the resources of kinds. It caches discovery until Reset. It is safe for concurrent use.
type Mapper struct {
	live   discovery.DiscoveryInterface
	mapper *restmapper.DeferredDiscoveryRESTMapper
}

// NewMapper returns a Mapper over client. It connects on first use.
func NewMapper(client discovery.DiscoveryInterface) *Mapper {
	return &Mapper{live: client, mapper: restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(client))}
}

// Reset clears the cache, so that new kinds are found and deleted ones are not.
func (m *Mapper) Reset() { m.mapper.Reset() }

// Resource returns the resource of gvk in exactly its version. The error satisfies meta.IsNoMatchError if the server
// does not serve the kind.
func (m *Mapper) Resource(gvk schema.GroupVersionKind) (Resource, error) {
	mapping, err := m.mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
	if err != nil {
		return Resource{}, fmt.Errorf("find resource of %s: %w", gvk, err)
	}
	return resourceOf(mapping), nil
}

// AnyVersion returns the resource of gvk in its version, or in the preferred version of the server. This is sufficient
// for metadata, which is the same in all versions. The error satisfies meta.IsNoMatchError if the server does not serve
// the kind.
func (m *Mapper) AnyVersion(gvk schema.GroupVersionKind) (Resource, error) {
	found, err := m.Resource(gvk)
	if !meta.IsNoMatchError(err) {
		return found, err
	}
	mapping, err := m.mapper.RESTMapping(gvk.GroupKind())
	if err != nil {
		return Resource{}, fmt.Errorf("find resource of %s: %w", gvk.GroupKind(), err)
	}
	return resourceOf(mapping), nil
}

// Gone requests from the server whether it no longer serves gvk. A missing mapping is not sufficient: an aggregated API
// server may be unavailable.
func (m *Mapper) Gone(gvk schema.GroupVersionKind) (bool, error) {
	list, err := m.live.ServerResourcesForGroupVersion(gvk.GroupVersion().String())
	if apierrors.IsNotFound(err) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("list resources of %s: %w", gvk.GroupVersion(), err)
	}
	for _, resource := range list.APIResources {
		if resource.Kind == gvk.Kind {
			return false, nil
		}
	}
	return true, nil
}

func resourceOf(mapping *meta.RESTMapping) Resource {
	return Resource{GVR: mapping.Resource, Namespaced: mapping.Scope.Name() == meta.RESTScopeNameNamespace}
}
