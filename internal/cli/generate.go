package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/cli/command"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

func newGenerate(streams command.Streams) *cobra.Command {
	return command.NewParent("generate", "Generate kubeconfigs", newGenerateKubeconfig(streams))
}

// generateFlags are the flags of `generate kubeconfig`.
type generateFlags struct {
	request join.GenerateRequest
	context string
	verbose bool
}

func newGenerateKubeconfig(streams command.Streams) *cobra.Command {
	f := &generateFlags{}
	cmd := &cobra.Command{
		Use:   "kubeconfig",
		Short: "Print a kubeconfig with a token of a ServiceAccount",
		Long: `Print a kubeconfig with a token of a ServiceAccount in the cluster that KUBECONFIG points at, or in
the cluster of --context. The kubeconfig refers to no files and can be used to register the cluster
in push mode. If the command fails, it deletes the objects that --create has created.`,
		Example: `  # print a kubeconfig that registers a cluster in push mode
  sveltosctl generate kubeconfig --context=aks-admin --create --expirationSeconds=86400 > aks.yaml`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := errors.Join(f.request.Validate(), streams.RequireOpen()); err != nil {
				return err
			}
			return f.run(cmd.Context(), streams)
		},
	}
	command.AddSection(cmd.Flags(), command.SectionOther, f.add)
	command.AddSection(cmd.Flags(), command.SectionGlobal, func(flags *pflag.FlagSet) { addVerbose(flags, &f.verbose) })
	return cmd
}

func (f *generateFlags) add(flags *pflag.FlagSet) {
	r := &f.request
	flags.StringVar(&f.context, "context", "", "`context` of the cluster in KUBECONFIG (default the current context)")
	flags.StringVar(&r.Namespace, "namespace", "", "`namespace` of the ServiceAccount (default projectsveltos)")
	flags.StringVar(&r.ServiceAccount, "serviceaccount", "", "`name` of the ServiceAccount (default projectsveltos)")
	flags.BoolVar(&r.Create, "create", false,
		"create the namespace, the ServiceAccount and its cluster-admin permissions if they do not exist")
	flags.Int64Var(&r.ExpirationSeconds, "expirationSeconds", 0,
		"lifetime of the token in `seconds`, at least 600 (default set by the cluster)")
	flags.BoolVar(&r.ServiceAccountToken, "service-account-token", false,
		"use a token that does not expire, from a Secret, instead of a token that expires")
}

func (f *generateFlags) run(ctx context.Context, streams command.Streams) error {
	config, err := f.config()
	if err != nil {
		return err
	}
	if f.verbose {
		streams.PrintErr("generating a kubeconfig for %s", config.Host)
	}
	defer startProgress(streams, "generating a kubeconfig for "+config.Host).stop()
	kubeconfig, err := join.GenerateKubeconfig(ctx, kube.Interruptible(ctx, config), f.request)
	if err != nil {
		return err
	}
	if _, err := streams.Out.Write(kubeconfig); err != nil {
		return fmt.Errorf("print the kubeconfig: %w", err)
	}
	return nil
}

// config returns the config of the cluster of --context, or of the current context.
func (f *generateFlags) config() (*rest.Config, error) {
	if f.context == "" {
		return currentConfig("cluster", "")
	}
	config, err := contextConfig(f.context)
	if err != nil {
		return nil, fmt.Errorf("--context: %w", err)
	}
	return config, nil
}
