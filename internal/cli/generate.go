package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/join"
)

func newGenerate(streams Streams) *cobra.Command {
	return parent("generate", "Generate what other programs need", newGenerateKubeconfig(streams))
}

func newGenerateKubeconfig(streams Streams) *cobra.Command {
	r, member, verbose := join.GenerateRequest{}, "", false
	cmd := &cobra.Command{
		Use:   "kubeconfig",
		Short: "Print a kubeconfig of a ServiceAccount, with a token",
		Long: `Print a kubeconfig with a token of a ServiceAccount in the cluster that KUBECONFIG points at, or in that of --context. The kubeconfig holds
everything it needs, so that a cluster can be registered with it in push mode.

With --create, the namespace, the ServiceAccount and its right to do everything are made as far as they are missing. What is made stays; a
command that fails takes it back.`,
		Example: `  # on a cluster to be registered by somebody else
  sveltosctl generate kubeconfig --context=aks-admin --create --expirationSeconds=86400 > aks.yaml`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := errors.Join(r.Validate(), streams.open()); err != nil {
				return err
			}
			config, err := generateConfig(member)
			if err != nil {
				return err
			}
			if verbose {
				streams.say("generating a kubeconfig for %s", config.Host)
			}
			return runGenerate(cmd.Context(), streams, config, r)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&r.Namespace, "namespace", "", "`namespace` of the ServiceAccount (default: projectsveltos)")
	flags.StringVar(&r.ServiceAccount, "serviceaccount", "", "`name` of the ServiceAccount (default: projectsveltos)")
	flags.BoolVar(&r.Create, "create", false, "make the ServiceAccount, and its right to do everything, if they are missing")
	flags.Int64Var(&r.ExpirationSeconds, "expirationSeconds", 0, "life of the token in `seconds`, at least 600 (default: what the cluster gives)")
	flags.BoolVar(&r.ServiceAccountToken, "service-account-token", false, "take a token that does not expire, from a Secret")
	flags.StringVar(&member, "context", "", "`context` of the cluster in KUBECONFIG (default: the current one)")
	flags.BoolVar(&verbose, "verbose", false, "say what is being done")
	return cmd
}

// generateConfig finds the way to the cluster of a context, or of the current one.
func generateConfig(context string) (*rest.Config, error) {
	if context == "" {
		return currentConfig("cluster", "")
	}
	config, err := contextConfig(context)
	if err != nil {
		return nil, fmt.Errorf("--context: %w", err)
	}
	return config, nil
}

func runGenerate(ctx context.Context, streams Streams, config *rest.Config, r join.GenerateRequest) error {
	defer progress(streams, "generating a kubeconfig for "+config.Host)()
	kubeconfig, err := join.GenerateKubeconfig(ctx, config, r)
	if err != nil {
		return err
	}
	if _, err := streams.Out.Write(kubeconfig); err != nil {
		return fmt.Errorf("print the kubeconfig: %w", err)
	}
	return nil
}
