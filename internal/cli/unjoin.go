package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/towline/towline/internal/cli/command"
	"github.com/towline/towline/internal/join/karmada"
)

// addWait adds the flag for the maximum time to wait for the removal of a cluster, for unjoin and unregister.
func addWait(flags *pflag.FlagSet, wait *time.Duration) {
	flags.DurationVar(wait, "wait", karmada.DefaultDeleteTimeout, "maximum time to wait for the removal of the cluster")
}

func validateWait(wait time.Duration) error {
	if wait <= 0 {
		// This is Karmada's message, with its spaces.
		return fmt.Errorf(" --wait %v  must be a positive duration, e.g. 1m0s ", wait)
	}
	return nil
}

// unjoinFlags are the flags of `unjoin`.
type unjoinFlags struct {
	hub     controlPlaneFlags
	member  memberFlags
	request karmada.UnjoinRequest
}

func newUnjoin(streams command.Streams) *cobra.Command {
	f := &unjoinFlags{}
	cmd := &cobra.Command{
		Use:   "unjoin CLUSTER_NAME [--cluster-kubeconfig=<file>]",
		Short: "Remove a cluster in push mode from the control plane",
		Long: `Remove a cluster in push mode from the control plane. The control plane first deletes the
propagated objects on the cluster and the objects that join created there, then the Cluster and its
credentials. If the cluster does not answer for about 20 s, the objects on the cluster stay. If
--wait expires, the command fails and the control plane continues. --cluster-kubeconfig is needed
only if the control plane can no longer access the cluster.`,
		Example: `  karmadactl unjoin member1 --kubeconfig=karmada.config --cluster-kubeconfig=member1.config

  # keep the propagated objects on the cluster
  karmadactl unjoin member1 --kubeconfig=karmada.config --orphan

  # remove a cluster that no longer exists
  karmadactl unjoin member1 --kubeconfig=karmada.config --wait=10s --force`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if f.request.Name, err = clusterName(args); err != nil {
				return err
			}
			if err := validateWait(f.request.Timeout); err != nil {
				return err
			}
			return f.run(withVerbosity(cmd.Context(), f.hub.verbosity, streams), streams)
		},
	}
	command.AddSection(cmd.Flags(), command.SectionCluster, func(flags *pflag.FlagSet) {
		f.member.add(flags,
			"`file` with the kubeconfig of the cluster, to delete the objects of join there (default none)")
	})
	command.AddSection(cmd.Flags(), command.SectionControlPlane, func(flags *pflag.FlagSet) {
		f.hub.add(flags,
			"kubeconfig", controlPlaneUsage)
	})
	command.AddSection(cmd.Flags(), command.SectionOther, f.addRemoval)
	command.AddSection(cmd.Flags(), command.SectionGlobal, f.hub.addVerbosity)
	return cmd
}

func (f *unjoinFlags) addRemoval(flags *pflag.FlagSet) {
	flags.BoolVar(&f.request.Orphan, "orphan", false, "keep the propagated objects on the cluster")
	flags.BoolVar(&f.request.Force, "force", false,
		"finish the removal when --wait expires, and keep the remaining objects on the cluster")
	addWait(flags, &f.request.Timeout)
	addDryRun(flags, &f.request.DryRun)
}

func (f *unjoinFlags) run(ctx context.Context, streams command.Streams) error {
	var err error
	if f.request.Hub, err = f.hub.restConfig(ctx); err != nil {
		return err
	}
	if f.member.file != "" || f.member.context != "" {
		if f.request.Member, err = f.member.restConfig(ctx, f.request.Name); err != nil {
			return fmt.Errorf("failed to get unjoining cluster config. error: %w", err)
		}
	}
	f.request.ClusterNamespace = f.member.clusterNamespace
	progress := startProgress(streams, "waiting for the control plane to finish removing cluster "+f.request.Name)
	f.request.Progress = progress.printLine
	err = karmada.Unjoin(ctx, f.request)
	progress.stop()
	return err
}
