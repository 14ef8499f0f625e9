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

// logOtherRegistrations logs the Secrets of other registrations whose manifests were applied to this cluster. Each
// manifest replaces the agent's Deployment, so that only the agent of the last manifest runs, and the hub reports
// the other registrations as Down. The same Secrets are logged only once.
func (a *agent) logOtherRegistrations(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
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
	if slices.Equal(others, a.otherRegistrations) {
		return nil
	}
	a.otherRegistrations = others
	if len(others) > 0 {
		log.FromContext(ctx).Error(nil, "manifests of other registrations were applied to this cluster; only the agent of the last manifest runs, and it continues",
			"registration", a.clusterKey().String(), "others", others,
			"repair", "deregister the clusters that this cluster does not belong to: sveltosctl deregister cluster --namespace=NAMESPACE --cluster=NAME --force; "+
				"then with this cluster's kubeconfig run: kubectl delete secret --namespace="+kube.AgentNamespace+" "+strings.Join(others, " "))
	}
	return nil
}
