package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/towline/towline/internal/cli/command"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
)

func newDeregister(streams command.Streams) *cobra.Command {
	return command.NewParent("deregister", "Remove a cluster from the hub", newDeregisterCluster(streams))
}

// deregisterFlags are the flags of `deregister cluster`.
type deregisterFlags struct {
	request join.DeregisterRequest
	verbose bool
}

func newDeregisterCluster(streams command.Streams) *cobra.Command {
	f := &deregisterFlags{}
	cmd := &cobra.Command{
		Use:   "cluster --namespace=<namespace> --cluster=<name>",
		Short: "Remove a SveltosCluster and its add-ons",
		Long: `Remove a SveltosCluster, in push mode or in pull mode. The hub deletes the deployed objects on the
cluster, then the agent uninstalls itself, then the hub deletes the identity, the credentials and
the objects of the cluster. The command shows each step. If --wait expires, the command fails, the
hub continues, and the command can be run again. With --force, objects on an unreachable cluster
are not deleted; the command lists them.`,
		Example: `  sveltosctl deregister cluster --namespace=monitoring --cluster=prod-cluster

  # keep the add-ons on the cluster
  sveltosctl deregister cluster --namespace=monitoring --cluster=prod-cluster --keep-addons

  # remove a cluster that no longer exists
  sveltosctl deregister cluster --namespace=monitoring --cluster=prod-cluster --wait=10s --force`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.validate(); err != nil {
				return err
			}
			return f.run(cmd.Context(), streams)
		},
	}
	command.AddSection(cmd.Flags(), command.SectionCluster, func(flags *pflag.FlagSet) { addClusterFlags(flags, &f.request.Request) })
	command.AddSection(cmd.Flags(), "Deregistration flags:", func(flags *pflag.FlagSet) {
		flags.BoolVar(&f.request.KeepAddons, "keep-addons", false, "keep the add-ons on the cluster")
		flags.BoolVar(&f.request.Force, "force", false, "abandon objects on an unreachable cluster, and list them")
		flags.DurationVar(&f.request.Wait, "wait", join.DeregisterWait,
			"maximum time to wait for the removal; 0 does not wait")
	})
	command.AddSection(cmd.Flags(), command.SectionGlobal, func(flags *pflag.FlagSet) { addVerbose(flags, &f.verbose) })
	return cmd
}

func (f *deregisterFlags) validate() error {
	if f.request.Wait < 0 {
		return fmt.Errorf("--wait: %s must not be negative", f.request.Wait)
	}
	return f.request.Validate()
}

func (f *deregisterFlags) run(ctx context.Context, streams command.Streams) error {
	r := f.request
	hub, err := hubConfig(ctx)
	if err != nil {
		return err
	}
	if f.verbose {
		streams.PrintErr("deregistering cluster %s/%s on %s", r.Namespace, r.Name, hub.Host)
	}
	progress := startProgress(streams, fmt.Sprintf("waiting for the hub to finish removing cluster %s/%s", r.Namespace, r.Name))
	r.Progress = progress.setStep
	if f.request.Wait == 0 {
		r.Wait = -1 // for join.Deregister, 0 means its default
	}
	result, err := join.Deregister(ctx, hub, r)
	progress.stop()
	if f.request.Wait == 0 && errors.Is(err, join.ErrStillDeregistering) {
		streams.PrintErr("note: a running hub continues with the removal; run the command again with --wait to see its progress")
		return nil
	}
	if err == nil {
		err = printSummary(streams, r, result)
	}
	printKept(streams, result.Kept)
	return err
}

// printKept lists the objects that stay on the hub.
func printKept(streams command.Streams, kept []join.Kept) {
	if len(kept) > 0 {
		streams.PrintErr("note: these objects stay on the hub, since Towline did not create them and they may be in use:")
	}
	for _, k := range kept {
		streams.PrintErr("  - %s", k)
	}
}

// printSummary prints the objects that were deleted on the hub, and lists the objects that stay on the cluster.
func printSummary(streams command.Streams, r join.DeregisterRequest, result join.DeregisterResult) error {
	var text strings.Builder
	fmt.Fprintf(&text, "Successfully deregistered cluster %s/%s\n\nDeleted resources:\n", r.Namespace, r.Name)
	for _, ref := range result.Deleted {
		name := ref.Name
		if ref.Namespace != "" {
			name = ref.Namespace + "/" + ref.Name
		}
		fmt.Fprintf(&text, "  - %s/%s\n", ref.Kind, name)
	}
	if _, err := io.WriteString(streams.Out, text.String()); err != nil {
		return fmt.Errorf("print the deleted objects: %w", err)
	}
	switch {
	case result.Forced && len(result.Left) == 0:
		streams.PrintErr("note: cluster %s/%s was force-deregistered; no objects are known to be left behind there", r.Namespace, r.Name)
		return nil
	case result.Forced:
		streams.PrintErr("note: cluster %s/%s was force-deregistered; left behind there, as far as known:", r.Namespace, r.Name)
	case len(result.Left) > 0:
		streams.PrintErr("note: these objects stay on cluster %s/%s; they are no longer managed:", r.Namespace, r.Name)
	}
	for _, left := range result.Left {
		streams.PrintErr("  - %s", left)
	}
	if slices.Contains(result.Left, fleet.LeftBehindAgent) {
		streams.PrintErr("note: to remove the agent, run these commands with the kubeconfig of that cluster:")
		for _, command := range join.RemoveAgentCommands() {
			streams.PrintErr("  %s", command)
		}
	}
	return nil
}
