package cli

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/kube"
)

// hubFlags are the flags of `hub`.
type hubFlags struct {
	options    hub.Options
	kubeconfig string
	agentsCA   string
	log        logFlags
}

// outdatedChartInterval is how often repositories are asked for newer charts: they are other people's servers, and nobody is in a hurry.
const outdatedChartInterval = time.Hour

func newHub(streams Streams) *cobra.Command {
	f := &hubFlags{}
	cmd := &cobra.Command{
		Use:   "hub",
		Short: "Run the hub: match clusters, render, deliver and report",
		Long: `Run the hub on the management cluster: the one of --kubeconfig, else of KUBECONFIG, else the one that this runs in, else that of
~/.kube/config. It runs until it is stopped.

Charts may make up values, such as passwords and certificates. --cache-dir keeps them: keep the directory, or such charts roll new values on
every member after the next start of the hub. It is readable for its owner only and should stay so. Hubs that may look after the same cluster
one after the other, replicas as well as shards, share it.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, err := f.log.start(cmd.Context(), streams.Err)
			if err != nil {
				return err
			}
			if err := f.validate(); err != nil {
				return err
			}
			config, err := hubConfig(f.kubeconfig)
			if err != nil {
				return err
			}
			if f.options.CacheDir == "" {
				if f.options.CacheDir, err = defaultCacheDir(config.Host); err != nil {
					return err
				}
			}
			log.FromContext(ctx).Info("hub starts", "server", config.Host, "version", Version())
			return runHub(ctx, config, f.options)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.kubeconfig, "kubeconfig", "", "`file` with the kubeconfig of the management cluster")
	flags.StringVar(&f.options.ShardKey, "shard-key", "",
		"look after the clusters with annotation sharding.projectsveltos.io/key=`key` only; the hub without a key looks after those without the annotation, and alone matches profiles, installs and registers")
	flags.BoolVar(&f.options.InstallCRDs, "install-crds", false,
		"install or upgrade the CustomResourceDefinitions first; not with --shard-key")
	flags.BoolVar(&f.options.RegisterSelf, "register-self", true, "register the management cluster itself as mgmt/mgmt; not with --shard-key")
	flags.BoolVar(&f.options.LeaderElection, "leader-elect", false, "let several hubs run, of which one per shard is active")
	flags.StringVar(&f.options.DiagnosticsAddress, "diagnostics-address", ":8443",
		"`address` that serves /metrics over https, to tokens that may get this URL of the management cluster; empty for none")
	flags.StringVar(&f.options.HealthAddress, "health-address", ":9440", "`address` that serves /healthz and /readyz over http; empty for none")
	flags.StringVar(&f.options.CacheDir, "cache-dir", "", "`directory` that keeps charts over restarts (default: towline/hub-<hash of the server> in the user's cache directory)")
	flags.StringVar(&f.options.ManagementClusterURL, "management-cluster-url", "", "https `address` under which agents reach the hub (default: what ConfigMap kube-public/cluster-info says, else the hub's own kubeconfig)")
	flags.StringVar(&f.agentsCA, "management-cluster-ca", "", "`file` with the certificate authority of that address, in PEM")
	flags.StringVar(&f.options.AgentImage, "agent-image", join.DefaultAgentImage, "container `image` of agents")
	flags.StringVar(&f.options.AgentPatchConfigMap, "agent-patch-config-map", "",
		"`namespace/name` of a ConfigMap with patches for the manifests of agents whose clusters name none with annotation "+libv1beta1.AgentConfigAnnotation+"; not with --shard-key")
	flags.DurationVar(&f.options.OutdatedChartInterval, "outdated-chart-interval", outdatedChartInterval,
		"`time` between two looks which deployed charts have a newer version in their repository, for the metrics; 0 for none")
	f.log.add(flags)
	return cmd
}

// validate says what is wrong with the flags.
func (f *hubFlags) validate() error {
	if f.options.OutdatedChartInterval < 0 {
		return fmt.Errorf("--outdated-chart-interval: %s is less than nothing", f.options.OutdatedChartInterval)
	}
	if f.options.ShardKey != "" && f.options.InstallCRDs {
		return errors.New("--install-crds is for the hub without --shard-key: the two exclude each other")
	}
	return f.readAgents()
}

// readAgents reads and checks what is said of agents: how they reach the hub, and how their manifests are patched.
func (f *hubFlags) readAgents() error {
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

// cacheHashLength is how many hexadecimal digits tell the caches of several hubs of one user apart.
const cacheHashLength = 12

// defaultCacheDir makes the directory that a hub on this server keeps its charts in: the same one at every start.
func defaultCacheDir(server string) (string, error) {
	base, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find a directory for the hub's cache; name one with --cache-dir: %w", err)
	}
	sum := sha256.Sum256([]byte(server))
	dir := filepath.Join(base, "towline", "hub-"+hex.EncodeToString(sum[:])[:cacheHashLength])
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("make the hub's cache; name another directory with --cache-dir: %w", err)
	}
	// One from before may have been made with other rights.
	if err := os.Chmod(dir, 0o700); err != nil {
		return "", fmt.Errorf("make the hub's cache private; name another directory with --cache-dir: %w", err)
	}
	return dir, nil
}

// runDemoHub runs the demo's hub in this process, with its log beside cacheDir.
func runDemoHub(ctx context.Context, kubeconfig, cacheDir string) error {
	file, err := os.OpenFile(filepath.Join(filepath.Dir(cacheDir), "hub.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("open the hub's log: %w", err)
	}
	// The log is for looking at; a last line that is lost harms nobody.
	defer func() { _ = file.Close() }()
	ctx, err = (&logFlags{format: logText}).start(ctx, file)
	if err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return fmt.Errorf("read the hub's kubeconfig: %w", err)
	}
	return runHub(ctx, config, hub.Options{InstallCRDs: true, RegisterSelf: true, CacheDir: cacheDir})
}

// runHub runs a hub. One without a shard key first limits the tokens that agents can request, and gets ready for clusters that register.
func runHub(ctx context.Context, config *rest.Config, options hub.Options) error {
	if !options.InstallCRDs {
		if err := checkInstalled(ctx, config); err != nil {
			return err
		}
	}
	if options.ShardKey == "" {
		if err := guard(ctx, config); err != nil {
			return err
		}
		if err := prepare(ctx, config, options); err != nil {
			return err
		}
	}
	options.Version = Version()
	return hub.Run(ctx, config, options)
}

// guard limits the tokens that agents can request for themselves, where the hub's Kubernetes can: since release 1.30.
func guard(ctx context.Context, config *rest.Config) error {
	err := join.Guard(ctx, config)
	if apierrors.IsNotFound(err) {
		log.FromContext(ctx).Info("this hub has no ValidatingAdmissionPolicies: the life of tokens that agents request is not bounded")
		return nil
	}
	return err
}

// prepare makes the hub ready for clusters that register with a token.
func prepare(ctx context.Context, config *rest.Config, options hub.Options) error {
	address, err := join.FindHubAddress(ctx, config, join.HubAddress{Server: options.ManagementClusterURL, CA: options.ManagementClusterCA})
	if err != nil && !errors.Is(err, join.ErrNoHubAddress) {
		return err
	}
	var last error
	err = wait.PollUntilContextTimeout(ctx, preparePause, prepareLimit, true, func(ctx context.Context) (bool, error) {
		last = bootstrap.Prepare(ctx, config, address)
		if apierrors.IsNotFound(last) {
			return false, nil // such as the namespaces of an API server that has just started
		}
		return true, last
	})
	if errors.Is(last, bootstrap.ErrUnguardable) {
		log.FromContext(ctx).Info("clusters cannot be registered in pull mode as in Karmada", "reason", last.Error())
		return nil
	}
	return cmp.Or(last, err)
}

// prepareLimit and preparePause bound and space the attempts to make the hub ready for clusters that register.
const (
	prepareLimit = time.Minute
	preparePause = time.Second
)

// checkInstalled says clearly that a hub does not know the kinds of Towline. Whatever else is wrong, the hub finds out when it works.
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
