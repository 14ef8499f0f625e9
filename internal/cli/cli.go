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
	nameKarmadactl = "karmadactl"
	// nameKarmadaPlugin is karmadactl as a plugin of kubectl: people type "kubectl karmada".
	nameKarmadaPlugin = "kubectl-karmada"
	// nameManager is the command in the agent's container, and means the agent.
	nameManager = "manager"
	// nameKarmadaAgent is the command in the container of the agent of a Cluster, and means that agent.
	nameKarmadaAgent = "karmada-agent"
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
// done, 130 if it was not when ctx ended, else 1.
func Run(ctx context.Context, args []string, streams Streams) int {
	name, rest := nameTowline, []string(nil)
	if len(args) > 0 {
		name, rest = filepath.Base(args[0]), args[1:]
	}
	if command, ok := agents()[name]; ok && (len(rest) == 0 || strings.HasPrefix(rest[0], "-")) {
		rest = append([]string{command}, rest...)
	}
	root := New(name, streams) //nolint:contextcheck // commands get theirs from ExecuteContext
	root.SetArgs(rest)
	if err := root.ExecuteContext(ctx); err != nil {
		if ctx.Err() != nil {
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
	if !errors.Is(err, context.Canceled) {
		// Something else went wrong as it ended.
		return "interrupted: " + oneLine(err)
	}
	return "interrupted: " + join.Step(err)
}

func oneLine(err error) string {
	return strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' }), "; ")
}

// agents are the names that mean one command, and that command.
func agents() map[string]string {
	return map[string]string{nameManager: "agent", nameKarmadaAgent: nameKarmadaAgent}
}

// New returns the command line under a name: the whole one, or under a name of karmadactl its part. It prints neither errors nor usage by itself.
func New(name string, streams Streams) *cobra.Command {
	root := newRoot(name, streams)
	root.SilenceErrors, root.SilenceUsage = true, true
	root.SetOut(streams.Out)
	root.SetErr(streams.Err)
	return root
}

func newRoot(name string, streams Streams) *cobra.Command {
	if name == nameKarmadactl || name == nameKarmadaPlugin {
		return newKarmadactl(name, streams)
	}
	if name != nameSveltosctl {
		name = nameTowline
	}
	root := parent(name, "Manage a fleet of Kubernetes clusters from one hub, by push and by pull",
		newRegister(streams),
		newDeregister(streams),
		newJoin(streams),
		newUnjoin(streams),
		newToken(streams),
		newUnregister(streams),
		newGenerate(streams),
		newShow(streams),
		newHub(streams),
		newAgent(streams),
		newKarmadaAgent(streams),
		newDemo(streams),
		newVersion(streams),
	)
	root.Long = `Towline manages a fleet of Kubernetes clusters from one hub, each in the mode that fits it: push (the hub dials the cluster) or pull (an
agent in the cluster dials the hub).

The hub is the cluster that KUBECONFIG points at; without it, the cluster that this runs in, or that of ~/.kube/config. The commands of
Karmada (join, unjoin, token, register <host:port> and unregister) have flags for that, and say how they find it.`
	return root
}

// newKarmadactl returns the command line of karmadactl, or of the plugin of kubectl.
func newKarmadactl(name string, streams Streams) *cobra.Command {
	root := parent(name, "Bring clusters into the fleet of a control plane, by push and by pull, and out of it", newVersion(streams))
	registration := &cobra.Group{ID: "registration", Title: "Cluster Registration Commands:"}
	root.AddGroup(registration)
	for _, command := range []*cobra.Command{newJoin(streams), newUnjoin(streams), newToken(streams), newRegisterEndpoint(streams), newUnregister(streams)} {
		command.GroupID = registration.ID
		root.AddCommand(command)
	}
	if name == nameKarmadaPlugin {
		root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl karmada"}
	}
	root.Long = `Bring clusters into the fleet of a control plane, which Towline calls the hub, and out of it: in push mode with join and unjoin, where the
control plane dials the cluster, and in pull mode with token, register and unregister, where an agent in the cluster dials the control plane.`
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
