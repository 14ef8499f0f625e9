package check

import (
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

// NewReader returns a client for Checker of the cluster of config, which may be hostile. It discovers the kinds of the
// cluster once, before its first list, and has no cache: each run of checks must have its own.
func NewReader(config *rest.Config) (client.Reader, error) {
	httpClient, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("make a client of the cluster: %w", err)
	}
	discovery, err := kube.NewDiscovery(config, httpClient)
	if err != nil {
		return nil, fmt.Errorf("make a discovery client of the cluster: %w", err)
	}
	mapper := restMapper{meta.NewDefaultRESTMapper(nil), kube.NewMapper(discovery)}
	return client.New(config, client.Options{HTTPClient: httpClient, Mapper: mapper})
}

// restMapper is the part of a RESTMapper that lists of unstructured objects use. The mapper of package apiutil has no
// limit for all responses of a discovery together.
type restMapper struct {
	*meta.DefaultRESTMapper

	mapper *kube.Mapper
}

// RESTMapping implements meta.RESTMapper.
func (m restMapper) RESTMapping(kind schema.GroupKind, versions ...string) (*meta.RESTMapping, error) {
	gvk := kind.WithVersion(append(versions, "")[0])
	found, err := m.mapper.Resource(gvk)
	if err != nil {
		return nil, err
	}
	var scope meta.RESTScope = meta.RESTScopeRoot
	if found.Namespaced {
		scope = meta.RESTScopeNamespace
	}
	return &meta.RESTMapping{Resource: found.GVR, GroupVersionKind: found.GVR.GroupVersion().WithKind(kind.Kind), Scope: scope}, nil
}
