package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/join/register"
)

// endpointFlags are the flags of `register <host:port>`.
type endpointFlags struct {
	// member is the cluster that registers: the flags of this command mean it, and not the control plane.
	member    whereabouts
	verbosity int
	// life is that of the agent's certificate, in seconds.
	life    int32
	request register.Request
}

// newRegisterEndpoint is `register <host:port>`, which runs where the kubeconfig of the cluster is.
func newRegisterEndpoint(streams Streams) *cobra.Command {
	f := &endpointFlags{}
	cmd := &cobra.Command{
		Use:     "register <host:port> --token <token> --discovery-token-ca-cert-hash <hash>",
		Short:   "Bring a cluster into the fleet in pull mode, as a Cluster of Karmada",
		Long:    registerEndpointHelp,
		Example: registerEndpointExample,
		Args:    cobra.ArbitraryArgs,
		RunE:    f.command(streams),
	}
	f.add(cmd.Flags())
	return cmd
}

const registerEndpointHelp = `Bring a cluster into the fleet in pull mode, as a Cluster of Karmada: an agent in the cluster dials the control plane. Run it where the kubeconfig
of the cluster is; the address, the token and the hash are those that token create --print-register-command prints on the side of the control plane.

The command makes sure that it talks to the control plane which has the token, and which the hash names; gets a certificate for the agent; starts the agent in the
cluster; and waits until the control plane says that the cluster is ready. What fails is taken back, on both sides.

The cluster is the one of --kubeconfig and --context; without them, of KUBECONFIG or ~/.kube/config and its current context. Its name is --cluster-name, else
that of the cluster of the current context.`

const registerEndpointExample = `  karmadactl register 10.10.1.2:32443 --token t2jgtm.9nybj0526mjw1jbf \
      --discovery-token-ca-cert-hash sha256:f5a5a43869bb44577dba582e794c3e3750f2050d62f1b1dc80fd3d6a371b6ed4

  # under another name, with an agent image of one's own
  karmadactl register 10.10.1.2:32443 --token ... --discovery-token-ca-cert-hash ... --cluster-name=member3 \
      --karmada-agent-image=registry.example.com/towline:v1

  # only look whether it could be done
  karmadactl register 10.10.1.2:32443 --token ... --discovery-token-ca-cert-hash ... --dry-run`

func (f *endpointFlags) add(flags *pflag.FlagSet) {
	f.member.fileFlag = "kubeconfig"
	r := &f.request
	flags.StringVar(&f.member.file, "kubeconfig", "", "`file` with the kubeconfig of the cluster that registers (default: KUBECONFIG, then ~/.kube/config)")
	flags.StringVar(&f.member.context, "context", "", "`context` of the cluster in that kubeconfig (default: the current one)")
	flags.StringVarP(&r.Namespace, "namespace", "n", register.DefaultNamespace, "`namespace` of the agent, on the cluster")
	flags.StringVar(&r.ClusterName, "cluster-name", "", "`name` under which the cluster registers (default: the cluster of the kubeconfig's current context)")
	flags.StringVar(&r.ClusterNamespace, "cluster-namespace", fleet.DefaultClusterNamespace, "`namespace` on the cluster for what belongs to its registration")
	addPlacement(flags, &r.Provider, &r.Region, &r.Zones)
	flags.BoolVar(&r.EnableCertRotation, "enable-cert-rotation", true, "let the agent renew its certificate")
	flags.StringVar(&r.Token, "token", "", "`token` that token create printed (required)")
	flags.StringSliceVar(&r.Pins, "discovery-token-ca-cert-hash", nil, "`hash` of the control plane's certificate authority, as sha256:<hex>; repeatable")
	flags.BoolVar(&r.UnsafeSkipCA, "discovery-token-unsafe-skip-ca-verification", false, "trust whoever knows the token to be the control plane, without a hash")
	flags.DurationVar(&r.DiscoveryTimeout, "discovery-timeout", register.DefaultDiscoveryTimeout, "how long each of these may take: to find the control plane, to get the certificate, and to become ready")
	flags.StringVar(&r.Image, "karmada-agent-image", join.DefaultAgentImage, "container `image` of the agent")
	flags.Int32Var(&r.Replicas, "karmada-agent-replicas", 1, "`number` of agents, of which one is active")
	flags.Int32Var(&f.life, "cert-expiration-seconds", int32(register.DefaultCertLife/time.Second), "`seconds` that the agent's certificate lives")
	flags.StringVar(&r.ProxyServerAddress, "proxy-server-address", "", "`address` of a proxy through which the control plane could reach the cluster, for its Cluster")
	flags.BoolVar(&r.Renew, "renew", false, "give the agent of a registered cluster a new certificate, with a token that was made for that")
	flags.BoolVar(&r.DryRun, "dry-run", false, "run the pre-flight checks, and change nothing")
	addVerbosity(flags, &f.verbosity)
}

func (f *endpointFlags) command(streams Streams) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		if err := f.validate(args); err != nil {
			return err
		}
		return f.run(withVerbosity(cmd.Context(), f.verbosity, streams), streams)
	}
}

// validate says what is wrong with the arguments before anything connects.
func (f *endpointFlags) validate(args []string) error {
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
	r.CertLife = time.Duration(f.life) * time.Second
	return nil
}

func (f *endpointFlags) run(ctx context.Context, streams Streams) error {
	r := f.request
	loaded, err := f.member.load()
	if err != nil {
		return err
	}
	if r.ClusterName == "" {
		if r.ClusterName, err = register.DefaultClusterName(&loaded); err != nil {
			return err
		}
	}
	if r.Member, err = f.member.config(loaded, f.member.context); err != nil {
		return err
	}
	doing := startTalk(streams, "registering cluster "+r.ClusterName)
	defer doing.done()
	r.Progress = doing.line
	var lost error
	r.Out = func(line string) {
		if _, err := fmt.Fprintln(streams.Out, line); err != nil {
			lost = err
		}
	}
	err = register.Register(ctx, r)
	var refused *register.PreflightError
	if errors.As(err, &refused) {
		// People know these lines.
		streams.say("%s", refused)
		return errors.New("the pre-flight checks were not passed, and nothing was changed")
	}
	return errors.Join(err, lost)
}
