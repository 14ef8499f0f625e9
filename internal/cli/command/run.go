package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/towline/towline/internal/join"
)

// Exit codes of failures.
const (
	exitFailed      = 1
	exitInterrupted = 130 // 128 + SIGINT, as in shells
)

// Streams are the outputs of the program.
type Streams struct {
	Out io.Writer // data
	Err io.Writer // progress, notes, warnings, errors and logs
	// Closed reports that the program was started with a closed standard output. Out discards its data then.
	Closed bool
	// Program is the path of this program. Child processes with this program expand templates and run scripts
	// (NewSandbox). If Program is empty, this process does that itself.
	Program string
}

var errClosed = errors.New("standard output is closed and the result would be lost; redirect the output to a file")

// RequireOpen returns an error if standard output is closed. Commands call it if their output cannot be printed again.
func (s Streams) RequireOpen() error {
	if s.Closed {
		return errClosed
	}
	return nil
}

// PrintErr prints a line to Err. Errors of the write are ignored, since there is no other place to report them.
func (s Streams) PrintErr(format string, args ...any) {
	_, _ = fmt.Fprintf(s.Err, format+"\n", args...)
}

// Configure sets the outputs and the help of a root command. The command prints neither errors nor, after errors, its
// usage.
func Configure(root *cobra.Command, streams Streams) {
	root.SilenceErrors, root.SilenceUsage = true, true
	root.SetOut(streams.Out)
	root.SetErr(streams.Err)
	root.SetUsageFunc(printUsage)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w; see %s --help", err, cmd.CommandPath())
	})
}

// Run runs root with args, prints its error, and returns the exit code: 0 if the command succeeded, 130 if ctx ended
// before that, else 1.
func Run(ctx context.Context, root *cobra.Command, args []string, streams Streams) int {
	root.SetArgs(args)
	if err := root.ExecuteContext(ctx); err != nil {
		if ctx.Err() != nil {
			streams.PrintErr("error: %s", interruptionMessage(err))
			return exitInterrupted
		}
		streams.PrintErr("error: %s", oneLine(err))
		return exitFailed
	}
	return 0
}

// interruptionMessage returns the message for a command that was interrupted and returned err. Some errors of package
// join begin with "interrupted while" already. For the others, join.InterruptedStep returns the step without the error
// of the cancelled request.
func interruptionMessage(err error) string {
	text := oneLine(err)
	switch {
	case strings.HasPrefix(text, "interrupted while "):
		return text
	case errors.Is(err, context.Canceled):
		return "interrupted: " + join.InterruptedStep(err)
	default:
		// The command failed for another reason after the interruption.
		return "interrupted: " + text
	}
}

func oneLine(err error) string {
	return strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' }), "; ")
}

// AddGroup adds commands to root. The help lists them under title.
func AddGroup(root *cobra.Command, id, title string, commands ...*cobra.Command) {
	root.AddGroup(&cobra.Group{ID: id, Title: title})
	for _, command := range commands {
		command.GroupID = id
		root.AddCommand(command)
	}
}

// NewParent returns a command that only has subcommands. Without a subcommand it prints its help; an unknown one is an
// error.
func NewParent(use, short string, children ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use: use, Short: short,
		// By default cobra prints the help for an unknown subcommand and returns no error.
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("unknown command %q for %q", args[0], cmd.CommandPath())
			}
			return cmd.Help()
		},
	}
	cmd.AddCommand(children...)
	return cmd
}
