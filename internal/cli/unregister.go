package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/towline/towline/internal/cli/command"
	"github.com/towline/towline/internal/join/register"
)

// unregisterFlags are the flags of `unregister`.
type unregisterFlags struct {
	hub     controlPlaneFlags
	member  memberFlags
	request register.UnregisterRequest
}

func newUnregister(streams command.Streams) *cobra.Command {
	f := &unregisterFlags{}
	cmd := &cobra.Command{
		Use:   "unregister CLUSTER_NAME --cluster-kubeconfig=<file>",
		Short: "Remove a cluster in pull mode from the control plane",
		Long: `Remove a cluster in pull mode from the control plane. The agent deletes the propagated objects from
the cluster, then the command deletes the Cluster, its identity and its credentials on the control
plane, and the agent on the cluster. If the agent does not run, the propagated objects stay.
Without --karmada-config and --karmada-context the command uses the agent's credentials for the
control plane.`,
		Example: `  karmadactl unregister member3 --cluster-kubeconfig=member3.config

  # use a kubeconfig of the control plane if the credentials of the agent have expired
  karmadactl unregister member3 --cluster-kubeconfig=member3.config --cluster-context=member3 \
      --karmada-config=karmada.config --karmada-context=karmada

  # keep the propagated objects on the cluster
  karmadactl unregister member3 --cluster-kubeconfig=member3.config \
      --karmada-config=karmada.config --orphan`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.complete(args); err != nil {
				return err
			}
			return f.run(withVerbosity(cmd.Context(), f.hub.verbosity, streams), streams)
		},
	}
	command.AddSection(cmd.Flags(), command.SectionCluster, f.addCluster)
	command.AddSection(cmd.Flags(), command.SectionControlPlane, func(flags *pflag.FlagSet) {
		f.hub.add(flags, "karmada-config", "`file` with the kubeconfig of the control plane "+
			"(default the credentials of the agent; if --karmada-context is set, KUBECONFIG, then ~/.kube/config)")
	})
	command.AddSection(cmd.Flags(), command.SectionOther, f.addRemoval)
	command.AddSection(cmd.Flags(), command.SectionGlobal, f.hub.addVerbosity)
	return cmd
}

// addCluster adds the flags for the cluster and the agent on it.
func (f *unregisterFlags) addCluster(flags *pflag.FlagSet) {
	f.member.add(flags, "`file` with the kubeconfig of the cluster (required)")
	flags.StringVarP(&f.request.Namespace, "namespace", "n", register.DefaultNamespace,
		"`namespace` of the agent on the cluster")
	flags.StringVar(&f.request.AgentDeployment, "agent-name", register.DefaultAgentDeployment,
		"`name` of the agent's Deployment on the cluster")
}

func (f *unregisterFlags) addRemoval(flags *pflag.FlagSet) {
	flags.BoolVar(&f.request.Orphan, "orphan", false,
		"keep the propagated objects on the cluster; needs --karmada-config or --karmada-context")
	addWait(flags, &f.request.Timeout)
	addDryRun(flags, &f.request.DryRun)
}

// complete completes the request from the arguments, and validates it.
func (f *unregisterFlags) complete(args []string) (err error) {
	if f.request.ClusterName, err = clusterName(args); err != nil {
		return err
	}
	if f.member.file == "" {
		return errors.New("--cluster-kubeconfig is required to specify KUBECONFIG file path to access unregistering member cluster")
	}
	return validateWait(f.request.Timeout)
}

func (f *unregisterFlags) run(ctx context.Context, streams command.Streams) error {
	r := f.request
	var err error
	if r.Member, err = f.member.restConfig(ctx, r.ClusterName); err != nil {
		return fmt.Errorf("failed to get unregistering cluster config. error: %w", err)
	}
	if f.hub.file != "" || f.hub.context != "" {
		if r.Hub, err = f.hub.restConfig(ctx); err != nil {
			return err
		}
	}
	r.ClusterNamespace = f.member.clusterNamespace
	progress := startProgress(streams, "waiting for the control plane to finish removing cluster "+r.ClusterName)
	r.Progress = progress.printLine
	err = register.Unregister(ctx, r)
	progress.stop()
	return err
}
