package register

import (
	"context"
	"fmt"
	"strings"

	"k8s.io/client-go/tools/clientcmd"
)

// PreflightError says what on the cluster is in the way of a registration.
type PreflightError struct {
	// Problems are one line each.
	Problems []string
	// Cluster is the Cluster that the agent is of which is there already, "" if that is not known.
	Cluster string
}

// Error lists the problems, and says what helps.
func (e *PreflightError) Error() string {
	var text strings.Builder
	text.WriteString("error execution phase preflight: [preflight] Some fatal errors occurred:\n")
	for _, problem := range e.Problems {
		text.WriteString("\t[ERROR]: " + problem + "\n")
	}
	if e.Cluster == "" {
		text.WriteString("[preflight] Remove these from the cluster, or choose another --namespace")
	} else {
		fmt.Fprintf(&text, "[preflight] The cluster runs the agent of Cluster %s already: remove that with `karmadactl unregister %s`, or choose another --namespace",
			e.Cluster, e.Cluster)
	}
	return text.String()
}

// preflight looks at the cluster and returns what it may write over.
func (g *registration) preflight(ctx context.Context) (replaces, error) {
	r := g.request
	if err := g.member.awaitGone(ctx, r.Namespace, r.DiscoveryTimeout, r.Progress); err != nil {
		return nothing, fmt.Errorf("check the cluster: %w", err)
	}
	there, err := g.member.resident(ctx, r.Namespace, DefaultAgentName)
	if err != nil {
		return nothing, fmt.Errorf("check the cluster: %w", err)
	}
	g.there = there
	switch {
	case r.Renew && there.deployment == nil:
		return nothing, fmt.Errorf("there is no agent in namespace %s of the cluster whose certificate could be renewed: register without --renew", r.Namespace)
	case r.Renew && there.cluster() != r.ClusterName:
		return nothing, fmt.Errorf("the agent in namespace %s of the cluster is that of Cluster %q, and not of %s", r.Namespace, there.cluster(), r.ClusterName)
	case r.Renew:
		return agent, nil
	case there.unfinished() && there.cluster() == r.ClusterName:
		return remains, r.checkHub(there)
	}
	if problems := there.problems(); len(problems) > 0 {
		return nothing, &PreflightError{Problems: problems, Cluster: there.cluster()}
	}
	return nothing, nil
}

// checkHub refuses to write over a registration with another control plane, which would go on counting on an agent.
func (r Request) checkHub(there resident) error {
	config, err := clientcmd.RESTConfigFromKubeConfig(there.secret.Data[KubeconfigKey])
	if err != nil || config.Host == "https://"+r.Endpoint {
		return nil //nolint:nilerr // what cannot be used leads nowhere
	}
	return fmt.Errorf("the cluster has an unfinished registration as %s with another control plane, %s, and not with https://%s: remove that with `karmadactl unregister %s`, or choose another --namespace",
		r.ClusterName, config.Host, r.Endpoint, r.ClusterName)
}

// problems names what is in the way of another agent.
func (r resident) problems() []string {
	var problems []string
	exists := func(name, kind string) {
		problems = append(problems, fmt.Sprintf("%s/%s %s already exists", r.namespace, name, kind))
	}
	if r.secret != nil {
		exists(r.secret.Name, "Secret")
	}
	if r.account != nil {
		exists(r.account.Name, "ServiceAccount")
	}
	if r.deployment != nil {
		exists(r.deployment.Name, "Deployment")
	}
	return problems
}
