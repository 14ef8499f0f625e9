package cli

import (
	"context"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/towline/towline/internal/cli/agents"
	"github.com/towline/towline/internal/cli/command"
)

// The names under which the program is called.
const (
	nameTowline    = "towline"
	nameSveltosctl = "sveltosctl"
	nameKarmadactl = "karmadactl"
	// nameKarmadaPlugin makes karmadactl a plugin of kubectl: users run "kubectl karmada".
	nameKarmadaPlugin = "kubectl-karmada"
)

// Run runs the command in args and returns the exit code: 0 if the command succeeded, 130 if ctx ended before that,
// else 1. args[0] is the name under which the program was called.
func Run(ctx context.Context, args []string, streams command.Streams) int {
	name, rest := nameTowline, []string(nil)
	if len(args) > 0 {
		name, rest = filepath.Base(args[0]), args[1:]
	}
	if agent, ok := agents.CommandForProgram(name); ok && (len(rest) == 0 || strings.HasPrefix(rest[0], "-")) {
		rest = append([]string{agent}, rest...)
	}
	root := New(name, streams) //nolint:contextcheck // commands get their context from command.Run
	return command.Run(ctx, root, rest, streams)
}

// New returns the root command for the name under which the program was called: the verbs of sveltosctl or of
// karmadactl under their names, and all commands under any other name. The command prints neither errors nor, after
// errors, its usage.
func New(name string, streams command.Streams) *cobra.Command {
	root := newRoot(name, streams)
	command.Configure(root, streams)
	return root
}

func newRoot(name string, streams command.Streams) *cobra.Command {
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
func newTowline(streams command.Streams) *cobra.Command {
	root := command.NewParent(nameTowline, "Manage a fleet of Kubernetes clusters from one hub")
	root.Long = `Manage a fleet of Kubernetes clusters from one hub. In push mode the hub connects to the cluster,
in pull mode an agent in the cluster connects to the hub. The hub is the cluster of the kubeconfig
in KUBECONFIG, else the cluster in which the command runs as a pod, else the cluster of
~/.kube/config. Karmada's commands have flags for the kubeconfig of the hub, which they call the
control plane.`
	command.AddGroup(root, "registration", "Cluster Registration Commands:",
		newRegister(streams), newDeregister(streams), newGenerate(streams))
	command.AddGroup(root, "karmada-registration", "Cluster Registration Commands as in Karmada:",
		newJoin(streams), newUnjoin(streams), newToken(streams), newUnregister(streams))
	command.AddGroup(root, "inspection", "Inspection Commands:", newShow(streams))
	command.AddGroup(root, "components", "Components (run in containers):",
		newHub(streams), agents.NewAgent(streams), agents.NewKarmadaAgent(streams))
	root.AddCommand(newDemo(streams), command.NewVersion(streams), command.NewSandbox(streams, sandboxFunctions()))
	return root
}

// newSveltosctl returns the root command with the verbs of sveltosctl.
func newSveltosctl(streams command.Streams) *cobra.Command {
	root := command.NewParent(nameSveltosctl, "Register clusters with the hub and show deployed add-ons",
		newRegisterSveltos(streams), newDeregister(streams), newGenerate(streams), newShow(streams), command.NewVersion(streams))
	root.Long = `Register clusters with the hub and show deployed add-ons. The hub is the cluster of the kubeconfig
in KUBECONFIG, else the cluster in which the command runs as a pod, else the cluster of
~/.kube/config.`
	return root
}

// newKarmadactl returns the root command with the verbs of karmadactl, also for the plugin of kubectl.
func newKarmadactl(name string, streams command.Streams) *cobra.Command {
	root := command.NewParent(name, "Register clusters with the control plane", command.NewVersion(streams))
	root.Long = `Register clusters with the control plane, which Towline calls the hub, and remove them: in push
mode with join and unjoin, where the control plane connects to the cluster, and in pull mode with
token, register and unregister, where an agent in the cluster connects to the control plane.`
	if name == nameKarmadaPlugin {
		root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl karmada"}
	}
	command.AddGroup(root, "registration", "Cluster Registration Commands:",
		newJoin(streams), newUnjoin(streams), newToken(streams), newRegisterEndpoint(streams), newUnregister(streams))
	return root
}
