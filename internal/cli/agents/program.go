package agents

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/towline/towline/internal/check"
	"github.com/towline/towline/internal/cli/command"
)

// ProgramName is the name of the program that has only the agents.
const ProgramName = "towline-agent"

// fullProgramName is the name of the program that has all commands. It is in the same directory.
const fullProgramName = "towline"

// CommandForProgram returns the command of an agent for the name under which a manifest calls the program: the image
// has the names /manager and karmada-agent for it, and the manifests pass flags without a command.
func CommandForProgram(name string) (cmd string, ok bool) {
	cmd, ok = map[string]string{"manager": "agent", "karmada-agent": "karmada-agent"}[name]
	return cmd, ok
}

// Run runs the agent in args and returns the exit code. args[0] is the name under which the program was called. If args
// has a command that this program does not have, Run replaces the process by the full program, if that is installed:
// the manifest of the hub calls /manager in the image, too.
func Run(ctx context.Context, args []string, streams command.Streams) int {
	name, rest := ProgramName, []string(nil)
	if len(args) > 0 {
		name, rest = filepath.Base(args[0]), args[1:]
	}
	root := newRoot(streams) //nolint:contextcheck // commands get their context from command.Run
	if len(rest) > 0 && !strings.HasPrefix(rest[0], "-") && !hasCommand(root, rest[0]) {
		if err := execFullProgram(rest); !errors.Is(err, fs.ErrNotExist) {
			streams.PrintErr("error: start %s: %v", fullProgramName, err)
			return 1
		}
	}
	if cmd, ok := CommandForProgram(name); ok && (len(rest) == 0 || strings.HasPrefix(rest[0], "-")) {
		rest = append([]string{cmd}, rest...)
	}
	return command.Run(ctx, root, rest, streams)
}

func newRoot(streams command.Streams) *cobra.Command {
	root := command.NewParent(ProgramName, "Run the agent of a cluster in pull mode", NewAgent(streams), NewKarmadaAgent(streams), command.NewVersion(streams),
		command.NewSandbox(streams, check.Functions()))
	root.CompletionOptions.DisableDefaultCmd = true
	command.Configure(root, streams)
	return root
}

func hasCommand(root *cobra.Command, name string) bool {
	return name == "help" || slices.ContainsFunc(root.Commands(), func(cmd *cobra.Command) bool { return cmd.Name() == name })
}

// execFullProgram replaces this process by the full program with args. It returns only if that fails.
func execFullProgram(args []string) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	program := filepath.Join(filepath.Dir(self), fullProgramName)
	return syscall.Exec(program, append([]string{program}, args...), os.Environ()) //nolint:gosec // a program of the same installation
}
