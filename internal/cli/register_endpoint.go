package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/towline/towline/internal/cli/command"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/join/register"
)

// endpointFlags are the flags of `register <host:port>`.
type endpointFlags struct {
	// member has the flags for the cluster that registers. The command has no kubeconfig of the control plane.
	member      kubeconfigFlags
	verbosity   int
	certSeconds int32
	request     register.Request
}

// newRegisterEndpoint returns `register <host:port>`, which runs with the kubeconfig of the cluster.
func newRegisterEndpoint(streams command.Streams) *cobra.Command {
	f := &endpointFlags{}
	cmd := &cobra.Command{
		Use:   "register <host:port> --token <token> --discovery-token-ca-cert-hash <hash>",
		Short: "Register a cluster with the control plane in pull mode",
		Long: `Register a cluster with the control plane in pull mode, as a Cluster of Karmada. The command needs
the kubeconfig of the cluster only. To print its arguments, run token create
--print-register-command with the kubeconfig of the control plane. The command verifies the control
plane by the token and the hash, requests a certificate for the agent, creates the agent in the
cluster, and waits until the cluster is ready. If it fails or is interrupted, it undoes its changes
on both sides.`,
		Example: `  karmadactl register 10.10.1.2:32443 --token t2jgtm.9nybj0526mjw1jbf \
      --discovery-token-ca-cert-hash \
      sha256:f5a5a43869bb44577dba582e794c3e3750f2050d62f1b1dc80fd3d6a371b6ed4

  # register the cluster with another name and another image of the agent
  karmadactl register 10.10.1.2:32443 --token ... --discovery-token-ca-cert-hash ... \
      --cluster-name=member3 --karmada-agent-image=registry.example.com/towline:v1

  # run the pre-flight checks only
  karmadactl register 10.10.1.2:32443 --token ... --discovery-token-ca-cert-hash ... --dry-run`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.complete(args); err != nil {
				return err
			}
			if err := f.checkRenewal(cmd.Flags()); err != nil {
				return err
			}
			return f.run(withVerbosity(cmd.Context(), f.verbosity, streams), streams)
		},
	}
	command.AddSection(cmd.Flags(), command.SectionControlPlane, f.addControlPlane)
	command.AddSection(cmd.Flags(), command.SectionCluster, f.addCluster)
	command.AddSection(cmd.Flags(), command.SectionAgent, f.addAgent)
	command.AddSection(cmd.Flags(), command.SectionOther, func(flags *pflag.FlagSet) { addDryRun(flags, &f.request.DryRun) })
	command.AddSection(cmd.Flags(), command.SectionGlobal, func(flags *pflag.FlagSet) { addVerbosity(flags, &f.verbosity) })
	return cmd
}

// addControlPlane adds the flags for the verification of the control plane.
func (f *endpointFlags) addControlPlane(flags *pflag.FlagSet) {
	r := &f.request
	flags.StringVar(&r.Token, "token", "", "`token` from token create (required)")
	flags.StringSliceVar(&r.Pins, "discovery-token-ca-cert-hash", nil,
		"`hash` of a CA certificate of the control plane, as sha256:<hex>; repeatable")
	flags.BoolVar(&r.UnsafeSkipCA, "discovery-token-unsafe-skip-ca-verification", false,
		"trust any control plane that knows the token, without the verification of a hash")
	flags.DurationVar(&r.DiscoveryTimeout, "discovery-timeout", register.DefaultDiscoveryTimeout,
		"timeout of each of these steps: discovery of the control plane, certificate, readiness")
}

// addCluster adds the flags for the cluster.
func (f *endpointFlags) addCluster(flags *pflag.FlagSet) {
	f.member.fileFlag = "kubeconfig"
	r := &f.request
	flags.StringVar(&f.member.file, "kubeconfig", "",
		"`file` with the kubeconfig of the cluster (default KUBECONFIG, then ~/.kube/config)")
	flags.StringVar(&f.member.context, "context", "",
		"`context` of the cluster in that kubeconfig (default the current context)")
	flags.StringVar(&r.ClusterName, "cluster-name", "",
		"`name` of the Cluster (default the cluster of the current context in that kubeconfig)")
	flags.StringVar(&r.ClusterNamespace, "cluster-namespace", fleet.DefaultClusterNamespace,
		"`namespace` on the cluster for the objects of the registration")
	addLocation(flags, &r.Provider, &r.Region, &r.Zones)
	flags.StringVar(&r.ProxyServerAddress, "proxy-server-address", "",
		"`address` of a proxy between the control plane and the cluster, recorded in the Cluster")
}

// addAgent adds the flags for the agent.
func (f *endpointFlags) addAgent(flags *pflag.FlagSet) {
	r := &f.request
	flags.StringVarP(&r.Namespace, "namespace", "n", register.DefaultNamespace,
		"`namespace` of the agent on the cluster")
	flags.StringVar(&r.Image, "karmada-agent-image", join.DefaultAgentImage, "container `image` of the agent")
	flags.Int32Var(&r.Replicas, "karmada-agent-replicas", 1, "`number` of agents, one of which is active")
	flags.BoolVar(&r.EnableCertRotation, "enable-cert-rotation", true, "let the agent renew its certificate")
	flags.Int32Var(&f.certSeconds, "cert-expiration-seconds", int32(bootstrap.MaxLife/time.Second),
		"lifetime of the agent's certificate in `seconds`")
	flags.BoolVar(&r.Renew, "renew", false,
		"create a new certificate for the agent of a registered cluster, which keeps its options; "+
			"needs a token of token create --cluster-name")
}

// checkRenewal returns an error for a flag for an option of the agent together with --renew, which keeps the options.
func (f *endpointFlags) checkRenewal(flags *pflag.FlagSet) error {
	for _, name := range []string{
		"cluster-namespace", "cluster-provider", "cluster-region", "cluster-zones", "proxy-server-address",
		"karmada-agent-image", "karmada-agent-replicas", "enable-cert-rotation",
	} {
		if f.request.Renew && flags.Changed(name) {
			return fmt.Errorf("--%s: --renew replaces only the certificate, and the agent keeps its options", name)
		}
	}
	return nil
}

// complete completes the request from the arguments and flags, and validates it. It does not connect to a cluster.
func (f *endpointFlags) complete(args []string) error {
	r := &f.request
	if len(args) != 1 {
		return fmt.Errorf("exactly one argument is allowed, the address of the control plane as <host:port>; got %d", len(args))
	}
	r.Endpoint = args[0]
	switch {
	case r.Token == "":
		return errors.New("token is required")
	case len(r.Pins) == 0 && !r.UnsafeSkipCA:
		return errors.New("need to verify CACertHashes, or set --discovery-token-unsafe-skip-ca-verification=true")
	case r.DiscoveryTimeout <= 0:
		return fmt.Errorf("--discovery-timeout: %s is not a positive duration", r.DiscoveryTimeout)
	case r.Replicas < 1:
		return fmt.Errorf("--karmada-agent-replicas: %d is less than 1", r.Replicas)
	}
	if r.ClusterName != "" {
		if err := karmada.ValidateName(r.ClusterName); err != nil {
			return fmt.Errorf("--cluster-name: %w", err)
		}
	}
	r.CertLifetime = time.Duration(f.certSeconds) * time.Second
	return nil
}

func (f *endpointFlags) run(ctx context.Context, streams command.Streams) error {
	r := f.request
	loaded, err := f.member.load()
	if err != nil {
		return err
	}
	if r.ClusterName == "" {
		if r.ClusterName, err = defaultClusterName(&loaded); err != nil {
			return err
		}
	}
	if r.Member, err = f.member.config(loaded, f.member.context); err != nil {
		return err
	}
	progress := startProgress(streams, "registering cluster "+r.ClusterName)
	defer progress.stop()
	r.Progress = progress.printLine
	var printErr error
	r.Out = func(line string) {
		if _, err := fmt.Fprintln(streams.Out, line); err != nil {
			printErr = err
		}
	}
	err = register.Register(ctx, r)
	var preflightErr *register.PreflightError
	if errors.As(err, &preflightErr) {
		// Karmada prints these lines.
		streams.PrintErr("%s", preflightErr)
		return errors.New("the pre-flight checks failed; nothing was changed")
	}
	return errors.Join(err, printErr)
}
