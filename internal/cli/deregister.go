package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

func newDeregister(streams Streams) *cobra.Command {
	return parent("deregister", "Take a cluster out of the fleet", newDeregisterCluster(streams))
}

func newDeregisterCluster(streams Streams) *cobra.Command {
	r, verbose := join.Request{}, false
	cmd := &cobra.Command{
		Use:   "cluster --namespace=<namespace> --cluster=<name>",
		Short: "Deregister a cluster, in either mode",
		Long: `Take a cluster out of the fleet of the hub that KUBECONFIG points at.

What is deployed on the cluster stays there, and so does the agent of a cluster in pull mode, which can do nothing on the hub any more. To
have it withdrawn, take the cluster's labels away first and wait until its ClusterSummaries are gone. The agent is removed with the
manifest of the registration: kubectl delete -f registration.yaml.

After a failure or an interruption the command can be run again.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := r.Validate(); err != nil {
				return err
			}
			return runDeregister(cmd.Context(), streams, r, verbose)
		},
	}
	clusterFlags(cmd.Flags(), &r)
	cmd.Flags().BoolVar(&verbose, "verbose", false, "say what is being done")
	return cmd
}

func runDeregister(ctx context.Context, streams Streams, r join.Request, verbose bool) error {
	hub, err := hubConfig("")
	if err != nil {
		return err
	}
	if verbose {
		streams.say("deregistering cluster %s/%s on %s", r.Namespace, r.Name, hub.Host)
	}
	defer progress(streams, fmt.Sprintf("waiting for the hub to let cluster %s/%s go", r.Namespace, r.Name))()
	departure, err := join.Deregister(ctx, hub, join.DeregisterRequest{Request: r})
	if err != nil {
		return err
	}
	deleted := departure.Deleted
	if _, err := fmt.Fprint(streams.Out, farewell(r, deleted)); err != nil {
		return err
	}
	streams.say("%s", remainder(r, deleted))
	return nil
}

// remainder says what a deregistration does not touch.
func remainder(r join.Request, deleted []kube.Ref) string {
	text := fmt.Sprintf("note: everything that is deployed on cluster %s/%s stays there; nobody updates, repairs or withdraws it any more.", r.Namespace, r.Name)
	// Only a cluster in pull mode has a ServiceAccount on the hub.
	if slices.ContainsFunc(deleted, func(ref kube.Ref) bool { return ref.Kind == "ServiceAccount" }) {
		text += "\nnote: so does its agent, without access to the hub: it still repairs what is deployed. Remove it on the cluster with:" +
			" kubectl delete -f <the manifest of the registration>"
	}
	return text
}

func farewell(r join.Request, deleted []kube.Ref) string {
	var text strings.Builder
	fmt.Fprintf(&text, "Successfully deregistered cluster %s/%s\n\nDeleted resources:\n", r.Namespace, r.Name)
	for _, ref := range deleted {
		place := ref.Name
		if ref.Namespace != "" {
			place = ref.Namespace + "/" + ref.Name
		}
		fmt.Fprintf(&text, "  - %s/%s\n", ref.Kind, place)
	}
	return text.String()
}
