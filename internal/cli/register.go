package cli

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/towline/towline/internal/cli/command"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// registrationFlags are the flags that `register cluster`, `cluster-eks`, `cluster-gke` and `cluster-aks` share.
type registrationFlags struct {
	request join.Request
	labels  string
	verbose bool
}

// addCluster adds the flags for the cluster.
func (f *registrationFlags) addCluster(flags *pflag.FlagSet) {
	addClusterFlags(flags, &f.request)
	flags.StringVar(&f.labels, "labels", "", "labels of the SveltosCluster, as `key=value,key2=value2`")
	flags.StringVar(&f.request.Shard, "shard", "", "`key` of the shard: hubs with this --shard-key handle the cluster")
}

func (f *registrationFlags) addVerbose(flags *pflag.FlagSet) { addVerbose(flags, &f.verbose) }

// addClusterFlags adds the flags that identify a SveltosCluster.
func addClusterFlags(flags *pflag.FlagSet, r *join.Request) {
	flags.StringVar(&r.Namespace, "namespace", "", "`namespace` of the SveltosCluster on the hub (required)")
	flags.StringVar(&r.Name, "cluster", "", "`name` of the SveltosCluster (required)")
}

func addVerbose(flags *pflag.FlagSet, verbose *bool) {
	flags.BoolVar(verbose, "verbose", false, "more progress on standard error")
}

// complete parses the labels and validates the request.
func (f *registrationFlags) complete() error {
	labels, err := parseLabels(f.labels)
	if err != nil {
		return fmt.Errorf("--labels: %w", err)
	}
	f.request.Labels = labels
	return f.request.Validate()
}

// startProgress starts the progress of the registration. hub is the address of the hub. mode is "push mode" or "pull
// mode", optionally with the address of the cluster.
func (f *registrationFlags) startProgress(streams command.Streams, mode, hub string) *progress {
	step := fmt.Sprintf("registering cluster %s/%s in %s with the hub %s", f.request.Namespace, f.request.Name, mode, hub)
	if f.verbose {
		streams.PrintErr("%s", step)
	}
	return startProgress(streams, step)
}

// printRegistered prints the result of a registration in push mode, as Sveltos does.
func (f *registrationFlags) printRegistered(streams command.Streams) error {
	_, err := fmt.Fprintf(streams.Out,
		"cluster %s successfully registered/updated in namespace %s.\n", f.request.Name, f.request.Namespace)
	return err
}

// registerClusterFlags are the flags of `register cluster`.
type registerClusterFlags struct {
	registrationFlags
	pullMode bool
	// Push mode.
	kubeconfig, context string
	serviceAccountToken bool
	// Pull mode.
	agent agentOptionFlags
	apply applyFlags
}

// newRegister returns `register` of towline: `register <host:port>` of karmadactl with the subcommands of sveltosctl.
func newRegister(streams command.Streams) *cobra.Command {
	cmd := newRegisterEndpoint(streams)
	cmd.Short = "Register a cluster: a SveltosCluster, or a Cluster of Karmada"
	cmd.Long = `Register a cluster. The subcommands register a SveltosCluster, in push mode or in pull mode.
Without a subcommand and with the address of the hub, the command registers a Cluster of Karmada in
pull mode, as karmadactl register does. It needs the kubeconfig of the cluster only. To print its
arguments, run token create --print-register-command with the kubeconfig of the hub.`
	registerEndpoint := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) == 0 && cmd.Flags().NFlag() == 0:
			return cmd.Help()
		case len(args) == 1 && !strings.ContainsAny(args[0], ":."):
			return fmt.Errorf("unknown command %q for %q", args[0], cmd.CommandPath())
		}
		return registerEndpoint(cmd, args)
	}
	cmd.AddCommand(registerCommands(streams)...)
	return cmd
}

// newRegisterSveltos returns `register` of sveltosctl.
func newRegisterSveltos(streams command.Streams) *cobra.Command {
	return command.NewParent("register", "Register a cluster with the hub", registerCommands(streams)...)
}

// registerCommands returns the subcommands of `register` in sveltosctl.
func registerCommands(streams command.Streams) []*cobra.Command {
	return []*cobra.Command{newRegisterCluster(streams), newRegisterEKS(streams), newRegisterGKE(streams), newRegisterAKS(streams)}
}

func newRegisterCluster(streams command.Streams) *cobra.Command {
	f := &registerClusterFlags{}
	cmd := &cobra.Command{
		Use:   "cluster --namespace=<namespace> --cluster=<name>",
		Short: "Register a SveltosCluster in push mode or in pull mode",
		Long: `Register a cluster as a SveltosCluster with the hub. Push mode needs --kubeconfig or
--fleet-cluster-context: the hub connects to the cluster. With --pullmode an agent in the cluster
connects to the hub: the command prints the manifest of the agent, which must be applied to the
cluster, or applies it with --apply-to-context or --apply-to-kubeconfig. Registering a cluster
again repairs the registration, adds the labels, and prints a manifest with a new token in pull
mode. If registering or applying fails or is interrupted, the command undoes its changes.`,
		Example: `  # print the manifest of the agent, and apply it with the kubeconfig of the cluster
  sveltosctl register cluster --namespace=monitoring --cluster=prod-cluster --pullmode \
      --labels=environment=production > registration.yaml
  kubectl --kubeconfig=prod.yaml apply -f registration.yaml

  # apply the manifest to the cluster of a context, and wait until the cluster is ready
  sveltosctl register cluster --namespace=monitoring --cluster=prod-cluster --pullmode \
      --apply-to-context=prod-admin

  # register a cluster in push mode
  sveltosctl register cluster --namespace=aks --cluster=cluster02 --kubeconfig=aks.yaml
  sveltosctl register cluster --namespace=aks --cluster=cluster03 --fleet-cluster-context=aks-admin`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.validate(cmd.Flags()); err != nil {
				return err
			}
			if f.pullMode {
				return f.runPull(cmd.Context(), streams)
			}
			return f.runPush(cmd.Context(), streams)
		},
	}
	flags := cmd.Flags()
	command.AddSection(flags, command.SectionCluster, f.addCluster)
	command.AddSection(flags, command.SectionCluster, func(flags *pflag.FlagSet) {
		flags.BoolVar(&f.pullMode, "pullmode", false, "use pull mode instead of push mode")
	})
	command.AddSection(flags, command.SectionPush, f.addPush)
	command.AddSection(flags, command.SectionPull, f.apply.add)
	command.AddSection(flags, command.SectionPull, f.agent.add)
	command.AddSection(flags, command.SectionGlobal, f.addVerbose)
	return cmd
}

// addPush adds the flags of push mode.
func (f *registerClusterFlags) addPush(flags *pflag.FlagSet) {
	flags.StringVar(&f.kubeconfig, "kubeconfig", "",
		"`file` with the kubeconfig of the cluster, which must not refer to files or programs")
	flags.StringVar(&f.context, "fleet-cluster-context", "",
		"`context` of the cluster in KUBECONFIG; the hub gets a ServiceAccount in the cluster and renews its token")
	flags.BoolVar(&f.serviceAccountToken, "service-account-token", false,
		"use a token that does not expire, instead of a token that the hub renews; needs --fleet-cluster-context")
}

// validate returns an error for wrong flags. It does not connect to a cluster.
func (f *registerClusterFlags) validate(flags *pflag.FlagSet) error {
	if err := f.complete(); err != nil {
		return err
	}
	if f.pullMode {
		if flag := firstChanged(flags, command.SectionPush); flag != nil {
			return fmt.Errorf("--%s is for push mode only, and --pullmode is set: the two exclude each other", flag.Name)
		}
		for _, flag := range command.FlagsOfSection(flags, command.SectionPull) {
			if flag.Changed && flag.Value.String() == "" {
				return fmt.Errorf("--%s is empty", flag.Name)
			}
		}
		return f.apply.validate(flags)
	}
	if flag := firstChanged(flags, command.SectionPull); flag != nil {
		return fmt.Errorf("--%s is for pull mode only: add --pullmode, or omit it", flag.Name)
	}
	switch {
	case f.kubeconfig == "" && f.context == "":
		return errors.New("either kubeconfig or fleet-cluster-context must be specified; or --pullmode, if the hub cannot connect to the cluster")
	case f.kubeconfig != "" && f.context != "":
		return errors.New("--kubeconfig and --fleet-cluster-context exclude each other")
	case f.serviceAccountToken && f.context == "":
		return errors.New("--service-account-token needs --fleet-cluster-context")
	}
	return nil
}

// firstChanged returns the first flag of a section that is set on the command line, nil if there is none.
func firstChanged(flags *pflag.FlagSet, section string) *pflag.Flag {
	for _, flag := range command.FlagsOfSection(flags, section) {
		if flag.Changed {
			return flag
		}
	}
	return nil
}

func (f *registerClusterFlags) runPush(ctx context.Context, streams command.Streams) error {
	request := join.PushRequest{Request: f.request, ServiceAccountToken: f.serviceAccountToken}
	var err error
	if f.context != "" {
		if request.Member, err = contextConfig(f.context); err != nil {
			return fmt.Errorf("--fleet-cluster-context: %w", err)
		}
		request.Member = kube.Interruptible(ctx, request.Member)
	} else if request.Kubeconfig, err = readKubeconfig(f.kubeconfig); err != nil {
		return fmt.Errorf("--kubeconfig: %w", err)
	}
	if err := request.Validate(); err != nil {
		return err
	}
	hub, err := hubConfig(ctx)
	if err != nil {
		return err
	}
	server := join.KubeconfigServer(request.Kubeconfig)
	if request.Member != nil {
		server = request.Member.Host
	}
	progress := f.startProgress(streams, "push mode (API server "+server+")", hub.Host)
	err = join.RegisterPush(ctx, hub, request)
	progress.stop()
	if err != nil {
		return err
	}
	return f.printRegistered(streams)
}

// readKubeconfig reads a kubeconfig. An empty file is an error.
func readKubeconfig(path string) ([]byte, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if len(bytes.TrimSpace(text)) == 0 {
		return nil, fmt.Errorf("%s is empty", path)
	}
	return text, nil
}

func (f *registerClusterFlags) runPull(ctx context.Context, streams command.Streams) error {
	options, err := f.agent.options()
	if err != nil {
		return err
	}
	request := join.PullRequest{Request: f.request, Options: options, Revoke: f.agent.revoke, Version: command.Version()}
	if err := request.Validate(); err != nil {
		return err
	}
	if f.apply.isSet() {
		return f.runPullAndApply(ctx, streams, request)
	}
	if err := streams.RequireOpen(); err != nil {
		return err
	}
	hub, err := hubConfig(ctx)
	if err != nil {
		return err
	}
	defer f.startProgress(streams, "pull mode", hub.Host).stop()
	return join.RegisterPull(ctx, hub, request, streams.Out)
}

// runPullAndApply applies the manifest instead of printing it, and waits until the cluster is ready.
func (f *registerClusterFlags) runPullAndApply(ctx context.Context, streams command.Streams, request join.PullRequest) error {
	member, err := f.apply.restConfig()
	if err != nil {
		return err
	}
	hub, err := hubConfig(ctx)
	if err != nil {
		return err
	}
	progress := f.startProgress(streams, "pull mode", hub.Host)
	version, err := join.RegisterAndApply(ctx, hub, join.ApplyRequest{
		PullRequest: request, Member: member, Wait: f.apply.wait,
		Progress: func(step string) {
			progress.setStep(fmt.Sprintf("waiting for cluster %s/%s: %s", f.request.Namespace, f.request.Name, step))
		},
	}, streams.Out)
	progress.stop()
	if err != nil || f.apply.wait == 0 {
		return err
	}
	_, err = fmt.Fprintf(streams.Out, "cluster %s/%s is ready, Kubernetes %s\n",
		f.request.Namespace, f.request.Name, cmp.Or(version, "of unknown version"))
	return err
}
