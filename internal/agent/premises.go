package agent

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/kube"
)

// decideNamespace lets the agent's namespace go with owner if the manifest made it and nobody else has anything in it;
// otherwise it stays.
func (d *departure) decideNamespace(ctx context.Context, owner *metav1.OwnerReference) error {
	live, err := d.member.CoreV1().Namespaces().Get(ctx, kube.AgentNamespace, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("read namespace %s: %w", kube.AgentNamespace, err)
	}
	stranger := "it was not made by a registration"
	if live.Labels[agentLabel] == agentLabelValue {
		premises := session.NamespaceCheck{
			Discovery: d.member.Discovery(), Objects: d.Metadata, Namespace: kube.AgentNamespace, Expected: expectedTenants(d.secret),
		}
		// What cannot be seen may be somebody's.
		if stranger, err = premises.FindForeignObject(ctx); err != nil {
			stranger = err.Error()
		}
	}
	if stranger == "" {
		return d.SetOwner(ctx, agentNamespace(), owner)
	}
	log.FromContext(ctx).Info("the namespace of the agent stays", "namespace", kube.AgentNamespace, "reason", stranger)
	return d.SetOwner(ctx, agentNamespace(), nil)
}

// expectedTenants are the manifest's objects in the namespace, and what is made of them there.
func expectedTenants(secret string) map[string]bool {
	expected := map[string]bool{"secrets/" + secret: true, "endpoints/" + agentService: true}
	for _, o := range dependents() {
		if o.Namespace != "" {
			expected[o.Resource.GroupResource().String()+"/"+o.Name] = true
		}
	}
	return expected
}
