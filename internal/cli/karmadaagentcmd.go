package cli

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/agent/karmada"
)

// newKarmadaAgent is the agent of a Cluster. Its flags are those of Karmada's agent, which people patch.
func newKarmadaAgent(streams Streams) *cobra.Command {
	options, logging := karmada.Options{}, logFlags{}
	cmd := &cobra.Command{
		Use:   "karmada-agent --cluster-name=<name> --karmada-kubeconfig-secret=<namespace>/<name>",
		Short: "Run the agent of a Cluster in pull mode; the Deployment that register makes does this",
		Long: `Run the agent of a Cluster in pull mode. The Deployment that register makes does this.

It can run anywhere that reaches both sides: with --kubeconfig it works for that cluster, else for the one that it runs in as a pod.`,
		Example: `  # outside of the cluster
  karmada-agent --cluster-name=member3 --karmada-kubeconfig=agent.config --kubeconfig=member3.config`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if options.Cluster == "" {
				return errors.New("--cluster-name is required")
			}
			ctx, err := logging.start(cmd.Context(), streams.Err)
			if err != nil {
				return err
			}
			if options.MemberKubeconfig == "" {
				if options.Member, err = inCluster(); err != nil {
					return fmt.Errorf("find the cluster that the agent runs in; name another one with --kubeconfig: %w", err)
				}
			}
			log.FromContext(ctx).Info("agent starts", "cluster", options.Cluster, "version", Version())
			return karmada.Run(ctx, options)
		},
	}
	options.AddFlags(cmd.Flags())
	logging.add(cmd.Flags())
	return cmd
}
