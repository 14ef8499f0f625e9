package cli

import (
	"errors"
	"fmt"

	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/towline/towline/internal/join/karmada"
)

// memberContext returns the context of a kubeconfig for a cluster: explicit if it is not empty, else the context with
// the name of the cluster, else the current-context. It returns an error if that context does not exist, and "" if the
// kubeconfig has no contexts and explicit is empty.
func memberContext(cfg *clientcmdapi.Config, explicit, cluster string) (string, error) {
	if explicit != "" {
		if cfg.Contexts[explicit] == nil {
			return "", fmt.Errorf("the kubeconfig of the cluster has no context %q", explicit)
		}
		return explicit, nil
	}
	if cluster != "" && cfg.Contexts[cluster] != nil {
		return cluster, nil
	}
	if len(cfg.Contexts) == 0 {
		return "", nil
	}
	if cfg.CurrentContext == "" {
		return "", fmt.Errorf("the kubeconfig of the cluster has neither a context %q nor a current-context: pass --cluster-context", cluster)
	}
	if cfg.Contexts[cfg.CurrentContext] == nil {
		return "", fmt.Errorf("the current-context %q of the cluster's kubeconfig is not among its contexts", cfg.CurrentContext)
	}
	return cfg.CurrentContext, nil
}

// defaultClusterName returns the default name of a Cluster: the name of the cluster entry of the current-context. It
// returns an error if there is no current-context, or if the name is not valid for a Cluster.
func defaultClusterName(cfg *clientcmdapi.Config) (string, error) {
	if cfg.CurrentContext == "" {
		return "", errors.New("the kubeconfig has no current-context, whose cluster would be the default name: pass --cluster-name")
	}
	current := cfg.Contexts[cfg.CurrentContext]
	if current == nil {
		return "", fmt.Errorf("the kubeconfig's current-context %q is not among its contexts: pass --cluster-name", cfg.CurrentContext)
	}
	if err := karmada.ValidateName(current.Cluster); err != nil {
		return "", fmt.Errorf("the cluster entry of the current-context %q is not a valid name for a Cluster: %w; pass another name with --cluster-name",
			cfg.CurrentContext, err)
	}
	return current.Cluster, nil
}
