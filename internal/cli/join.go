package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/cli/command"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
)

// memberFlags are the flags for the kubeconfig of the cluster that joins or leaves. They have the same names as in
// Karmada.
type memberFlags struct {
	kubeconfigFlags
	clusterNamespace string
}

// add adds the flags; fileUsage is the usage of the flag for the kubeconfig.
func (m *memberFlags) add(flags *pflag.FlagSet, fileUsage string) {
	m.fileFlag = "cluster-kubeconfig"
	flags.StringVar(&m.file, m.fileFlag, "", fileUsage)
	flags.StringVar(&m.context, "cluster-context", "",
		"`context` of the cluster in that kubeconfig (default the context with the name of the cluster, else the current context)")
	flags.StringVar(&m.clusterNamespace, "cluster-namespace", fleet.DefaultClusterNamespace,
		"`namespace` of the credentials, on the control plane and on the cluster")
}

// restConfig returns the config of a cluster. name is its name, which is the default context, see memberContext. Reads
// with the config are cancelled when ctx ends.
func (m *memberFlags) restConfig(ctx context.Context, name string) (*rest.Config, error) {
	loaded, err := m.load()
	if err != nil {
		return nil, err
	}
	contextName, err := memberContext(&loaded, m.context, name)
	if err != nil {
		return nil, err
	}
	config, err := m.config(loaded, contextName)
	if err != nil {
		return nil, err
	}
	return kube.Interruptible(ctx, config), nil
}

// clusterName returns the only argument of a command, the name of a cluster, and validates it.
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
	hub     controlPlaneFlags
	member  memberFlags
	request karmada.JoinRequest
}

func newJoin(streams command.Streams) *cobra.Command {
	f := &joinFlags{}
	cmd := &cobra.Command{
		Use:   "join CLUSTER_NAME --cluster-kubeconfig=<file>",
		Short: "Register a cluster with the control plane in push mode",
		Long: `Register a cluster with the control plane in push mode, as a Cluster of Karmada. The control plane
gets a ServiceAccount with full permissions on the cluster and connects to the cluster with it. A
cluster is identified by the UID of its namespace kube-system and can be registered only once. If
the command fails or is interrupted, it undoes its changes on both sides.`,
		Example: `  karmadactl join member1 --kubeconfig=karmada.config --cluster-kubeconfig=member1.config

  # select contexts in kubeconfigs with several contexts
  karmadactl join member1 --kubeconfig=karmada.config --karmada-context=karmada \
      --cluster-kubeconfig=members.config --cluster-context=eu-1

  # record the location of the cluster
  karmadactl join member1 --cluster-kubeconfig=member1.config --cluster-provider=aws \
      --cluster-region=eu-central-1 --cluster-zones=a,b`,
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
	command.AddSection(cmd.Flags(), command.SectionCluster, func(flags *pflag.FlagSet) {
		f.member.add(flags, "`file` with the kubeconfig of the cluster (default KUBECONFIG, then ~/.kube/config)")
		addLocation(flags, &f.request.Provider, &f.request.Region, &f.request.Zones)
	})
	command.AddSection(cmd.Flags(), command.SectionControlPlane, func(flags *pflag.FlagSet) {
		f.hub.add(flags, "kubeconfig", controlPlaneUsage)
		f.hub.addImpersonation(flags)
	})
	command.AddSection(cmd.Flags(), command.SectionOther, func(flags *pflag.FlagSet) { addDryRun(flags, &f.request.DryRun) })
	command.AddSection(cmd.Flags(), command.SectionGlobal, f.hub.addVerbosity)
	return cmd
}

// addLocation adds the flags for the location of a cluster.
func addLocation(flags *pflag.FlagSet, provider, region *string, zones *[]string) {
	flags.StringVar(provider, "cluster-provider", "", "`provider` of the cluster, recorded in its Cluster")
	flags.StringVar(region, "cluster-region", "", "`region` of the cluster, recorded in its Cluster")
	flags.StringSliceVar(zones, "cluster-zones", nil, "comma-separated `zones` of the cluster, recorded in its Cluster")
}

func addDryRun(flags *pflag.FlagSet, dryRun *bool) {
	flags.BoolVar(dryRun, "dry-run", false, "run the checks only, and change nothing")
}

func (f *joinFlags) run(ctx context.Context, streams command.Streams) error {
	var err error
	if f.request.Hub, err = f.hub.restConfig(ctx); err != nil {
		return err
	}
	if f.request.Member, err = f.member.restConfig(ctx, f.request.Name); err != nil {
		return fmt.Errorf("failed to get joining cluster config. error: %w", err)
	}
	f.request.ClusterNamespace = f.member.clusterNamespace
	step := fmt.Sprintf("joining cluster %s, at %s, to %s", f.request.Name, f.request.Member.Host, f.request.Hub.Host)
	progress := startProgress(streams, step)
	f.request.Progress = progress.printLine
	err = karmada.Join(ctx, f.request)
	progress.stop()
	if err != nil {
		return err
	}
	if f.request.DryRun {
		streams.PrintErr("note: dry run: nothing was changed; cluster %s can join", f.request.Name)
		return nil
	}
	_, err = fmt.Fprintf(streams.Out, "cluster(%s) is joined successfully\n", f.request.Name)
	return err
}
