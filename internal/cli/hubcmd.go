package cli

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/check"
	"github.com/towline/towline/internal/cli/agents"
	"github.com/towline/towline/internal/cli/command"
	"github.com/towline/towline/internal/egress"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/sandbox"
)

// hubFlags are the flags of `hub`.
type hubFlags struct {
	options hub.Options
	// allowedHosts and deniedNetworks define options.Egress.
	allowedHosts   []string
	deniedNetworks []string
	kubeconfig     string
	agentsCA       string
	log            command.LogFlags
}

// outdatedChartInterval is the default interval of requests for newer charts. It is long, since the repositories
// belong to others and the result is for metrics only.
const outdatedChartInterval = time.Hour

func newHub(streams command.Streams) *cobra.Command {
	f := &hubFlags{}
	cmd := &cobra.Command{
		Use:   "hub",
		Short: "Run the hub: match, render and deliver profiles, and report their status",
		Long: `Run the hub on the management cluster, until it is stopped. Only fetched chart archives are on
disk, in --cache-dir: the hub fetches them again if the directory is lost. Everything else is in
the management cluster.`,
		Example: `  # install the CustomResourceDefinitions and run one hub
  towline hub --install-crds

  # run one of several replicas for the clusters of a shard
  towline hub --shard-key=blue --leader-elect`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, err := f.log.WithLogger(cmd.Context(), streams.Err)
			if err != nil {
				return err
			}
			if err := f.complete(); err != nil {
				return err
			}
			f.options.SandboxCommand = command.SandboxCommand(streams)
			return f.run(ctx)
		},
	}
	command.AddSection(cmd.Flags(), command.SectionHub, f.addHub)
	command.AddSection(cmd.Flags(), command.SectionAgent, f.addAgents)
	command.AddSection(cmd.Flags(), command.SectionEndpoints, func(flags *pflag.FlagSet) {
		command.AddEndpoints(flags, &f.options.DiagnosticsAddress, &f.options.HealthAddress)
	})
	command.AddSection(cmd.Flags(), command.SectionGlobal, f.log.Add)
	return cmd
}

// addHub adds the flags of the hub itself.
func (f *hubFlags) addHub(flags *pflag.FlagSet) {
	flags.StringVar(&f.kubeconfig, "kubeconfig", "", "`file` with the kubeconfig of the management cluster "+
		"(default KUBECONFIG, then the cluster of the pod, then ~/.kube/config)")
	flags.BoolVar(&f.options.InstallCRDs, "install-crds", false,
		"install or upgrade the CustomResourceDefinitions at the start; not with --shard-key")
	flags.BoolVar(&f.options.RegisterSelf, "register-self", true,
		"register the management cluster itself as mgmt/mgmt, and access it with the identity of the hub; "+
			"with --shard-key the hub does not register it")
	flags.StringVar(&f.options.ShardKey, "shard-key", "",
		"`key` of the shard: this hub handles only clusters with annotation sharding.projectsveltos.io/key=key; "+
			"a hub without a key handles the clusters without the annotation, and only this hub matches profiles and registers clusters")
	flags.BoolVar(&f.options.LeaderElection, "leader-elect", false,
		"elect a leader among the hubs with the same shard key; only the leader is active")
	flags.StringVar(&f.options.CacheDir, "cache-dir", "",
		"`directory` of fetched chart archives (default towline/hub-<hash of the server> in the user's cache directory)")
	flags.StringSliceVar(&f.allowedHosts, "allowed-hosts", nil,
		"`hosts` to which the hub may connect for charts, files, repositories and members; *.example.com stands for a domain "+
			"(default all)")
	flags.StringSliceVar(&f.deniedNetworks, "denied-networks", nil,
		"`networks`, such as 10.0.0.0/8, to which the hub never connects for them, in addition to link-local addresses, the "+
			"metadata services of clouds and, in a pod, loopback addresses; an empty list denies nothing at all")
	flags.StringSliceVar(&f.options.Identity.Namespaces, "workload-identity-namespaces", nil,
		"`namespaces` whose SveltosClusters may use the hub's cloud identity (spec.workloadIdentity); * for all (default none)")
	flags.StringSliceVar(&f.options.Identity.Hosts, "workload-identity-hosts", nil,
		"more `hosts` of API servers to which the hub sends tokens of its cloud identity, such as the private names and "+
			"addresses of clusters; *.example.com stands for a domain (default only the hosts of EKS and AKS, and the DNS names "+
			"and public addresses of GKE)")
	flags.DurationVar(&f.options.OutdatedChartInterval, "outdated-chart-interval", outdatedChartInterval,
		"interval of the search for newer versions of deployed charts, for the metrics; 0 to disable")
}

// addAgents adds the flags for the manifests of agents.
func (f *hubFlags) addAgents(flags *pflag.FlagSet) {
	flags.StringVar(&f.options.ManagementClusterURL, "management-cluster-url", "",
		"https `URL` at which agents connect to the hub "+
			"(default from ConfigMap kube-public/cluster-info, else from the kubeconfig of the hub)")
	flags.StringVar(&f.agentsCA, "management-cluster-ca", "",
		"`file` with the CA certificates of --management-cluster-url, in PEM (default from the same place as the URL)")
	flags.StringVar(&f.options.AgentImage, "agent-image", join.DefaultAgentImage, "container `image` of agents")
	flags.StringVar(&f.options.AgentPatchConfigMap, "agent-patch-config-map", "",
		"`namespace/name` of a ConfigMap with patches for the manifests of agents, "+
			"for clusters without a ConfigMap of their own; not with --shard-key")
}

func (f *hubFlags) run(ctx context.Context) error {
	config, err := currentConfig("hub", f.kubeconfig)
	if err != nil {
		return err
	}
	if f.options.CacheDir == "" {
		if f.options.CacheDir, err = defaultCacheDir(config.Host); err != nil {
			return err
		}
	}
	log.FromContext(ctx).Info("hub starts", "server", config.Host, "version", command.Version())
	go agents.ReduceMemory(ctx)
	return runHub(ctx, config, f.options)
}

// complete completes the options from the flags, and validates them.
func (f *hubFlags) complete() error {
	if f.options.OutdatedChartInterval < 0 {
		return fmt.Errorf("--outdated-chart-interval: %s must not be negative", f.options.OutdatedChartInterval)
	}
	if f.options.ShardKey != "" && f.options.InstallCRDs {
		return errors.New("--install-crds and --shard-key exclude each other; use --install-crds for the hub without a shard")
	}
	denied := f.deniedNetworks
	// The list is nil if the flag is not set. An empty list removes the defaults.
	if f.deniedNetworks == nil || len(f.deniedNetworks) > 0 {
		denied = append(egress.DefaultDenied(), denied...)
	}
	var err error
	if f.options.Egress, err = egress.New(f.allowedHosts, denied); err != nil {
		return fmt.Errorf("--allowed-hosts and --denied-networks: %w", err)
	}
	if err := f.options.Identity.Validate(); err != nil {
		return fmt.Errorf("--workload-identity-hosts: %w", err)
	}
	return f.loadAgentOptions()
}

// loadAgentOptions reads the file of --management-cluster-ca and validates the flags for the manifests of agents.
func (f *hubFlags) loadAgentOptions() error {
	if f.options.AgentPatchConfigMap != "" {
		if _, err := join.ParsePatchesReference(f.options.AgentPatchConfigMap); err != nil {
			return fmt.Errorf("--agent-patch-config-map: %w", err)
		}
	}
	if f.agentsCA != "" {
		ca, err := os.ReadFile(f.agentsCA)
		if err != nil {
			return fmt.Errorf("--management-cluster-ca: %w", err)
		}
		f.options.ManagementClusterCA = ca
	}
	return join.AgentOptions{HubURL: f.options.ManagementClusterURL, HubCA: string(f.options.ManagementClusterCA)}.Validate()
}

// cacheHashLength is the number of hexadecimal digits in the name of a cache directory.
const cacheHashLength = 12

// defaultCacheDir creates the cache directory for the hub of a server and returns its path. The path is the same at
// every start.
func defaultCacheDir(server string) (string, error) {
	base, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no cache directory for this user found; pass --cache-dir: %w", err)
	}
	sum := sha256.Sum256([]byte(server))
	dir := filepath.Join(base, "towline", "hub-"+hex.EncodeToString(sum[:])[:cacheHashLength])
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("create the cache directory; pass another one with --cache-dir: %w", err)
	}
	// An existing directory may have other permissions.
	if err := os.Chmod(dir, 0o700); err != nil {
		return "", fmt.Errorf("make the cache directory private; pass another one with --cache-dir: %w", err)
	}
	return dir, nil
}

// runDemoHub runs the hub of the demo in this process. Its log is a file in the parent directory of the cache.
func runDemoHub(ctx context.Context, kubeconfig string, options hub.Options) error {
	file, err := os.OpenFile(filepath.Join(filepath.Dir(options.CacheDir),
		"hub.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("open the hub's log: %w", err)
	}
	// The log is for users only: a last line may be lost.
	defer func() { _ = file.Close() }()
	ctx, err = (&command.LogFlags{Format: command.LogText}).WithLogger(ctx, file)
	if err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return fmt.Errorf("read the hub's kubeconfig: %w", err)
	}
	return runHub(ctx, config, options)
}

// runHub runs a hub. A hub without a shard key first creates the admission policies, and the objects for clusters that
// register with a bootstrap token.
func runHub(ctx context.Context, config *rest.Config, options hub.Options) error {
	interruptible := kube.Interruptible(ctx, config)
	if err := checkAdmissionPolicies(ctx, interruptible); err != nil {
		return err
	}
	if !options.InstallCRDs {
		if err := checkInstalled(ctx, interruptible); err != nil {
			return err
		}
	}
	if options.ShardKey == "" {
		if err := hub.EnsureAdmissionPolicies(ctx, interruptible); err != nil {
			return err
		}
		if err := ensureBootstrapObjects(ctx, interruptible, options); err != nil {
			return err
		}
		go refreshAdmissionPolicies(ctx, config)
	}
	options.Version = command.Version()
	return hub.Run(ctx, config, options)
}

// policyRefreshInterval is the interval between two updates of the admission policies. The policy for tokens lists the
// audiences of the API server. If an administrator changes the audiences, agents cannot renew their tokens, which
// expire after a day, until the policy is updated.
const policyRefreshInterval = 10 * time.Minute

// refreshAdmissionPolicies updates the policies until ctx ends.
func refreshAdmissionPolicies(ctx context.Context, config *rest.Config) {
	ticker := time.NewTicker(policyRefreshInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if err := hub.EnsureAdmissionPolicies(ctx, config); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "update the admission policies")
		}
	}
}

// ensureBootstrapObjects creates or updates the objects for clusters that register with a bootstrap token.
func ensureBootstrapObjects(ctx context.Context, config *rest.Config, options hub.Options) error {
	hubClient, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return fmt.Errorf("connect to the hub: %w", err)
	}
	address, err := join.FindHubAddress(ctx, hubClient, config, join.HubAddress{Server: options.ManagementClusterURL, CA: options.ManagementClusterCA})
	if err != nil && !errors.Is(err, join.ErrNoHubAddress) {
		return err
	}
	var lastErr error
	err = wait.PollUntilContextTimeout(ctx, ensureInterval, ensureTimeout, true, func(ctx context.Context) (bool, error) {
		lastErr = bootstrap.EnsureHubObjects(ctx, config, address)
		if apierrors.IsNotFound(lastErr) {
			return false, nil // an API server that has just started has no namespaces yet
		}
		return true, lastErr
	})
	// After a timeout, the error of the last attempt has the reason.
	return cmp.Or(lastErr, err)
}

// ensureInterval and ensureTimeout are the interval and the maximum duration of the attempts of ensureBootstrapObjects.
const (
	ensureTimeout  = time.Minute
	ensureInterval = time.Second
)

// checkAdmissionPolicies returns kube.ErrNoAdmissionPolicies if the API server does not support admission policies,
// which limit agents and the authors of ClusterSummaries.
func checkAdmissionPolicies(ctx context.Context, config *rest.Config) error {
	hubClient, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return fmt.Errorf("connect to the hub: %w", err)
	}
	return kube.CheckAdmissionPolicies(ctx, hubClient)
}

// checkInstalled returns join.ErrNotInstalled if the CustomResourceDefinitions of Towline are missing. It ignores other
// errors: hub.Run returns them later.
func checkInstalled(ctx context.Context, config *rest.Config) error {
	hubClient, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return fmt.Errorf("connect to the hub: %w", err)
	}
	if err := hubClient.List(ctx, &libv1beta1.SveltosClusterList{}, client.Limit(1)); meta.IsNoMatchError(err) {
		return join.ErrNotInstalled
	}
	return nil
}

// sandboxFunctions returns the functions that the hub, and agents in this program, run in child processes.
func sandboxFunctions() map[string]sandbox.Function {
	functions := render.SandboxFunctions()
	maps.Copy(functions, check.Functions())
	return functions
}
