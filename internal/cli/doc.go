// Package cli turns arguments into calls of the packages above and errors into exit codes.
//
// cmd/towline calls Run, and nothing else does except tests. Run selects the root command by the name under which the
// program was called: sveltosctl and karmadactl (also kubectl-karmada, a plugin of kubectl) have the verbs of Sveltos's
// and Karmada's programs, manager and karmada-agent run the agents, and any other name has all commands, in groups. The
// containers of agents run cmd/towline-agent, which has only the commands of internal/cli/agents.
//
// A command is built in these steps:
//
//   - A function newX returns the cobra.Command with its texts and its flags. The flags are fields of a struct xFlags,
//     in sections of the help (command.AddSection).
//   - validate or complete checks the flags before the command connects to a cluster.
//   - run loads the kubeconfigs, makes one call of internal/join, internal/hub or an agent, and prints the result.
//
// Files:
//
//   - cli.go: Run and the root commands.
//   - register.go, register_pull.go, register_workload.go, deregister.go, generate.go, show.go (with addon.go and
//     table.go): the commands of sveltosctl.
//   - join.go, unjoin.go, token.go, register_endpoint.go, unregister.go: the commands of karmadactl.
//   - hubcmd.go, demo.go: the commands hub and demo. internal/cli/demo has the steps of the demo.
//   - kubeconfig.go: kubeconfigs of the sveltosctl commands and the hub. kubeconfigflags.go and contexts.go:
//     kubeconfigs of the karmadactl commands.
//   - progress.go: progress on standard error.
//
// The help needs no cluster. It is at most 100 columns wide: one line with the purpose of the command, a paragraph at
// most, examples, and flags with units and defaults. Details are in docs.
//
// Terms:
//
//   - Hub: the management cluster. Commands as in Karmada call it the control plane.
//   - Member: the cluster that is registered. Its kubeconfig is separate from the kubeconfig of the hub.
//   - Streams: the outputs of the program. Only data is written to Out, so that it can be piped into kubectl.
//   - Progress: lines on standard error about the current step of a command.
//   - Section: a group of flags in the help. `register cluster` also uses sections to find flags of the other mode.
//   - Interrupted: the context ends before the command does. The exit code is 130, also if the command then fails for
//     another reason.
//
// Invariants:
//
//   - The exit code is 0 only if the command has done everything. The last line on standard error is the error.
//   - Kubeconfig files are read and never written.
//   - Outputs and messages that Sveltos and Karmada document are the same here, byte for byte.
//
// internal/cli/command has the code that the commands of towline and towline-agent share. Start reading at Run in
// cli.go and at newRegisterCluster in register.go.
package cli
