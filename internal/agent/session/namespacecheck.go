package session

import (
	"context"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/metadata"
)

// maxPerKind limits the objects of one kind that are listed. The agent's namespace has far fewer.
const maxPerKind = 500

// NamespaceCheck looks for foreign objects in the namespace of an agent.
type NamespaceCheck struct {
	Discovery discovery.DiscoveryInterface
	Objects   metadata.Interface
	Namespace string
	// Expected contains the agent's own objects in the namespace, as resource.group/name.
	Expected map[string]bool
}

// namespacedObject is the metadata of an object in the agent's namespace.
type namespacedObject struct {
	resource schema.GroupResource
	metav1.ObjectMeta
}

// FindForeignObject describes an object in the namespace that does not belong to the agent and is not created in every
// namespace. It returns "" if there is none.
func (c NamespaceCheck) FindForeignObject(ctx context.Context) (string, error) {
	lists, err := discovery.ServerPreferredNamespacedResources(c.Discovery)
	if err != nil {
		return "", fmt.Errorf("list the kinds of the cluster: %w", err)
	}
	var all []namespacedObject
	for _, list := range lists {
		version, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			return "", fmt.Errorf("list the kinds of the cluster: %w", err)
		}
		for _, resource := range list.APIResources {
			// Kinds without create, for example metrics, are only views.
			if !slices.Contains(resource.Verbs, "list") || !slices.Contains(resource.Verbs, "create") || resource.Name == "events" {
				continue
			}
			found, err := c.listObjects(ctx, version.WithResource(resource.Name))
			if err != nil {
				return "", err
			}
			all = append(all, found...)
		}
	}
	if foreign := foreignObjects(all, c.Expected); len(foreign) > 0 {
		return "it holds " + foreign[0].resource.String() + " " + foreign[0].Name, nil
	}
	return "", nil
}

func (c NamespaceCheck) listObjects(ctx context.Context, resource schema.GroupVersionResource) ([]namespacedObject, error) {
	list, err := c.Objects.Resource(resource).Namespace(c.Namespace).List(ctx, metav1.ListOptions{Limit: maxPerKind})
	if err != nil {
		return nil, fmt.Errorf("list %s in namespace %s: %w", resource.GroupResource(), c.Namespace, err)
	}
	if list.Continue != "" {
		return nil, fmt.Errorf("namespace %s holds more than %d %s", c.Namespace, maxPerKind, resource.GroupResource())
	}
	all := make([]namespacedObject, len(list.Items))
	for i := range list.Items {
		all[i] = namespacedObject{resource.GroupResource(), list.Items[i].ObjectMeta}
	}
	return all, nil
}

// foreignObjects returns the objects that are not expected, not owned by an expected object, not created in every
// namespace and not being deleted.
func foreignObjects(all []namespacedObject, expected map[string]bool) []namespacedObject {
	known := map[types.UID]bool{}
	foreign := slices.DeleteFunc(slices.Clone(all), func(t namespacedObject) bool {
		if name := t.resource.String() + "/" + t.Name; expected[name] || isInEveryNamespace(name) {
			known[t.UID] = true
		}
		return known[t.UID] || t.DeletionTimestamp != nil
	})
	for before := -1; before != len(foreign); {
		before = len(foreign)
		foreign = slices.DeleteFunc(foreign, func(t namespacedObject) bool {
			isOwned := slices.ContainsFunc(t.OwnerReferences, func(r metav1.OwnerReference) bool { return known[r.UID] })
			// Before Kubernetes 1.24 each ServiceAccount got a Secret with a token.
			isOwned = isOwned || known[types.UID(t.Annotations["kubernetes.io/service-account.uid"])]
			if isOwned {
				known[t.UID] = true
			}
			return isOwned
		})
	}
	return foreign
}

// isInEveryNamespace returns true for objects that Kubernetes or OpenShift creates in every namespace.
func isInEveryNamespace(name string) bool {
	switch name {
	case "serviceaccounts/default", "configmaps/kube-root-ca.crt", "serviceaccounts/builder", "serviceaccounts/deployer", "configmaps/openshift-service-ca.crt":
		return true
	}
	return false
}
