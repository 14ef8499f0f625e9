package join

import (
	"context"
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// tenantsPage is how many objects of one kind one look into a namespace asks for.
const tenantsPage = 100

// Kinds lists the namespaced kinds that the hub serves; a discovery client does.
type Kinds interface {
	ServerPreferredNamespacedResources() ([]*metav1.APIResourceList, error)
}

// tenants looks who else is in a namespace that was made for the deliveries of a cluster.
type tenants struct {
	hub     client.Client
	kinds   Kinds
	request Request
}

// stranger names something in namespace that neither a registration of the cluster nor Kubernetes put there, or says
// why that is not known; "" if there is nothing.
func (t tenants) stranger(ctx context.Context, namespace string) (string, error) {
	if t.kinds == nil {
		return "what else is in it is not known", nil
	}
	lists, err := t.kinds.ServerPreferredNamespacedResources()
	if discovery.IsGroupDiscoveryFailedError(err) {
		return "what else is in it is not known: " + err.Error(), nil
	}
	if err != nil {
		return "", fmt.Errorf("list the kinds of the hub: %w", err)
	}
	for _, list := range lists {
		version, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			return "", fmt.Errorf("list the kinds of the hub: %w", err)
		}
		for _, resource := range list.APIResources {
			if passing(resource) {
				continue
			}
			strange, err := t.among(ctx, namespace, version.WithKind(resource.Kind))
			if strange != "" || err != nil {
				return strange, err
			}
		}
	}
	return "", nil
}

// passing says whether objects of a kind are nobody's: what nobody can create is only a view of something else, and
// every Endpoints object has an EndpointSlice.
func passing(resource metav1.APIResource) bool {
	return !slices.Contains(resource.Verbs, "list") || !slices.Contains(resource.Verbs, "create") ||
		resource.Name == "events" || resource.Name == "endpoints"
}

// among is stranger for the objects of one kind.
func (t tenants) among(ctx context.Context, namespace string, kind schema.GroupVersionKind) (string, error) {
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
	err := t.hub.List(ctx, list, client.InNamespace(namespace), client.Limit(tenantsPage))
	switch {
	case apierrors.IsForbidden(err):
		return "whether it holds a " + kind.Kind + " is not known: " + err.Error(), nil
	case apierrors.IsNotFound(err), apierrors.IsMethodNotSupported(err):
		return "", nil // the kind has just gone
	case err != nil:
		return "", fmt.Errorf("list %s objects in namespace %s: %w", kind.Kind, namespace, err)
	case list.Continue != "":
		return "it holds many " + kind.Kind + " objects", nil
	}
	known := map[types.UID]bool{}
	for i := range list.Items {
		if t.expected(kind.Kind, &list.Items[i]) {
			known[list.Items[i].UID] = true
		}
	}
	for i := range list.Items {
		if item := &list.Items[i]; !known[item.UID] && item.DeletionTimestamp == nil {
			return "it holds " + kind.Kind + " " + item.Name, nil
		}
	}
	return "", nil
}

// expected says whether a registration of the cluster made obj, or Kubernetes or OpenShift, which put some into every
// namespace.
func (t tenants) expected(kind string, obj *metav1.PartialObjectMetadata) bool {
	switch kind + "/" + obj.Name {
	case "ServiceAccount/default", "ConfigMap/kube-root-ca.crt", "ServiceAccount/builder", "ServiceAccount/deployer", "ConfigMap/openshift-service-ca.crt":
		return true
	}
	// OpenShift's let the ServiceAccounts of a namespace use its images.
	image := kind == "RoleBinding" && strings.HasPrefix(obj.Name, "system:")
	return image || obj.Labels[registrationLabel] == t.request.Name
}
