package cli

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

func newVersion(streams Streams) *cobra.Command {
	output := ""
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if err := validateOutput(output); err != nil {
				return err
			}
			if output == outputJSON {
				return printJSON(streams.Out, map[string]string{"version": Version(), "go": runtime.Version()})
			}
			_, err := fmt.Fprintln(streams.Out, Version())
			return err
		},
	}
	addOutput(cmd.Flags(), &output)
	return cmd
}

// outputJSON is the only value of --output, and a value of --log-format.
const outputJSON = "json"

func addOutput(flags *pflag.FlagSet, output *string) {
	flags.StringVarP(output, "output", "o", "", "output `format`: json (default text)")
}

func validateOutput(output string) error {
	if output != "" && output != outputJSON {
		return fmt.Errorf("--output: %q is not supported, must be %s", output, outputJSON)
	}
	return nil
}

func printJSON(out io.Writer, value any) error {
	encoder := json.NewEncoder(out)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(value); err != nil {
		return fmt.Errorf("print JSON: %w", err)
	}
	return nil
}
