package agents

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/agent"
	"github.com/towline/towline/internal/cli/command"
)

// agentFlags are the flags of `agent`. They have the names of the flags in Sveltos's manifest, because users patch it.
type agentFlags struct {
	options     agent.Options
	clusterType string
	release     string
	log         command.LogFlags
}

// NewAgent returns the command that runs the agent of a SveltosCluster.
func NewAgent(streams command.Streams) *cobra.Command {
	f := &agentFlags{}
	cmd := &cobra.Command{
		Use:   "agent --cluster-namespace=<namespace> --cluster-name=<name>",
		Short: "Run the agent of a SveltosCluster in pull mode",
		Long: `Run the agent of a SveltosCluster in pull mode, in a pod of that cluster. The manifest that
register cluster --pullmode prints has a Deployment with this command.`,
		Example: `  towline agent --cluster-namespace=monitoring --cluster-name=prod-cluster`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.validate(); err != nil {
				return err
			}
			ctx, err := f.log.WithLogger(cmd.Context(), streams.Err)
			if err != nil {
				return err
			}
			return f.run(ctx, streams)
		},
	}
	command.AddSection(cmd.Flags(), command.SectionCluster, f.addCluster)
	command.AddSection(cmd.Flags(), command.SectionEndpoints, func(flags *pflag.FlagSet) {
		command.AddEndpoints(flags, &f.options.DiagnosticsAddress, &f.options.HealthAddress)
	})
	command.AddSection(cmd.Flags(), command.SectionGlobal, f.log.Add)
	return cmd
}

func (f *agentFlags) addCluster(flags *pflag.FlagSet) {
	flags.StringVar(&f.options.Namespace, "cluster-namespace", "",
		"`namespace` of the SveltosCluster on the hub (required)")
	flags.StringVar(&f.options.Name, "cluster-name", "", "`name` of the SveltosCluster on the hub (required)")
	flags.StringVar(&f.clusterType, "cluster-type", "sveltos",
		"`kind` of the cluster object on the hub; only sveltos is supported")
	flags.StringVar(&f.options.KubeconfigSecret, "secret-with-kubeconfig", "",
		"`name` of the Secret in namespace projectsveltos with the kubeconfig of the hub (default <cluster-name>-sveltos-kubeconfig)")
	flags.StringVar(&f.release, "version", "", "`release` of the program that printed the manifest, for the log")
}

func (f *agentFlags) validate() error {
	if f.options.Namespace == "" || f.options.Name == "" {
		return errors.New("--cluster-namespace and --cluster-name are required")
	}
	if !strings.EqualFold(f.clusterType, "sveltos") {
		return fmt.Errorf("--cluster-type: %q is not supported, must be sveltos", f.clusterType)
	}
	return nil
}

func (f *agentFlags) run(ctx context.Context, streams command.Streams) error {
	options := f.options
	options.SandboxCommand = command.SandboxCommand(streams)
	var err error
	if options.Member, err = command.InClusterConfig(); err != nil {
		return fmt.Errorf("load the config of the agent's own cluster: %w", err)
	}
	host, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("read the name of this host: %w", err)
	}
	// HOSTNAME is the name of the pod in pods without a host name of their own.
	options.Identity = cmp.Or(os.Getenv("HOSTNAME"), host)
	log.FromContext(ctx).Info("agent starts", "cluster", options.Namespace+"/"+options.Name, "version", command.Version(),
		"manifest", f.release)
	go ReduceMemory(ctx)
	return agent.Run(ctx, options)
}
