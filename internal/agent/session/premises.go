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

// listPage is how many objects one look into the namespace asks for: far more than the agent has there.
const listPage = 500

// Premises are the namespace that an agent lives in.
type Premises struct {
	Discovery discovery.DiscoveryInterface
	Objects   metadata.Interface
	Namespace string
	// Expected are the objects of the agent in it, as resource.group/name.
	Expected map[string]bool
}

// tenant is one object in the agent's namespace.
type tenant struct {
	resource schema.GroupResource
	metav1.ObjectMeta
}

// Stranger names an object in the namespace that is neither the agent's nor in every namespace; "" if there is none.
func (p Premises) Stranger(ctx context.Context) (string, error) {
	lists, err := discovery.ServerPreferredNamespacedResources(p.Discovery)
	if err != nil {
		return "", fmt.Errorf("list the kinds of the cluster: %w", err)
	}
	var all []tenant
	for _, list := range lists {
		version, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			return "", fmt.Errorf("list the kinds of the cluster: %w", err)
		}
		for _, resource := range list.APIResources {
			// What nobody can create, metrics for instance, is only a view of something else.
			if !slices.Contains(resource.Verbs, "list") || !slices.Contains(resource.Verbs, "create") || resource.Name == "events" {
				continue
			}
			found, err := p.tenants(ctx, version.WithResource(resource.Name))
			if err != nil {
				return "", err
			}
			all = append(all, found...)
		}
	}
	if strange := strangers(all, p.Expected); len(strange) > 0 {
		return "it holds " + strange[0].resource.String() + " " + strange[0].Name, nil
	}
	return "", nil
}

func (p Premises) tenants(ctx context.Context, resource schema.GroupVersionResource) ([]tenant, error) {
	list, err := p.Objects.Resource(resource).Namespace(p.Namespace).List(ctx, metav1.ListOptions{Limit: listPage})
	if err != nil {
		return nil, fmt.Errorf("list %s in namespace %s: %w", resource.GroupResource(), p.Namespace, err)
	}
	if list.Continue != "" {
		return nil, fmt.Errorf("namespace %s holds more than %d %s", p.Namespace, listPage, resource.GroupResource())
	}
	all := make([]tenant, len(list.Items))
	for i := range list.Items {
		all[i] = tenant{resource.GroupResource(), list.Items[i].ObjectMeta}
	}
	return all, nil
}

// strangers returns those of all that are not the agent's, nor belong to what is, nor are put into every namespace, nor are going already.
func strangers(all []tenant, expected map[string]bool) []tenant {
	known := map[types.UID]bool{}
	strange := slices.DeleteFunc(slices.Clone(all), func(t tenant) bool {
		if place := t.resource.String() + "/" + t.Name; expected[place] || everywhere(place) {
			known[t.UID] = true
		}
		return known[t.UID] || t.DeletionTimestamp != nil
	})
	for before := -1; before != len(strange); {
		before = len(strange)
		strange = slices.DeleteFunc(strange, func(t tenant) bool {
			owned := slices.ContainsFunc(t.OwnerReferences, func(r metav1.OwnerReference) bool { return known[r.UID] })
			// Before Kubernetes 1.24 each ServiceAccount got a Secret with a token.
			owned = owned || known[types.UID(t.Annotations["kubernetes.io/service-account.uid"])]
			if owned {
				known[t.UID] = true
			}
			return owned
		})
	}
	return strange
}

// everywhere says whether Kubernetes or OpenShift puts such an object into every namespace.
func everywhere(place string) bool {
	switch place {
	case "serviceaccounts/default", "configmaps/kube-root-ca.crt", "serviceaccounts/builder", "serviceaccounts/deployer", "configmaps/openshift-service-ca.crt":
		return true
	}
	return false
}
