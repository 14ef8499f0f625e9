package cli

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"github.com/towline/towline/internal/cli/demo"
)

func newDemo(streams Streams) *cobra.Command {
	var exit bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Start a hub and two members on this machine and show the main job",
		Long: `Start three throw-away Kubernetes control planes on this machine, one hub and two members, register the members (one in pull and
one in push mode), deploy a chart and a manifest to both with one profile each, and print what there is to see.
Nothing outside a temporary directory is touched. It stays until Ctrl-C.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := demo.Run(cmd.Context(), demo.Options{
				Exit: exit, Out: streams.Out, Err: streams.Err, RunHub: runDemoHub,
			})
			if errors.Is(err, context.Canceled) && cmd.Context().Err() != nil {
				return context.Canceled
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&exit, "exit", false, "end after success instead of staying until Ctrl-C; a failure exits with an error")
	return cmd
}
