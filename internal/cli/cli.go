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

// The names under which the program is called.
const (
	nameTowline    = "towline"
	nameSveltosctl = "sveltosctl"
	nameKarmadactl = "karmadactl"
	// nameKarmadaPlugin makes karmadactl a plugin of kubectl: users run "kubectl karmada".
	nameKarmadaPlugin = "kubectl-karmada"
	// nameManager is the command in the container of the agent of a SveltosCluster. It runs that agent.
	nameManager = "manager"
	// nameKarmadaAgent is the command in the container of the agent of a Cluster. It runs that agent.
	nameKarmadaAgent = "karmada-agent"
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
}

var errClosed = errors.New("standard output is closed and the result would be lost; redirect the output to a file")

// requireOpen returns an error if standard output is closed. Commands call it if their output cannot be printed again.
func (s Streams) requireOpen() error {
	if s.Closed {
		return errClosed
	}
	return nil
}

// printErr prints a line to Err. Errors of the write are ignored, since there is no other place to report them.
func (s Streams) printErr(format string, args ...any) {
	_, _ = fmt.Fprintf(s.Err, format+"\n", args...)
}

// Run runs the command in args and returns the exit code: 0 if the command succeeded, 130 if ctx ended before that,
// else 1. args[0] is the name under which the program was called.
func Run(ctx context.Context, args []string, streams Streams) int {
	name, rest := nameTowline, []string(nil)
	if len(args) > 0 {
		name, rest = filepath.Base(args[0]), args[1:]
	}
	if command, ok := agentCommands()[name]; ok && (len(rest) == 0 || strings.HasPrefix(rest[0], "-")) {
		rest = append([]string{command}, rest...)
	}
	root := New(name, streams) //nolint:contextcheck // commands get their context from ExecuteContext
	root.SetArgs(rest)
	if err := root.ExecuteContext(ctx); err != nil {
		if ctx.Err() != nil {
			streams.printErr("error: %s", interruptionMessage(err))
			return exitInterrupted
		}
		streams.printErr("error: %s", oneLine(err))
		return exitFailed
	}
	return 0
}

// interruptionMessage returns the message for a command that was interrupted and returned err.
func interruptionMessage(err error) string {
	text := oneLine(err)
	switch {
	case strings.HasPrefix(text, "interrupted while "):
		return text
	case errors.Is(err, context.Canceled):
		return "interrupted: " + join.Step(err)
	default:
		// The command failed for another reason after the interruption.
		return "interrupted: " + text
	}
}

func oneLine(err error) string {
	return strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' }), "; ")
}

// agentCommands maps the names of the program in the containers of agents to commands.
func agentCommands() map[string]string {
	return map[string]string{nameManager: "agent", nameKarmadaAgent: nameKarmadaAgent}
}

// New returns the root command for the name under which the program was called: the verbs of sveltosctl or of
// karmadactl under their names, and all commands under any other name. The command prints neither errors nor, after
// errors, its usage.
func New(name string, streams Streams) *cobra.Command {
	root := newRoot(name, streams)
	root.SilenceErrors, root.SilenceUsage = true, true
	root.SetOut(streams.Out)
	root.SetErr(streams.Err)
	root.SetUsageFunc(printUsage)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w; see %s --help", err, cmd.CommandPath())
	})
	return root
}

func newRoot(name string, streams Streams) *cobra.Command {
	switch name {
	case nameSveltosctl:
		return newSveltosctl(streams)
	case nameKarmadactl, nameKarmadaPlugin:
		return newKarmadactl(name, streams)
	default:
		return newTowline(streams)
	}
}

// newTowline returns the root command with all commands in groups.
func newTowline(streams Streams) *cobra.Command {
	root := newParent(nameTowline, "Manage a fleet of Kubernetes clusters from one hub")
	root.Long = `Manage a fleet of Kubernetes clusters from one hub. In push mode the hub connects to the cluster,
in pull mode an agent in the cluster connects to the hub. The hub is the cluster of the kubeconfig
in KUBECONFIG, else the cluster in which the command runs as a pod, else the cluster of
~/.kube/config. Karmada's commands have flags for the kubeconfig of the hub, which they call the
control plane.`
	addGroup(root, "registration", "Cluster Registration Commands:",
		newRegister(streams), newDeregister(streams), newGenerate(streams))
	addGroup(root, "karmada-registration", "Cluster Registration Commands as in Karmada:",
		newJoin(streams), newUnjoin(streams), newToken(streams), newUnregister(streams))
	addGroup(root, "inspection", "Inspection Commands:", newShow(streams))
	addGroup(root, "components", "Components (run in containers):",
		newHub(streams), newAgent(streams), newKarmadaAgent(streams))
	root.AddCommand(newDemo(streams), newVersion(streams))
	return root
}

// newSveltosctl returns the root command with the verbs of sveltosctl.
func newSveltosctl(streams Streams) *cobra.Command {
	root := newParent(nameSveltosctl, "Register clusters with the hub and show deployed add-ons",
		newRegisterSveltos(streams), newDeregister(streams), newGenerate(streams), newShow(streams), newVersion(streams))
	root.Long = `Register clusters with the hub and show deployed add-ons. The hub is the cluster of the kubeconfig
in KUBECONFIG, else the cluster in which the command runs as a pod, else the cluster of
~/.kube/config.`
	return root
}

// newKarmadactl returns the root command with the verbs of karmadactl, also for the plugin of kubectl.
func newKarmadactl(name string, streams Streams) *cobra.Command {
	root := newParent(name, "Register clusters with the control plane", newVersion(streams))
	root.Long = `Register clusters with the control plane, which Towline calls the hub, and remove them: in push
mode with join and unjoin, where the control plane connects to the cluster, and in pull mode with
token, register and unregister, where an agent in the cluster connects to the control plane.`
	if name == nameKarmadaPlugin {
		root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl karmada"}
	}
	addGroup(root, "registration", "Cluster Registration Commands:",
		newJoin(streams), newUnjoin(streams), newToken(streams), newRegisterEndpoint(streams), newUnregister(streams))
	return root
}

// addGroup adds commands to root. The help lists them under title.
func addGroup(root *cobra.Command, id, title string, commands ...*cobra.Command) {
	root.AddGroup(&cobra.Group{ID: id, Title: title})
	for _, command := range commands {
		command.GroupID = id
		root.AddCommand(command)
	}
}

// newParent returns a command that only has subcommands. Without a subcommand it prints its help; an unknown one is an
// error.
func newParent(use, short string, children ...*cobra.Command) *cobra.Command {
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
