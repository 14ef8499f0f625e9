package agents

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/agent/karmada"
	"github.com/towline/towline/internal/cli/command"
)

// NewKarmadaAgent returns the command that runs the agent of a Cluster. It has the flags of Karmada's agent, because
// users patch them in manifests.
func NewKarmadaAgent(streams command.Streams) *cobra.Command {
	options, logging := karmada.Options{}, command.LogFlags{}
	cmd := &cobra.Command{
		Use:   "karmada-agent --cluster-name=<name> --karmada-kubeconfig-secret=<namespace>/<name>",
		Short: "Run the agent of a Cluster in pull mode",
		Long: `Run the agent of a Cluster in pull mode. register <host:port> creates a Deployment with this
command. The agent can run anywhere with access to both sides: its cluster is the one of
--kubeconfig, else the one in which it runs as a pod.`,
		Example: `  # run the agent outside of its cluster
  karmada-agent --cluster-name=member3 --karmada-kubeconfig=agent.config --kubeconfig=member3.config`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if options.Cluster == "" {
				return errors.New("--cluster-name is required")
			}
			ctx, err := logging.WithLogger(cmd.Context(), streams.Err)
			if err != nil {
				return err
			}
			if options.MemberKubeconfig == "" {
				if options.Member, err = command.InClusterConfig(); err != nil {
					return fmt.Errorf("load the config of the agent's own cluster; pass --kubeconfig outside of a pod: %w", err)
				}
			}
			log.FromContext(ctx).Info("agent starts", "cluster", options.Cluster, "version", command.Version())
			go ReduceMemory(ctx)
			return karmada.Run(ctx, options)
		},
	}
	addKarmadaAgentFlags(cmd.Flags(), &options)
	command.AddSection(cmd.Flags(), command.SectionGlobal, logging.Add)
	return cmd
}

// addKarmadaAgentFlags adds the flags of options in sections. All other flags are in command.SectionOther.
func addKarmadaAgentFlags(flags *pflag.FlagSet, options *karmada.Options) {
	all := pflag.NewFlagSet("", pflag.ContinueOnError)
	options.AddFlags(all)
	for _, section := range []struct{ title, names string }{
		{command.SectionCluster, "cluster-name kubeconfig context cluster-namespace cluster-api-endpoint proxy-server-address cluster-provider " +
			"cluster-region cluster-zones cluster-api-qps cluster-api-burst"},
		{command.SectionControlPlane, "karmada-kubeconfig-secret karmada-kubeconfig karmada-context kube-api-qps kube-api-burst"},
		{"Status flags:", "cluster-status-update-frequency cluster-success-threshold cluster-failure-threshold cluster-lease-duration " +
			"cluster-lease-renew-interval-fraction enable-cluster-resource-modeling"},
		{"Work flags:", "concurrent-work-syncs resync-period rate-limiter-base-delay rate-limiter-max-delay rate-limiter-qps " +
			"rate-limiter-bucket-size"},
		{"Leader election flags:", "leader-elect leader-elect-resource-namespace leader-elect-lease-duration " +
			"leader-elect-renew-deadline leader-elect-retry-period"},
		{"Certificate flags:", "cert-rotation-checking-interval cert-rotation-remaining-time-threshold"},
		{command.SectionEndpoints, "metrics-bind-address health-probe-bind-address"},
	} {
		command.AddSection(flags, section.title, func(flags *pflag.FlagSet) {
			for _, name := range strings.Fields(section.names) {
				flags.AddFlag(all.Lookup(name))
			}
		})
	}
	flags.AddFlagSet(all) // only the flags that are not in flags
}
