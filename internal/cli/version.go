package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version is written by the linker (see the Makefile) and by nobody else.
var version string

// Version returns the release of this program: what the build said, else what the Go toolchain noted, else "unknown".
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
		Short: "Print the version of this program",
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
	outputFlag(cmd, &output)
	return cmd
}

// outputJSON is the one value of --output.
const outputJSON = "json"

func outputFlag(cmd *cobra.Command, output *string) {
	cmd.Flags().StringVarP(output, "output", "o", "", "print as `json`")
}

func validateOutput(output string) error {
	if output != "" && output != outputJSON {
		return fmt.Errorf("--output: %q is not supported, only %s is", output, outputJSON)
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
