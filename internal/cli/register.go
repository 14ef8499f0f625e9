package cli

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/towline/towline/internal/join"
)

// joiningFlags are the flags of every `register` command.
type joiningFlags struct {
	cluster join.Request
	labels  string
	verbose bool
}

func (f *joiningFlags) add(flags *pflag.FlagSet) {
	clusterFlags(flags, &f.cluster)
	flags.StringVar(&f.labels, "labels", "", "labels of the cluster, as `k=v,k2=v2`")
	flags.StringVar(&f.cluster.Shard, "shard", "", "`key` of the shard of hubs that looks after the cluster: those started with the same --shard-key")
	flags.BoolVar(&f.verbose, "verbose", false, "say what is being done")
}

// parse reads the labels and says what is wrong with the flags.
func (f *joiningFlags) parse() error {
	labels, err := join.ParseLabels(f.labels)
	if err != nil {
		return fmt.Errorf("--labels: %w", err)
	}
	f.cluster.Labels = labels
	return f.cluster.Validate()
}

func (f *joiningFlags) talk(streams Streams, mode, hub string) *talk {
	what := fmt.Sprintf("registering cluster %s/%s in %s on %s", f.cluster.Namespace, f.cluster.Name, mode, hub)
	if f.verbose {
		streams.say("%s", what)
	}
	return startTalk(streams, what)
}

// pushed tells of a cluster that is registered in push mode.
func (f *joiningFlags) pushed(streams Streams) error {
	_, err := fmt.Fprintf(streams.Out, "cluster %s successfully registered/updated in namespace %s.\n", f.cluster.Name, f.cluster.Namespace)
	return err
}

// registerFlags are the flags of `register cluster`.
type registerFlags struct {
	joiningFlags
	pull bool
	// Of push mode.
	kubeconfig, context string
	accountToken        bool
	// Of pull mode.
	agent agentOptionFlags
	apply applyFlags
}

// newRegister is `register <host:port>`, as karmadactl has it, and groups the commands of sveltosctl.
func newRegister(streams Streams) *cobra.Command {
	cmd := newRegisterEndpoint(streams)
	cmd.Short = "Bring a cluster into the fleet: as a SveltosCluster with register cluster, as a Cluster of Karmada with register <host:port>"
	endpoint := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) == 0 && cmd.Flags().NFlag() == 0:
			return cmd.Help()
		case len(args) == 1 && !strings.ContainsAny(args[0], ":."):
			return fmt.Errorf("unknown command %q for %q", args[0], cmd.CommandPath())
		}
		return endpoint(cmd, args)
	}
	cmd.AddCommand(newRegisterCluster(streams), newRegisterEKS(streams), newRegisterGKE(streams), newRegisterAKS(streams))
	return cmd
}

func newRegisterCluster(streams Streams) *cobra.Command {
	f := &registerFlags{}
	cmd := &cobra.Command{
		Use:   "cluster --namespace=<namespace> --cluster=<name> (--pullmode | --kubeconfig=<file> | --fleet-cluster-context=<context>)",
		Short: "Register a cluster in pull mode, or in push mode by its kubeconfig or context",
		Long: `Register a cluster with the hub that KUBECONFIG points at.

With --pullmode, an agent in the cluster dials the hub. The command prints the manifest that starts the agent: apply it to the cluster, or
have that done with --apply-to-context or --apply-to-kubeconfig, which also wait until the cluster is ready. The token in the manifest
lives one hour, or --token-lifetime; the agent exchanges it as soon as it starts, and it is worthless from then on.

With --kubeconfig, the hub dials the cluster with that kubeconfig, which must hold everything it needs. With --fleet-cluster-context, the
hub gets an identity of its own on the cluster of that context, and renews its token. No kubeconfig file is changed. The hub dials clusters of
EKS, GKE and AKS without a kubeconfig, with its own cloud identity: see register cluster-eks, cluster-gke and cluster-aks.

Registering a cluster again repairs what is there, adds the labels, and in pull mode gives a new token; with --revoke, every older one is
worthless. A registration that fails or is interrupted leaves everything as it was.`,
		Example: `  # a cluster that cannot be dialled
  sveltosctl register cluster --namespace=monitoring --cluster=prod-cluster --pullmode --labels=environment=production > registration.yaml
  kubectl apply -f registration.yaml     # with KUBECONFIG of prod-cluster

  # the same in one command, from where both can be reached
  sveltosctl register cluster --namespace=monitoring --cluster=prod-cluster --pullmode --apply-to-context=prod-admin

  # a cluster that can be dialled
  sveltosctl register cluster --namespace=aks --cluster=cluster02 --kubeconfig=aks.yaml --labels=env=test
  sveltosctl register cluster --namespace=aks --cluster=cluster03 --fleet-cluster-context=aks-admin`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.validate(cmd.Flags()); err != nil {
				return err
			}
			if f.pull {
				return f.runPull(cmd.Context(), streams)
			}
			return f.runPush(cmd.Context(), streams)
		},
	}
	flags := cmd.Flags()
	f.add(flags)
	flags.StringVar(&f.kubeconfig, "kubeconfig", "", "push: `file` with the kubeconfig of the cluster; it must hold everything it needs")
	flags.StringVar(&f.context, "fleet-cluster-context", "", "push: `context` of the cluster in KUBECONFIG, where the hub gets an identity of its own")
	flags.BoolVar(&f.accountToken, "service-account-token", false, "push, by context: give the hub a token that does not expire, instead of one that it renews")
	flags.BoolVar(&f.pull, "pullmode", false, "pull: an agent in the cluster dials the hub")
	f.agent.add(flags)
	f.apply.add(flags)
	return cmd
}

// clusterFlags adds the flags that name a cluster.
func clusterFlags(flags *pflag.FlagSet, r *join.Request) {
	flags.StringVar(&r.Namespace, "namespace", "", "`namespace` of the cluster on the hub (required)")
	flags.StringVar(&r.Name, "cluster", "", "`name` of the cluster (required)")
}

// validate says what is wrong with the flags before anything is read or connects.
func (f *registerFlags) validate(flags *pflag.FlagSet) error {
	if err := f.parse(); err != nil {
		return err
	}
	pullFlags := slices.Concat(agentOptionNames(), applyNames())
	if f.pull {
		if name := firstGiven(flags, "kubeconfig", "fleet-cluster-context", "service-account-token"); name != "" {
			return fmt.Errorf("--%s is for push mode only, and --pullmode is given: the two exclude each other", name)
		}
		for _, name := range pullFlags {
			if flag := flags.Lookup(name); flag.Changed && flag.Value.String() == "" {
				return fmt.Errorf("--%s is empty", name)
			}
		}
		return f.apply.validate(flags)
	}
	if name := firstGiven(flags, pullFlags...); name != "" {
		return fmt.Errorf("--%s is for pull mode only: add --pullmode, or leave it out", name)
	}
	switch {
	case f.kubeconfig == "" && f.context == "":
		return errors.New("either kubeconfig or fleet-cluster-context must be specified; or --pullmode, for a cluster that the hub cannot dial")
	case f.kubeconfig != "" && f.context != "":
		return errors.New("--kubeconfig and --fleet-cluster-context exclude each other")
	case f.accountToken && f.context == "":
		return errors.New("--service-account-token needs --fleet-cluster-context")
	}
	return nil
}

// firstGiven returns the first of names that the command line has, or "".
func firstGiven(flags *pflag.FlagSet, names ...string) string {
	if i := slices.IndexFunc(names, flags.Changed); i >= 0 {
		return names[i]
	}
	return ""
}

func (f *registerFlags) runPush(ctx context.Context, streams Streams) error {
	request := join.PushRequest{Request: f.cluster, ServiceAccountToken: f.accountToken}
	var err error
	if f.context != "" {
		if request.Member, err = contextConfig(f.context); err != nil {
			return fmt.Errorf("--fleet-cluster-context: %w", err)
		}
	} else if request.Kubeconfig, err = readKubeconfig(f.kubeconfig); err != nil {
		return fmt.Errorf("--kubeconfig: %w", err)
	}
	if err := request.Validate(); err != nil {
		return err
	}
	hub, err := hubConfig("")
	if err != nil {
		return err
	}
	server := join.Server(request.Kubeconfig)
	if request.Member != nil {
		server = request.Member.Host
	}
	var notes []string
	request.Note = func(note string) { notes = append(notes, note) }
	doing := f.talk(streams, "push mode, at "+server+",", hub.Host)
	err = join.RegisterPush(ctx, hub, request)
	doing.done()
	for _, note := range notes {
		streams.say("warning: %s", note)
	}
	if err != nil {
		return err
	}
	return f.pushed(streams)
}

// readKubeconfig reads a file that must not be empty.
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

func (f *registerFlags) runPull(ctx context.Context, streams Streams) error {
	options, err := f.agent.options()
	if err != nil {
		return err
	}
	request := join.PullRequest{Request: f.cluster, Options: options, Revoke: f.agent.revoke, Version: Version()}
	if err := request.Validate(); err != nil {
		return err
	}
	if f.apply.given() {
		return f.runApply(ctx, streams, request)
	}
	if err := streams.open(); err != nil {
		return err
	}
	hub, err := hubConfig("")
	if err != nil {
		return err
	}
	defer f.talk(streams, "pull mode", hub.Host).done()
	return join.RegisterPull(ctx, hub, request, streams.Out)
}

func (f *registerFlags) runApply(ctx context.Context, streams Streams, request join.PullRequest) error {
	member, err := f.apply.member()
	if err != nil {
		return err
	}
	hub, err := hubConfig("")
	if err != nil {
		return err
	}
	doing := f.talk(streams, "pull mode", hub.Host)
	version, err := join.RegisterAndApply(ctx, hub, join.ApplyRequest{
		PullRequest: request, Member: member, Wait: f.apply.wait,
		Progress: func(what string) {
			doing.now(fmt.Sprintf("waiting for cluster %s/%s: %s", f.cluster.Namespace, f.cluster.Name, what))
		},
	}, streams.Out)
	doing.done()
	if err != nil || f.apply.wait == 0 {
		return err
	}
	_, err = fmt.Fprintf(streams.Out, "cluster %s/%s is ready, Kubernetes %s\n", f.cluster.Namespace, f.cluster.Name, cmp.Or(version, "of unknown version"))
	return err
}
