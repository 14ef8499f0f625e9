package agent

import (
	"context"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/kube"
)

// listPage is how many objects one look into the namespace asks for: far more than the agent has there.
const listPage = 500

// decideNamespace lets the agent's namespace go with owner if the manifest made it and nobody else has anything in it; otherwise it stays.
func (d *departure) decideNamespace(ctx context.Context, owner *metav1.OwnerReference) error {
	live, err := d.at(agentNamespace()).Get(ctx, kube.AgentNamespace, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("read namespace %s: %w", kube.AgentNamespace, err)
	}
	stranger := "it was not made by a registration"
	if live.Labels[agentLabel] == agentLabelValue {
		// What cannot be seen may be somebody's.
		if stranger, err = d.stranger(ctx); err != nil {
			stranger = err.Error()
		}
	}
	if stranger == "" {
		return d.setOwner(ctx, agentNamespace(), owner)
	}
	log.FromContext(ctx).Info("the namespace of the agent stays", "namespace", kube.AgentNamespace, "reason", stranger)
	return d.setOwner(ctx, agentNamespace(), nil)
}

// tenant is one object in the agent's namespace.
type tenant struct {
	resource schema.GroupResource
	metav1.ObjectMeta
}

// stranger names an object in the agent's namespace that is neither the agent's nor in every namespace; "" if there is none.
func (d *departure) stranger(ctx context.Context) (string, error) {
	lists, err := discovery.ServerPreferredNamespacedResources(d.member.Discovery())
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
			found, err := d.tenants(ctx, version.WithResource(resource.Name))
			if err != nil {
				return "", err
			}
			all = append(all, found...)
		}
	}
	if strange := strangers(all, d.secret); len(strange) > 0 {
		return "it holds " + strange[0].resource.String() + " " + strange[0].Name, nil
	}
	return "", nil
}

func (d *departure) tenants(ctx context.Context, resource schema.GroupVersionResource) ([]tenant, error) {
	list, err := d.objects.Resource(resource).Namespace(kube.AgentNamespace).List(ctx, metav1.ListOptions{Limit: listPage})
	if err != nil {
		return nil, fmt.Errorf("list %s in namespace %s: %w", resource.GroupResource(), kube.AgentNamespace, err)
	}
	if list.Continue != "" {
		return nil, fmt.Errorf("namespace %s holds more than %d %s", kube.AgentNamespace, listPage, resource.GroupResource())
	}
	all := make([]tenant, len(list.Items))
	for i := range list.Items {
		all[i] = tenant{resource.GroupResource(), list.Items[i].ObjectMeta}
	}
	return all, nil
}

// strangers returns those of all that are not the agent's, nor belong to what is, nor are put into every namespace, nor are going already.
func strangers(all []tenant, secret string) []tenant {
	expected := expectedTenants(secret)
	known := map[types.UID]bool{}
	strange := slices.DeleteFunc(slices.Clone(all), func(t tenant) bool {
		if expected[t.resource.String()+"/"+t.Name] {
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

// expectedTenants are the manifest's objects, and those that Kubernetes and OpenShift put into every namespace.
func expectedTenants(secret string) map[string]bool {
	expected := map[string]bool{
		"secrets/" + secret: true, "endpoints/" + agentService: true, "serviceaccounts/default": true, "configmaps/kube-root-ca.crt": true,
		"serviceaccounts/builder": true, "serviceaccounts/deployer": true, "configmaps/openshift-service-ca.crt": true,
	}
	for _, o := range dependents() {
		if o.namespace != "" {
			expected[o.resource.GroupResource().String()+"/"+o.name] = true
		}
	}
	return expected
}
