package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/towline/towline/internal/cli/command"
	"github.com/towline/towline/internal/cli/demo"
	"github.com/towline/towline/internal/hub"
)

func newDemo(streams command.Streams) *cobra.Command {
	var exit bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Run a demo with a hub and two members on this machine",
		Long: `Run a demo with a hub and two members on this machine. The demo starts three temporary Kubernetes
control planes, registers one member in pull mode and one in push mode, deploys a chart and a
manifest to both with one profile each, and prints the result. It runs until Ctrl-C and then
deletes everything.`,
		Example: `  # run the demo and stop after it, for example in CI
  towline demo --exit`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return demo.Run(cmd.Context(), demo.Options{
				Exit: exit, Out: streams.Out, Err: streams.Err, RunHub: func(ctx context.Context, kubeconfig, cacheDir string) error {
					return runDemoHub(ctx, kubeconfig, hub.Options{InstallCRDs: true, RegisterSelf: true, CacheDir: cacheDir, SandboxCommand: command.SandboxCommand(streams)})
				},
			})
		},
	}
	cmd.Flags().BoolVar(&exit, "exit", false, "exit after the demo instead of waiting for Ctrl-C")
	return cmd
}
