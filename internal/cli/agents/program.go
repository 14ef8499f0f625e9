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

// Name is the name of the program that has only the agents.
const Name = "towline-agent"

// fullName is the name of the program that has all commands. It is in the same directory.
const fullName = "towline"

// ByName returns the command of an agent for a name under which the program is called without a command. The manifests
// of agents call it so: /manager and karmada-agent are names of the program in the image.
func ByName(name string) (cmd string, ok bool) {
	cmd, ok = map[string]string{"manager": "agent", "karmada-agent": "karmada-agent"}[name]
	return cmd, ok
}

// Run runs the agent in args and returns the exit code. args[0] is the name under which the program was called. If args
// name a command that this program does not have, Run replaces the process by the full program: the manifest of the hub
// calls /manager in the image, too.
func Run(ctx context.Context, args []string, streams command.Streams) int {
	name, rest := Name, []string(nil)
	if len(args) > 0 {
		name, rest = filepath.Base(args[0]), args[1:]
	}
	root := newProgram(streams) //nolint:contextcheck // commands get their context from command.Run
	if len(rest) > 0 && !strings.HasPrefix(rest[0], "-") && !hasCommand(root, rest[0]) {
		if err := execFull(rest); !errors.Is(err, fs.ErrNotExist) {
			streams.PrintErr("error: start %s: %v", fullName, err)
			return 1
		}
	}
	if cmd, ok := ByName(name); ok && (len(rest) == 0 || strings.HasPrefix(rest[0], "-")) {
		rest = append([]string{cmd}, rest...)
	}
	return command.Run(ctx, root, rest, streams)
}

func newProgram(streams command.Streams) *cobra.Command {
	root := command.NewParent(Name, "Run the agent of a cluster in pull mode", NewAgent(streams), NewKarmadaAgent(streams), command.NewVersion(streams),
		command.NewSandbox(streams, check.Functions()))
	root.CompletionOptions.DisableDefaultCmd = true
	command.Configure(root, streams)
	return root
}

func hasCommand(root *cobra.Command, name string) bool {
	return name == "help" || slices.ContainsFunc(root.Commands(), func(cmd *cobra.Command) bool { return cmd.Name() == name })
}

// execFull replaces this process by the full program with args. It returns only if that fails.
func execFull(args []string) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	program := filepath.Join(filepath.Dir(self), fullName)
	return syscall.Exec(program, append([]string{program}, args...), os.Environ()) //nolint:gosec // a program of the same installation
}
