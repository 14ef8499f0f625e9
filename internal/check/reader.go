package check

import (
	"fmt"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

// discoveryTimeout limits each request of the discovery client, because its methods have no context.
const discoveryTimeout = 10 * time.Second

// NewReader returns the client with which a Checker reads a cluster, which may be hostile. It keeps the API resource of
// each kind that it has discovered, so each run of checks must have its own client. It does not cache objects.
func NewReader(config *rest.Config) (client.Reader, error) {
	httpClient, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("make a client of the cluster: %w", err)
	}
	discoveryHTTPClient := *httpClient
	discoveryHTTPClient.Timeout = discoveryTimeout
	discovery, err := kube.NewDiscovery(config, &discoveryHTTPClient)
	if err != nil {
		return nil, fmt.Errorf("make a discovery client of the cluster: %w", err)
	}
	return client.New(config, client.Options{HTTPClient: httpClient, Mapper: restMapper{meta.NewDefaultRESTMapper(nil), discovery}})
}

// restMapper implements RESTMapping, the only method of a RESTMapper that lists of unstructured objects need. The
// embedded RESTMapper has no mappings. Unlike the RESTMapper of package apiutil, restMapper reads only the API version
// of the kind, so other API versions can neither fill the memory nor cause errors.
type restMapper struct {
	*meta.DefaultRESTMapper

	discovery *kube.Discovery
}

// RESTMapping implements meta.RESTMapper. It ignores upper and lower case in the kind.
func (m restMapper) RESTMapping(kind schema.GroupKind, versions ...string) (*meta.RESTMapping, error) {
	noMatch := &meta.NoKindMatchError{GroupKind: kind, SearchedVersions: versions}
	gv := schema.GroupVersion{Group: kind.Group, Version: strings.Join(versions, "")} // an unstructured list has one version
	list, err := m.discovery.ServerResourcesForGroupVersion(gv.String())
	if apierrors.IsNotFound(err) {
		return nil, noMatch
	}
	if err != nil {
		return nil, err
	}
	for _, resource := range list.APIResources {
		if !strings.EqualFold(resource.Kind, kind.Kind) || strings.Contains(resource.Name, "/") {
			continue
		}
		var scope meta.RESTScope = meta.RESTScopeRoot
		if resource.Namespaced {
			scope = meta.RESTScopeNamespace
		}
		return &meta.RESTMapping{Resource: gv.WithResource(resource.Name), GroupVersionKind: gv.WithKind(resource.Kind), Scope: scope}, nil
	}
	return nil, noMatch
}
