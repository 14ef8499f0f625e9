package cli

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/towline/towline/internal/join"
)

// registerFlags are the flags of `register cluster`.
type registerFlags struct {
	cluster       join.Request
	labels        string
	pull          bool
	kubeconfig    string
	hubURL, image string
	verbose       bool
}

func newRegister(streams Streams) *cobra.Command {
	return parent("register", "Bring a cluster into the fleet", newRegisterCluster(streams))
}

func newRegisterCluster(streams Streams) *cobra.Command {
	f := &registerFlags{}
	cmd := &cobra.Command{
		Use:   "cluster --namespace=<namespace> --cluster=<name> (--pullmode | --kubeconfig=<file>)",
		Short: "Register a cluster in pull mode, or in push mode by its kubeconfig",
		Long: `Register a cluster with the hub that KUBECONFIG points at.

With --pullmode, prints the manifest that starts the agent: apply it to the cluster. Its token lives one hour; the agent exchanges it as
soon as it starts. With --kubeconfig, the hub dials the cluster.

Registering a cluster again repairs what is there and adds the labels. A registration that fails leaves everything as it
was.`,
		Example: `  # a cluster that cannot be dialled
  sveltosctl register cluster --namespace=monitoring --cluster=prod-cluster --pullmode --labels=environment=production > registration.yaml
  kubectl apply -f registration.yaml     # with KUBECONFIG of prod-cluster

  # a cluster that can
  sveltosctl register cluster --namespace=aks --cluster=cluster02 --kubeconfig=aks.yaml --labels=env=test`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd.Context(), streams) },
	}
	flags := cmd.Flags()
	clusterFlags(flags, &f.cluster)
	flags.BoolVar(&f.pull, "pullmode", false, "an agent in the cluster dials the hub")
	flags.StringVar(&f.kubeconfig, "kubeconfig", "", "`file` with the kubeconfig of the cluster to register; it must hold everything it needs")
	flags.StringVar(&f.labels, "labels", "", "labels of the cluster, as `k=v,k2=v2`")
	flags.StringVar(&f.cluster.Shard, "shard", "", "`key` of a shard of controllers; refused, since the hub does not shard yet")
	flags.StringVar(&f.hubURL, "management-cluster-url", "", "https `address` under which the agent reaches the hub (default: the one in the current kubeconfig)")
	flags.StringVar(&f.image, "agent-image", join.DefaultAgentImage, "container `image` of the agent")
	flags.BoolVar(&f.verbose, "verbose", false, "say what is being done")
	return cmd
}

// clusterFlags adds the flags that name a cluster.
func clusterFlags(flags *pflag.FlagSet, r *join.Request) {
	flags.StringVar(&r.Namespace, "namespace", "", "`namespace` of the cluster on the hub (required)")
	flags.StringVar(&r.Name, "cluster", "", "`name` of the cluster (required)")
}

func (f *registerFlags) run(ctx context.Context, streams Streams) error {
	labels, err := join.ParseLabels(f.labels)
	if err != nil {
		return err
	}
	f.cluster.Labels = labels
	if err := f.cluster.Validate(); err != nil {
		return err
	}
	switch {
	case f.pull && f.kubeconfig != "":
		return errors.New("--pullmode and --kubeconfig exclude each other: in pull mode the hub needs no kubeconfig of the cluster")
	case f.pull:
		return f.runPull(ctx, streams)
	case f.kubeconfig != "":
		return f.runPush(ctx, streams)
	}
	return errors.New("either --pullmode or --kubeconfig must be specified")
}

func (f *registerFlags) runPull(ctx context.Context, streams Streams) error {
	request := join.PullRequest{Request: f.cluster, AgentImage: f.image, HubURL: f.hubURL, Version: Version()}
	if err := request.Validate(); err != nil {
		return err
	}
	hub, err := hubConfig("")
	if err != nil {
		return err
	}
	defer f.say(streams, "registering cluster %s/%s in pull mode on %s", f.cluster.Namespace, f.cluster.Name, hub.Host)()
	return join.RegisterPull(ctx, hub, request, streams.Out)
}

func (f *registerFlags) runPush(ctx context.Context, streams Streams) error {
	kubeconfig, err := os.ReadFile(f.kubeconfig)
	if err != nil {
		return fmt.Errorf("--kubeconfig: %w", err)
	}
	request := join.PushRequest{Request: f.cluster, Kubeconfig: kubeconfig}
	if err := request.Validate(); err != nil {
		return err
	}
	hub, err := hubConfig("")
	if err != nil {
		return err
	}
	defer f.say(streams, "registering cluster %s/%s in push mode on %s", f.cluster.Namespace, f.cluster.Name, hub.Host)()
	if err := join.RegisterPush(ctx, hub, request); err != nil {
		return err
	}
	_, err = fmt.Fprintf(streams.Out, "cluster %s successfully registered/updated in namespace %s.\n", f.cluster.Name, f.cluster.Namespace)
	return err
}

func (f *registerFlags) say(streams Streams, format string, args ...any) (done func()) {
	what := fmt.Sprintf(format, args...)
	if f.verbose {
		streams.say("%s", what)
	}
	return progress(streams, what)
}
