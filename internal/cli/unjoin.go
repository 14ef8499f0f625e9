package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/join/register"
)

// addWait adds the flag for how long to wait.
func addWait(flags *pflag.FlagSet, wait *time.Duration) {
	flags.DurationVar(wait, "wait", register.DefaultWait, "how long to wait until the cluster is gone from the control plane")
}

func validateWait(wait time.Duration) error {
	if wait <= 0 {
		return fmt.Errorf(" --wait %v  must be a positive duration, e.g. 1m0s ", wait)
	}
	return nil
}

// unjoinFlags are the flags of `unjoin`.
type unjoinFlags struct {
	hub     controlPlane
	member  memberFlags
	request karmada.UnjoinRequest
}

func newUnjoin(streams Streams) *cobra.Command {
	f := &unjoinFlags{}
	cmd := &cobra.Command{
		Use:   "unjoin CLUSTER_NAME [--cluster-kubeconfig=<file>]",
		Short: "Take a cluster out of the fleet that joined in push mode",
		Long: `Take a cluster out of the fleet that joined in push mode.

What was propagated to the cluster is removed from it, or with --orphan left there; then what join made on it, as far as nobody else uses it; then
its credentials and its Cluster on the control plane. The control plane does that by itself; --cluster-kubeconfig is for a cluster that does not let it in any more.

A cluster that does not answer is waited for some 20 s at most: what cannot be removed stays there. When --wait is over the command fails, and the control plane goes on;
with --force it is then let go as it is. kubectl delete cluster does the same, without --force.`,
		Example: `  karmadactl unjoin member1 --kubeconfig=karmada.config --cluster-kubeconfig=member1.config

  # leave on the cluster what is deployed there
  karmadactl unjoin member1 --kubeconfig=karmada.config --orphan

  # a cluster that is gone for good
  karmadactl unjoin member1 --kubeconfig=karmada.config --wait=10s --force`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if f.request.Name, err = clusterName(args); err != nil {
				return err
			}
			if err := validateWait(f.request.Wait); err != nil {
				return err
			}
			return f.run(withVerbosity(cmd.Context(), f.hub.verbosity, streams), streams)
		},
	}
	flags := cmd.Flags()
	f.hub.add(flags, "kubeconfig")
	f.member.add(flags, "`file` with the kubeconfig of the cluster, to remove with it what join made there")
	flags.BoolVar(&f.request.Force, "force", false, "when --wait is over, let the cluster go with what it has")
	flags.BoolVar(&f.request.Orphan, "orphan", false, "leave on the cluster what is deployed there")
	addWait(flags, &f.request.Wait)
	flags.BoolVar(&f.request.DryRun, "dry-run", false, "check what can be checked, and change nothing")
	return cmd
}

func (f *unjoinFlags) run(ctx context.Context, streams Streams) error {
	var err error
	if f.request.Hub, err = f.hub.hub(ctx); err != nil {
		return err
	}
	if f.member.file != "" || f.member.context != "" {
		if f.request.Member, err = f.member.find(ctx, f.request.Name); err != nil {
			return fmt.Errorf("failed to get unjoining cluster config. error: %w", err)
		}
	}
	f.request.ClusterNamespace = f.member.clusterNamespace
	doing := startTalk(streams, fmt.Sprintf("waiting for the control plane to let cluster %s go", f.request.Name))
	f.request.Progress = doing.line
	err = karmada.Unjoin(ctx, f.request)
	doing.done()
	return err
}
