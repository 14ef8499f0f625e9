package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/agent"
)

// agentFlags are the flags of `agent`; their names are those of the original's manifest, which people patch.
type agentFlags struct {
	options     agent.Options
	clusterType string
	release     string
	log         logFlags
}

func newAgent(streams Streams) *cobra.Command {
	f := &agentFlags{}
	cmd := &cobra.Command{
		Use:   "agent --cluster-namespace=<namespace> --cluster-name=<name>",
		Short: "Run the agent of a cluster in pull mode; the manifest of a registration does this",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.validate(); err != nil {
				return err
			}
			ctx, err := f.log.start(cmd.Context(), streams.Err)
			if err != nil {
				return err
			}
			return f.run(ctx)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.options.Namespace, "cluster-namespace", "", "`namespace` of the cluster on the hub (required)")
	flags.StringVar(&f.options.Name, "cluster-name", "", "`name` of the cluster on the hub (required)")
	flags.StringVar(&f.clusterType, "cluster-type", "sveltos", "`kind` of the cluster object on the hub")
	flags.StringVar(&f.options.KubeconfigSecret, "secret-with-kubeconfig", "",
		"`name` of the Secret in namespace projectsveltos with the way to the hub (default <cluster-name>-sveltos-kubeconfig)")
	flags.StringVar(&f.options.DiagnosticsAddress, "diagnostics-address", ":8443", "`address` that serves /metrics over https; empty for none")
	flags.StringVar(&f.options.HealthAddress, "health-address", ":9440", "`address` that serves /healthz and /readyz over http; empty for none")
	flags.StringVar(&f.release, "version", "", "`release` that the manifest was made by; for the log only")
	f.log.add(flags)
	return cmd
}

func (f *agentFlags) validate() error {
	if f.options.Namespace == "" || f.options.Name == "" {
		return errors.New("--cluster-namespace and --cluster-name are required")
	}
	if !strings.EqualFold(f.clusterType, "sveltos") {
		return fmt.Errorf("--cluster-type: %q is not supported, only sveltos is", f.clusterType)
	}
	return nil
}

func (f *agentFlags) run(ctx context.Context) error {
	options := f.options
	var err error
	if options.Member, err = inCluster(); err != nil {
		return fmt.Errorf("find the cluster that the agent runs in: %w", err)
	}
	host, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("find the name of this host: %w", err)
	}
	// The name of the pod, where a pod has no host name of its own.
	options.Identity = cmp.Or(os.Getenv("HOSTNAME"), host)
	log.FromContext(ctx).Info("agent starts", "cluster", options.Namespace+"/"+options.Name, "version", Version(), "manifest", f.release)
	return agent.Run(ctx, options)
}
