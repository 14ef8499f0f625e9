package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/towline/towline/internal/join"
)

// The names that the program answers to, besides towline.
const (
	nameTowline    = "towline"
	nameSveltosctl = "sveltosctl"
	// nameManager is the command in the agent's container, and means the agent.
	nameManager = "manager"
)

// Exit codes of failures.
const (
	exitFailed      = 1
	exitInterrupted = 130 // 128 + SIGINT, as shells count
)

// Streams are where data and talk go.
type Streams struct {
	Out io.Writer // data
	Err io.Writer // talk: progress and errors
	// Closed says that Out leads nowhere since the program was started with a closed standard output.
	Closed bool
}

// errClosed says that what a command prints would be lost.
var errClosed = errors.New("standard output is closed, and what is printed there would be lost; send it into a file")

// open refuses a closed standard output: for commands whose output cannot be had again.
func (s Streams) open() error {
	if s.Closed {
		return errClosed
	}
	return nil
}

// say prints a line of talk. There is nobody to tell that it cannot be printed.
func (s Streams) say(format string, args ...any) { _, _ = fmt.Fprintf(s.Err, format+"\n", args...) }

// Run does what args ask for, args[0] being the name that the program was called by, and returns the exit code: 0 only if everything was
// done, 130 if ctx ended it, else 1.
func Run(ctx context.Context, args []string, streams Streams) int {
	name, rest := nameTowline, []string(nil)
	if len(args) > 0 {
		name, rest = filepath.Base(args[0]), args[1:]
	}
	if name == nameManager && (len(rest) == 0 || strings.HasPrefix(rest[0], "-")) {
		rest = append([]string{"agent"}, rest...)
	}
	root := New(name, streams) //nolint:contextcheck // commands get theirs from ExecuteContext
	root.SetArgs(rest)
	if err := root.ExecuteContext(ctx); err != nil {
		if ctx.Err() != nil && errors.Is(err, context.Canceled) {
			streams.say("error: %s", interruption(err))
			return exitInterrupted
		}
		streams.say("error: %s", oneLine(err))
		return exitFailed
	}
	return 0
}

// interruption says what was interrupted.
func interruption(err error) string {
	if text := oneLine(err); strings.HasPrefix(text, "interrupted while ") {
		return text
	}
	return "interrupted: " + join.Step(err)
}

func oneLine(err error) string {
	return strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' }), "; ")
}

// New returns the whole command line under a name. It prints neither errors nor usage by itself.
func New(name string, streams Streams) *cobra.Command {
	if name != nameSveltosctl {
		name = nameTowline
	}
	root := parent(name, "Manage a fleet of Kubernetes clusters from one hub, by push and by pull",
		newRegister(streams),
		newDeregister(streams),
		newGenerate(streams),
		newShow(streams),
		newHub(streams),
		newAgent(streams),
		newDemo(streams),
		newVersion(streams),
	)
	root.Long = `Towline manages a fleet of Kubernetes clusters from one hub, each in the mode that fits it: push (the hub dials the cluster) or pull (an
agent in the cluster dials the hub).

The hub is the cluster that KUBECONFIG points at; without it, the cluster that this runs in, or that of ~/.kube/config.`
	root.SilenceErrors, root.SilenceUsage = true, true
	root.SetOut(streams.Out)
	root.SetErr(streams.Err)
	return root
}

// parent is a command that only groups others: without one of them it prints its help, and an unknown one is an error.
func parent(use, short string, children ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use: use, Short: short,
		// Cobra itself takes an unknown command for a call for help, and succeeds.
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
