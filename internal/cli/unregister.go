package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/towline/towline/internal/join/register"
)

// unregisterFlags are the flags of `unregister`.
type unregisterFlags struct {
	hub     controlPlane
	member  memberFlags
	request register.UnregisterRequest
}

func newUnregister(streams Streams) *cobra.Command {
	f := &unregisterFlags{}
	cmd := &cobra.Command{
		Use:   "unregister CLUSTER_NAME --cluster-kubeconfig=<file>",
		Short: "Take a cluster out of the fleet that registered in pull mode",
		Long: `Take a cluster out of the fleet that registered in pull mode.

What was propagated to the cluster is removed from it, or with --orphan left there; then its Cluster, identity and credentials go from the control plane, and the agent
and what belongs to it from the cluster. An agent that is dead is waited for until that is certain, some 20 s a step: what was propagated stays there then. A cluster
that is gone for good is taken out by kubectl delete cluster, on the control plane.

The cluster is the one of --cluster-kubeconfig and --cluster-context; without a context, that of the context with the cluster's name, else of the current one. The
control plane is the one of --karmada-config and --karmada-context, of which one is enough; without both, the agent's own way to it is used, which may not ask for
--orphan.`,
		Example: `  karmadactl unregister member3 --cluster-kubeconfig=member3.config

  # with the control plane's administrator, where the agent's own credential does not work any more
  karmadactl unregister member3 --cluster-kubeconfig=member3.config --cluster-context=member3 \
      --karmada-config=karmada.config --karmada-context=karmada

  # leave on the cluster what is deployed there
  karmadactl unregister member3 --cluster-kubeconfig=member3.config --karmada-config=karmada.config --orphan`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.validate(args); err != nil {
				return err
			}
			return f.run(withVerbosity(cmd.Context(), f.hub.verbosity, streams), streams)
		},
	}
	flags := cmd.Flags()
	f.member.add(flags, "`file` with the kubeconfig of the cluster (required)")
	f.hub.add(flags, "karmada-config")
	flags.Lookup("karmada-config").Usage = "`file` with the kubeconfig of the control plane (default: with --karmada-context KUBECONFIG, then ~/.kube/config; else the agent's own way to it)"
	flags.Lookup("karmada-context").Usage = "`context` of the control plane in that kubeconfig (default: the current one of --karmada-config)"
	flags.StringVarP(&f.request.Namespace, "namespace", "n", register.DefaultNamespace, "`namespace` of the agent, on the cluster")
	flags.StringVar(&f.request.AgentName, "agent-name", register.DefaultAgentName, "`name` of the agent's Deployment, on the cluster")
	addWait(flags, &f.request.Wait)
	flags.BoolVar(&f.request.Orphan, "orphan", false, "leave on the cluster what is deployed there; needs --karmada-config or --karmada-context")
	flags.BoolVar(&f.request.DryRun, "dry-run", false, "check what can be checked, and change nothing")
	return cmd
}

func (f *unregisterFlags) validate(args []string) (err error) {
	if f.request.ClusterName, err = clusterName(args); err != nil {
		return err
	}
	if f.member.file == "" {
		return errors.New("--cluster-kubeconfig is required to specify KUBECONFIG file path to access unregistering member cluster")
	}
	return validateWait(f.request.Wait)
}

func (f *unregisterFlags) run(ctx context.Context, streams Streams) error {
	r := f.request
	var err error
	if r.Member, err = f.member.find(ctx, r.ClusterName); err != nil {
		return fmt.Errorf("failed to get unregistering cluster config. error: %w", err)
	}
	if f.hub.file != "" || f.hub.context != "" {
		if r.Hub, err = f.hub.hub(ctx); err != nil {
			return err
		}
	}
	r.ClusterNamespace = f.member.clusterNamespace
	doing := startTalk(streams, fmt.Sprintf("waiting for the control plane to let cluster %s go", r.ClusterName))
	r.Progress = doing.line
	err = register.Unregister(ctx, r)
	doing.done()
	return err
}
