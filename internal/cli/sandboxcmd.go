package cli

import (
	"github.com/spf13/cobra"

	"github.com/towline/towline/internal/cli/command"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/sandbox"
)

// nameSandbox is the name of the command that the hub starts to expand templates.
const nameSandbox = "sandbox"

func newSandbox(streams command.Streams) *cobra.Command {
	return &cobra.Command{
		Use:    nameSandbox,
		Short:  "Expand templates for the hub that started this process",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return sandbox.Serve(render.SandboxFunctions(), cmd.InOrStdin(), streams.Out)
		},
	}
}

// sandboxCommand returns the command line of newSandbox, nil if the path of this program is not known.
func sandboxCommand(streams command.Streams) []string {
	if streams.Program == "" {
		return nil
	}
	return []string{streams.Program, nameSandbox}
}
