package command

import (
	"github.com/spf13/cobra"

	"github.com/towline/towline/internal/sandbox"
)

// nameSandbox is the name of the command that NewSandbox returns.
const nameSandbox = "sandbox"

// NewSandbox returns the hidden command that runs functions for the process that started it (sandbox.Serve).
func NewSandbox(streams Streams, functions map[string]sandbox.Function) *cobra.Command {
	return &cobra.Command{
		Use:    nameSandbox,
		Short:  "Expand templates and run scripts for the process that started this one",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return sandbox.Serve(functions, cmd.InOrStdin(), streams.Out)
		},
	}
}

// SandboxCommand returns the command line of NewSandbox in this program, nil if the path of the program is not known.
func SandboxCommand(streams Streams) []string {
	if streams.Program == "" {
		return nil
	}
	return []string{streams.Program, nameSandbox}
}
