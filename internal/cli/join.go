package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/join/register"
)

// memberFlags are the flags that say where the cluster is that joins or leaves, in the words of Karmada.
type memberFlags struct {
	whereabouts
	clusterNamespace string
}

func (m *memberFlags) add(flags *pflag.FlagSet, usage string) {
	m.fileFlag = "cluster-kubeconfig"
	flags.StringVar(&m.file, m.fileFlag, "", usage)
	flags.StringVar(&m.context, "cluster-context", "", "`context` of the cluster in that kubeconfig (default: the one that is named as the cluster, else the current one)")
	flags.StringVar(&m.clusterNamespace, "cluster-namespace", fleet.DefaultClusterNamespace, "`namespace` with the credentials, on the control plane and on the cluster")
}

// find finds the way to the cluster that is called name.
func (m *memberFlags) find(ctx context.Context, name string) (*rest.Config, error) {
	loaded, err := m.load()
	if err != nil {
		return nil, err
	}
	chosen, err := register.MemberContext(&loaded, m.context, name)
	if err != nil {
		return nil, err
	}
	config, err := m.config(loaded, chosen)
	if err != nil {
		return nil, err
	}
	return register.Interruptible(ctx, config), nil
}

// clusterName reads the one argument of a command.
func clusterName(args []string) (string, error) {
	switch {
	case len(args) > 1:
		return "", errors.New("only the cluster name is allowed as an argument")
	case len(args) == 0 || args[0] == "":
		return "", errors.New("cluster name is required")
	}
	return args[0], karmada.ValidateName(args[0])
}

// joinFlags are the flags of `join`.
type joinFlags struct {
	hub     controlPlane
	member  memberFlags
	request karmada.JoinRequest
}

func newJoin(streams Streams) *cobra.Command {
	f := &joinFlags{}
	cmd := &cobra.Command{
		Use:   "join CLUSTER_NAME --cluster-kubeconfig=<file>",
		Short: "Bring a cluster into the fleet in push mode, as a Cluster of Karmada",
		Long: `Bring a cluster into the fleet in push mode, as a Cluster of Karmada: the control plane dials the cluster.

The control plane gets a ServiceAccount of its own on the cluster, with the right to do everything there. The cluster is known by the uid of its
namespace kube-system, and joins once: under one name, in one mode. What fails is taken back, on both sides.

The control plane is the one of --kubeconfig and --karmada-context; without them, of KUBECONFIG or ~/.kube/config and its current context. The cluster
is the one of --cluster-kubeconfig and --cluster-context; without a context, that of the context with the cluster's name, else of the current one.`,
		Example: `  karmadactl join member1 --kubeconfig=karmada.config --cluster-kubeconfig=member1.config

  # with more than one context in the files
  karmadactl join member1 --kubeconfig=karmada.config --karmada-context=karmada --cluster-kubeconfig=members.config --cluster-context=eu-1

  # with what is known about where it is
  karmadactl join member1 --cluster-kubeconfig=member1.config --cluster-provider=aws --cluster-region=eu-central-1 --cluster-zones=a,b`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if f.request.Name, err = clusterName(args); err != nil {
				return err
			}
			if err := f.hub.validate(); err != nil {
				return err
			}
			return f.run(withVerbosity(cmd.Context(), f.hub.verbosity, streams), streams)
		},
	}
	flags := cmd.Flags()
	f.hub.add(flags, "kubeconfig")
	f.hub.addImpersonation(flags)
	f.member.add(flags, "`file` with the kubeconfig of the cluster (default: KUBECONFIG, then ~/.kube/config)")
	addPlacement(flags, &f.request.Provider, &f.request.Region, &f.request.Zones)
	flags.BoolVar(&f.request.DryRun, "dry-run", false, "check what can be checked, and change nothing")
	return cmd
}

// addPlacement adds the flags that say where a cluster is.
func addPlacement(flags *pflag.FlagSet, provider, region *string, zones *[]string) {
	flags.StringVar(provider, "cluster-provider", "", "`provider` of the cluster, for its Cluster")
	flags.StringVar(region, "cluster-region", "", "`region` of the cluster, for its Cluster")
	flags.StringSliceVar(zones, "cluster-zones", nil, "`zones` of the cluster, separated by commas, for its Cluster")
}

func (f *joinFlags) run(ctx context.Context, streams Streams) error {
	var err error
	if f.request.Hub, err = f.hub.hub(ctx); err != nil {
		return err
	}
	if f.request.Member, err = f.member.find(ctx, f.request.Name); err != nil {
		return fmt.Errorf("failed to get joining cluster config. error: %w", err)
	}
	f.request.ClusterNamespace = f.member.clusterNamespace
	doing := startTalk(streams, fmt.Sprintf("joining cluster %s, at %s, to %s", f.request.Name, f.request.Member.Host, f.request.Hub.Host))
	f.request.Progress = doing.line
	err = karmada.Join(ctx, f.request)
	doing.done()
	if err != nil {
		return err
	}
	if f.request.DryRun {
		streams.say("note: nothing was changed; cluster %s could join", f.request.Name)
		return nil
	}
	_, err = fmt.Fprintf(streams.Out, "cluster(%s) is joined successfully\n", f.request.Name)
	return err
}
