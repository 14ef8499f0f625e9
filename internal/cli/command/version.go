package command

import (
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// version is set by the linker (see the Makefile). Nothing else writes it.
var version string

// Version returns the release of this program: from the linker, else from the Go toolchain, else "unknown".
func Version() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}

// NewVersion returns the command that prints the version.
func NewVersion(streams Streams) *cobra.Command {
	output := ""
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if err := ValidateOutput(output); err != nil {
				return err
			}
			if output == OutputJSON {
				return PrintJSON(streams.Out, map[string]string{"version": Version(), "go": runtime.Version()})
			}
			_, err := fmt.Fprintln(streams.Out, Version())
			return err
		},
	}
	AddOutput(cmd.Flags(), &output)
	return cmd
}

// OutputJSON is the only value of --output, and a value of --log-format.
const OutputJSON = "json"

// AddOutput adds the flag --output to flags.
func AddOutput(flags *pflag.FlagSet, output *string) {
	flags.StringVarP(output, "output", "o", "", "output `format`: json (default text)")
}

// ValidateOutput returns an error for a value of --output that is not supported.
func ValidateOutput(output string) error {
	if output != "" && output != OutputJSON {
		return fmt.Errorf("--output: %q is not supported, must be %s", output, OutputJSON)
	}
	return nil
}

// PrintJSON prints value as JSON with indentation.
func PrintJSON(out io.Writer, value any) error {
	encoder := json.NewEncoder(out)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(value); err != nil {
		return fmt.Errorf("print JSON: %w", err)
	}
	return nil
}
