package kube

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"unique"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
)

// Resource is the API resource of a kind. The zero Resource stands for no kind.
type Resource struct {
	GVR        schema.GroupVersionResource
	Namespaced bool
}

// Mapper finds the resources of kinds. It caches discovery until Reset. It is safe for concurrent use.
//
// There is a Mapper for each cluster, so it keeps no more than it needs. Kinds are interned (package unique), so that
// Mappers of similar clusters share them. Unlike the RESTMapper of client-go, it does not map "PodList" and "pod" to
// resources, which no API server serves.
type Mapper struct {
	client discovery.ServerResourcesInterface
	// loaded is nil before the first load and after Reset.
	loaded atomic.Pointer[servedKinds]
	// loading admits one load at a time, and no Reset meanwhile.
	loading sync.Mutex
}

// servedKind is a kind in one version, and its resource.
type servedKind struct {
	schema.GroupVersionKind

	resource   string
	namespaced bool
}

// servedKinds are the kinds that a cluster serves, sorted by group and kind. The versions of a kind are in the order in
// which the cluster prefers them.
type servedKinds []unique.Handle[servedKind]

// NewMapper returns a Mapper over client, which must limit the APIs of a cluster that may be hostile, see Discovery. It
// connects on first use.
func NewMapper(client discovery.ServerResourcesInterface) *Mapper { return &Mapper{client: client} }

// Reset clears the cache, so that new kinds are found and deleted ones are not.
func (m *Mapper) Reset() {
	m.loading.Lock()
	defer m.loading.Unlock()
	m.loaded.Store(nil)
}

// Resource returns the resource of gvk in exactly its version; an empty version is the preferred one. The error
// satisfies meta.IsNoMatchError if the server does not serve the kind.
func (m *Mapper) Resource(gvk schema.GroupVersionKind) (Resource, error) {
	found, err := m.find(gvk.GroupKind(), gvk.Version)
	if err != nil {
		return Resource{}, fmt.Errorf("find resource of %s: %w", gvk, err)
	}
	return found, nil
}

// ResourceInAnyVersion returns the resource of gvk in its version or, if that is not served, in the preferred version
// of the server. This is sufficient for metadata, which is the same in all versions. The error satisfies
// meta.IsNoMatchError if the server does not serve the kind.
func (m *Mapper) ResourceInAnyVersion(gvk schema.GroupVersionKind) (Resource, error) {
	found, err := m.Resource(gvk)
	if !meta.IsNoMatchError(err) {
		return found, err
	}
	if found, err = m.find(gvk.GroupKind(), ""); err != nil {
		return Resource{}, fmt.Errorf("find resource of %s: %w", gvk.GroupKind(), err)
	}
	return found, nil
}

// find returns the resource of a kind in a version, or in the preferred version if version is empty.
func (m *Mapper) find(kind schema.GroupKind, version string) (Resource, error) {
	kinds, err := m.load()
	if err != nil {
		return Resource{}, err
	}
	start, _ := slices.BinarySearchFunc(kinds, kind, func(served unique.Handle[servedKind], kind schema.GroupKind) int {
		return compareKinds(served.Value().GroupKind(), kind)
	})
	for _, handle := range kinds[start:] {
		served := handle.Value()
		if served.GroupKind() != kind {
			break
		}
		if served.Version == version || version == "" {
			return Resource{GVR: served.GroupVersion().WithResource(served.resource), Namespaced: served.namespaced}, nil
		}
	}
	noMatch := &meta.NoKindMatchError{GroupKind: kind}
	if version != "" {
		noMatch.SearchedVersions = []string{version}
	}
	return Resource{}, noMatch
}

// IsNoLongerServed asks the server, not the cache, whether it no longer serves gvk. A missing mapping is no proof: an
// aggregated API server may be unavailable.
func (m *Mapper) IsNoLongerServed(gvk schema.GroupVersionKind) (bool, error) {
	list, err := m.client.ServerResourcesForGroupVersion(gvk.GroupVersion().String())
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

// load returns the kinds that the cluster serves. It omits API versions whose discovery fails.
func (m *Mapper) load() (servedKinds, error) {
	if loaded := m.loaded.Load(); loaded != nil {
		return *loaded, nil
	}
	m.loading.Lock()
	defer m.loading.Unlock()
	if loaded := m.loaded.Load(); loaded != nil {
		return *loaded, nil
	}
	groups, lists, err := m.client.ServerGroupsAndResources()
	if len(lists) == 0 {
		return nil, fmt.Errorf("read the APIs: %w", cmp.Or(err, errNoAPI))
	}
	kinds := newServedKinds(groups, lists)
	m.loaded.Store(&kinds)
	return kinds, nil
}

var errNoAPI = errors.New("the cluster lists no API")

// newServedKinds returns the kinds in the result of a discovery.
func newServedKinds(groups []*metav1.APIGroup, lists []*metav1.APIResourceList) servedKinds {
	resources := map[string][]metav1.APIResource{}
	for _, list := range lists {
		resources[list.GroupVersion] = list.APIResources
	}
	var all []servedKind
	for _, group := range groups {
		for _, version := range slices.Concat([]metav1.GroupVersionForDiscovery{group.PreferredVersion}, group.Versions) {
			gv, err := schema.ParseGroupVersion(version.GroupVersion)
			if err != nil {
				continue // no object can have it
			}
			for _, resource := range resources[version.GroupVersion] {
				if !strings.Contains(resource.Name, "/") {
					all = append(all, servedKind{gv.WithKind(resource.Kind), resource.Name, resource.Namespaced})
				}
			}
			// Each version once: the preferred one is also in group.Versions, and a hostile cluster can repeat versions.
			delete(resources, version.GroupVersion)
		}
	}
	slices.SortStableFunc(all, func(a, b servedKind) int { return compareKinds(a.GroupKind(), b.GroupKind()) })
	kinds := make(servedKinds, 0, len(all))
	for i, kind := range all {
		// Of several resources of one kind, the last one counts.
		if i+1 == len(all) || all[i+1].GroupVersionKind != kind.GroupVersionKind {
			kinds = append(kinds, unique.Make(kind))
		}
	}
	return kinds
}

func compareKinds(a, b schema.GroupKind) int {
	return cmp.Or(cmp.Compare(a.Group, b.Group), cmp.Compare(a.Kind, b.Kind))
}
