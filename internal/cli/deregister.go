package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/towline/towline/internal/join"
)

func newDeregister(streams Streams) *cobra.Command {
	return parent("deregister", "Take a cluster out of the fleet", newDeregisterCluster(streams))
}

// deregisterFlags are the flags of `deregister cluster`.
type deregisterFlags struct {
	request join.DeregisterRequest
	verbose bool
}

func newDeregisterCluster(streams Streams) *cobra.Command {
	f := &deregisterFlags{}
	cmd := &cobra.Command{
		Use:   "cluster --namespace=<namespace> --cluster=<name>",
		Short: "Deregister a cluster, in either mode",
		Long: `Take a cluster out of the fleet of the hub that KUBECONFIG points at.

The hub withdraws what it deployed on the cluster, or with --keep-addons leaves it there; then the agent of a cluster in pull mode removes
itself; then identity, credentials and objects of the cluster go from the hub, also those that the sveltosctl of Sveltos made for its
agent. Of these, what something else uses stays and is listed. What is waited for is shown.

When --wait is over, the command fails and the hub goes on by itself: run it again to wait on. What cannot be reached is only left
behind with --force, which says what that is: at once, if the cluster is known to be away, else when --wait is over; a cluster that
answers gets up to 30 seconds more to let go. Deleting the
SveltosCluster with kubectl does the same, without --force. After a failure or an interruption the command can be run again.`,
		Example: `  sveltosctl deregister cluster --namespace=monitoring --cluster=prod-cluster

  # leave on the cluster what is deployed there
  sveltosctl deregister cluster --namespace=monitoring --cluster=prod-cluster --keep-addons

  # a cluster that is gone for good
  sveltosctl deregister cluster --namespace=monitoring --cluster=prod-cluster --wait=10s --force`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.validate(); err != nil {
				return err
			}
			return f.run(cmd.Context(), streams)
		},
	}
	flags := cmd.Flags()
	clusterFlags(flags, &f.request.Request)
	flags.BoolVar(&f.request.KeepAddons, "keep-addons", false, "leave on the cluster what is deployed there")
	flags.BoolVar(&f.request.Force, "force", false, "leave behind what cannot be reached, and say what that is")
	flags.DurationVar(&f.request.Wait, "wait", join.DeregisterWait, "how long to wait until the cluster is deregistered; 0 for not at all")
	flags.BoolVar(&f.verbose, "verbose", false, "say what is being done")
	return cmd
}

func (f *deregisterFlags) validate() error {
	if f.request.Wait < 0 {
		return fmt.Errorf("--wait: %s is less than nothing", f.request.Wait)
	}
	return f.request.Validate()
}

func (f *deregisterFlags) run(ctx context.Context, streams Streams) error {
	r := f.request
	hub, err := hubConfig("")
	if err != nil {
		return err
	}
	if f.verbose {
		streams.say("deregistering cluster %s/%s on %s", r.Namespace, r.Name, hub.Host)
	}
	waiting := startTalk(streams, fmt.Sprintf("waiting for the hub to let cluster %s/%s go", r.Namespace, r.Name))
	r.Progress = waiting.now
	if f.request.Wait == 0 {
		r.Wait = -1
	}
	departure, err := join.Deregister(ctx, hub, r)
	waiting.done()
	if f.request.Wait == 0 && errors.Is(err, join.ErrGoesOn) {
		streams.say("note: a running hub goes on with it; to see how far it is, run the command again with some --wait")
		return nil
	}
	if err == nil {
		err = farewell(streams, r, departure)
	}
	sayKept(streams, departure.Kept)
	return err
}

// sayKept lists what stays on the hub.
func sayKept(streams Streams, kept []join.Kept) {
	if len(kept) > 0 {
		streams.say("note: these stay on the hub, since Towline did not make them and cannot tell that nobody else needs them:")
	}
	for _, k := range kept {
		streams.say("  - %s", k)
	}
}

// farewell prints what is gone, and says what stays on the cluster.
func farewell(streams Streams, r join.DeregisterRequest, departure join.Departure) error {
	var text strings.Builder
	fmt.Fprintf(&text, "Successfully deregistered cluster %s/%s\n\nDeleted resources:\n", r.Namespace, r.Name)
	for _, ref := range departure.Deleted {
		place := ref.Name
		if ref.Namespace != "" {
			place = ref.Namespace + "/" + ref.Name
		}
		fmt.Fprintf(&text, "  - %s/%s\n", ref.Kind, place)
	}
	if _, err := io.WriteString(streams.Out, text.String()); err != nil {
		return fmt.Errorf("print what was deleted: %w", err)
	}
	switch {
	case departure.Forced && len(departure.Left) == 0:
		streams.say("note: cluster %s/%s left by force; nothing is known to be left behind there.", r.Namespace, r.Name)
		return nil
	case departure.Forced:
		streams.say("note: cluster %s/%s left by force; left behind there, as far as is known:", r.Namespace, r.Name)
	case len(departure.Left) > 0:
		streams.say("note: these stay on cluster %s/%s; nobody updates, repairs or withdraws them any more:", r.Namespace, r.Name)
	}
	for _, left := range departure.Left {
		streams.say("  - %s", left)
	}
	if slices.Contains(departure.Left, join.AgentLeft) {
		streams.say("note: to remove the agent, run on that cluster, with its kubeconfig:")
		for _, command := range join.RemoveAgent() {
			streams.say("  %s", command)
		}
	}
	return nil
}
