package agent

import (
	"context"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// lookForOthers tells people of manifests of other registrations that were applied to this cluster. Such a manifest
// replaces the agent's Deployment: one agent runs at a time, that of the manifest which was applied last, and the hub
// waits for the others. The agent that runs goes on. People are told once per set of others.
func (a *agent) lookForOthers(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	secrets, err := a.secrets.List(ctx, metav1.ListOptions{LabelSelector: agentLabel + "=" + agentLabelValue})
	if err != nil {
		return fmt.Errorf("list Secrets in namespace %s: %w", kube.AgentNamespace, err)
	}
	var others []string
	for i := range secrets.Items {
		name := secrets.Items[i].Name
		if name != a.opts.KubeconfigSecret && strings.HasSuffix(name, join.KubeconfigSecret("")) {
			others = append(others, name)
		}
	}
	slices.Sort(others)
	if slices.Equal(others, a.others) {
		return nil
	}
	a.others = others
	if len(others) > 0 {
		log.FromContext(ctx).Error(nil, "manifests of other registrations were applied to this cluster, too: only the agent of the one that was applied last runs, and it goes on",
			"registration", a.cluster().String(), "others", others,
			"repair", "deregister the clusters that this one is not with: sveltosctl deregister cluster --namespace=NAMESPACE --cluster=NAME --force; "+
				"then with this cluster's kubeconfig run: kubectl delete secret --namespace="+kube.AgentNamespace+" "+strings.Join(others, " "))
	}
	return nil
}
