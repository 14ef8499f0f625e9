package hub

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/log"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/egress"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/fleet/identity"
	"github.com/towline/towline/internal/hub/outdated"
	"github.com/towline/towline/internal/hub/profiles"
	"github.com/towline/towline/internal/hub/resources"
	"github.com/towline/towline/internal/hub/rolerequests"
	"github.com/towline/towline/internal/hub/shards"
	"github.com/towline/towline/internal/hub/summaries"
	"github.com/towline/towline/internal/hub/sveltosclusters"
	"github.com/towline/towline/internal/hub/unclaimed"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/sandbox"
	"github.com/towline/towline/internal/source"
	"github.com/towline/towline/internal/status"
)

const (
	// reportingController is the reportingController field of events.
	reportingController = "towline-hub"
	// requestTimeout is the timeout of a request to the hub's API server; it is the default timeout of the API server.
	requestTimeout = time.Minute
	// pushRecheck is the delay until a bundle with outdated Helm releases is rendered again for a push member. For a pull
	// member the report of the agent triggers it.
	pushRecheck = 2 * time.Second
)

// Options configures a hub.
type Options struct {
	// ShardKey selects the clusters of this hub: the clusters with this value of the annotation
	// sharding.projectsveltos.io/key. Empty: the default shard, with all clusters without the annotation. Only the hub
	// of the default shard matches profiles, installs CRDs and registers itself.
	ShardKey string
	// HealthAddress is the address for /healthz and /readyz over HTTP, without authentication. DiagnosticsAddress is the
	// address for /metrics and /debug/pprof/ over HTTPS; clients need RBAC permission to get these non-resource URLs on
	// the hub. Empty: not served.
	HealthAddress      string
	DiagnosticsAddress string
	// CacheDir is a persistent directory for downloaded charts. Empty: a temporary directory.
	CacheDir string
	// InstallCRDs installs or upgrades the CRDs of Towline at startup.
	InstallCRDs bool
	// RegisterSelf creates the SveltosCluster mgmt/mgmt for the hub itself if it does not exist. This member needs no
	// kubeconfig. If RegisterSelf is false, mgmt/mgmt needs a kubeconfig like every other SveltosCluster.
	RegisterSelf bool
	// LeaderElection lets only one hub per shard run its controllers. It is required if a shard can have two hubs.
	LeaderElection bool
	// Transports has the transport for each mode; tests set it. Default: deliver.PushTransport and deliver.PullTransport.
	Transports map[fleet.Mode]deliver.Transport
	// ManagementClusterURL is the https address of the hub for agents. Empty: the address in the ConfigMap
	// kube-public/cluster-info, or else in the hub's kubeconfig unless it is a cluster-internal address.
	ManagementClusterURL string
	// ManagementClusterCA is the certificate authority for that address, in PEM. Empty: the authority from the source
	// of the default address.
	ManagementClusterCA []byte
	// AgentImage is the container image of agents. Default: join.DefaultAgentImage.
	AgentImage string
	// AgentPatchConfigMap is <namespace>/<name> of a ConfigMap with patches for agents' manifests. It is used for clusters
	// that name no ConfigMap of their own. The hub of the default shard publishes the name for all clients that create
	// manifests. Empty: none.
	AgentPatchConfigMap string
	// OutdatedChartInterval is the interval between two checks for newer versions of deployed charts. 0: no checks.
	OutdatedChartInterval time.Duration
	// HeartbeatLimits has, by type, the time without a heartbeat after which the agent of a pull member is silent.
	// Default: heartbeats.SveltosLimit and heartbeats.KarmadaLimit. Tests set shorter limits.
	HeartbeatLimits map[fleet.Type]time.Duration
	// SandboxCommand starts a process that serves render.SandboxFunctions and check.Functions. Empty: templates are
	// expanded and checks are run in this process, without limits of time and memory, and no kustomization is built.
	SandboxCommand []string
	// Egress limits the connections to addresses that users choose: addresses of charts, files, repositories and members.
	// Default: egress.Default.
	Egress *egress.Policy
	// Identity limits the use of the hub's cloud identity. Default: no cluster may use it. Run sets NewTransportWrapper.
	Identity fleet.IdentityPolicy
	// Version is the release of Towline for the manifests of agents.
	Version string
}

// containerMemory is GOMEMLIMIT, which the chart sets to the memory limit of the container. It is read once, since Run
// changes the limit, and tests call Run repeatedly.
//
//nolint:gochecknoglobals // a process has one memory limit
var containerMemory = sync.OnceValue(func() int64 { return debug.SetMemoryLimit(-1) })

// Run runs a hub on the cluster of cfg until ctx ends, and then returns nil. It returns an error if the hub cannot
// start or is no longer the leader. The caller must then exit the process.
func Run(ctx context.Context, cfg *rest.Config, opts Options) error {
	if reasons := validation.IsDNS1123Label(opts.ShardKey); opts.ShardKey != "" && len(reasons) > 0 {
		return fmt.Errorf("shard key %q: %s", opts.ShardKey, reasons[0])
	}
	// This process uses one half of the container's memory. The child processes of the sandbox use three eighths of that
	// half (see sandbox.NewPool). The rest is a reserve for short peaks.
	debug.SetMemoryLimit(containerMemory() / 2)
	cfg = rest.CopyConfig(cfg)
	cfg.UserAgent = rest.DefaultKubernetesUserAgent() + "/towline-hub"
	// No rate limit in the client: API priority and fairness limits the requests.
	cfg.QPS = -1
	if opts.Egress == nil {
		opts.Egress = egress.Default()
	}
	health, err := newHealth(cfg, clock.RealClock{})
	if err != nil {
		return err
	}
	server := &endpoints{health: health, registry: prometheus.NewRegistry()}
	stop, err := server.serve(ctx, cfg, opts)
	if err != nil {
		return err
	}
	defer stop()
	if opts.InstallCRDs && opts.shard().IsDefault() {
		if err := InstallCRDs(ctx, cfg); err != nil {
			return err
		}
	}
	if opts.CacheDir == "" {
		dir, err := os.MkdirTemp("", "towline-hub-")
		if err != nil {
			return fmt.Errorf("create a cache directory: %w", err)
		}
		defer func() { _ = os.RemoveAll(dir) }()
		opts.CacheDir = dir
	}
	mgr, err := newManager(cfg, opts, health.leaseTracker)
	if err != nil {
		return err
	}
	if err := (&hub{Manager: mgr, endpoints: server, opts: opts}).addControllers(ctx); err != nil {
		return err
	}
	if err := mgr.Start(ctx); err != nil && ctx.Err() == nil {
		return fmt.Errorf("run the hub: %w", err)
	}
	return nil
}

func (o Options) shard() fleet.Shard { return fleet.Shard(o.ShardKey) }

// sandbox returns the pool of child processes, nil without a SandboxCommand.
func (o Options) sandbox() *sandbox.Pool {
	if len(o.SandboxCommand) == 0 {
		return nil
	}
	return sandbox.NewPool(o.SandboxCommand, clock.RealClock{})
}

func newManager(cfg *rest.Config, opts Options, leaseTracker *leaseTracker) (ctrl.Manager, error) {
	options := ctrl.Options{
		Scheme: kube.Scheme(),
		Cache:  cacheOptions(opts.shard()),
		Client: client.Options{Cache: &client.CacheOptions{DisableFor: []client.Object{&corev1.ConfigMap{}, &corev1.Secret{}}}},
		// The metrics server of controller-runtime is disabled: endpoints serves the metrics.
		Metrics: metricsserver.Options{BindAddress: "0"},
		Controller: config.Controller{
			// Tests run a second hub in the same process.
			SkipNameValidation: ptr.To(true),
			// A hub that is not the leader fills its caches, so that it can become the leader at once.
			EnableWarmup: ptr.To(true),
		},
	}
	if opts.LeaderElection {
		lock, err := newLock(cfg, opts.shard(), leaseTracker)
		if err != nil {
			return nil, err
		}
		options.LeaderElection, options.LeaderElectionResourceLockInterface = true, lock
		options.LeaderElectionReleaseOnCancel = true
		options.LeaseDuration, options.RenewDeadline, options.RetryPeriod = ptr.To(electorDuration), ptr.To(renewDeadline), ptr.To(retryPeriod)
		cfg = rest.CopyConfig(cfg)
		cfg.Wrap(leaseTracker.fenceWrites)
	}
	mgr, err := ctrl.NewManager(cfg, options)
	if err != nil {
		return nil, fmt.Errorf("create the hub's manager: %w", err)
	}
	if err := mgr.Add(leaseTracker); err != nil {
		return nil, fmt.Errorf("add the tracker of the leader lease: %w", err)
	}
	return mgr, nil
}

// hub has the parts that the controllers share. It is used only during the setup.
type hub struct {
	ctrl.Manager
	*endpoints
	opts Options
	// live reads from the API server, GetClient from the cache.
	live client.Client
	// bundleKey encrypts the content of bundles for pull members, and hashes the bundles in the status of summaries.
	bundleKey        deliver.Key
	members          *fleet.Clients
	metricsRecorder  *metricsRecorder
	metricsCollector *metricsCollector
	engines          *engines
	// bundleWithdrawer withdraws bundles without a summary or a Work from clusters that are being deregistered.
	bundleWithdrawer unclaimed.BundleWithdrawer
	// labelGroups is PullTransport.LabelGroups: it sets the shard label on the groups of a member. It is nil if
	// opts.Transports is set.
	labelGroups func(context.Context, fleet.Member) (done bool, err error)
	// heartbeats evaluates the heartbeats of agents for all controllers of this hub.
	heartbeats *heartbeats.Monitor
	// resources reads the objects that templates refer to.
	resources *resources.Watcher
}

// addControllers adds all controllers of a hub to its manager, in the order of the data flow.
func (h *hub) addControllers(ctx context.Context) error {
	if err := h.setupClients(ctx); err != nil {
		return err
	}
	if err := h.setupMetrics(ctx); err != nil {
		return err
	}
	if err := h.addEngines(ctx); err != nil {
		return err
	}
	transport, err := h.newTransport()
	if err != nil {
		return err
	}
	pool := h.opts.sandbox()
	composer, err := newComposer(ctx, h, h.live, h.opts, pool)
	if err != nil {
		return err
	}
	composer.ListDeployed = transport.ListDeployed
	composer.HashKey = h.hashKey()
	composer.MemberConfig = map[fleet.Mode]func(context.Context, fleet.Member) (*rest.Config, error){fleet.Push: h.members.Config}
	h.bundleWithdrawer = unclaimed.BundleWithdrawer{Live: h.live, Transport: transport, HubUID: composer.HubUID}
	shard := h.opts.shard()
	h.heartbeats = &heartbeats.Monitor{
		Hub: h.GetClient(), Live: h.live, Clock: clock.RealClock{}, AvailableSince: h.health.availableSince, Limits: h.opts.HeartbeatLimits,
	}
	configurations := summaries.NewConfigurations(h.GetClient(), h.live, shard)
	if err := h.Add(configurations); err != nil {
		return fmt.Errorf("add the writer of ClusterConfigurations: %w", err)
	}
	if shard.IsDefault() {
		if err := h.addFleetControllers(ctx, composer.Contents); err != nil {
			return err
		}
	}
	return errors.Join(
		h.addChartChecker(composer),
		h.addSveltosControllers(ctx, composer.Objects),
		h.addKarmadaControllers(ctx),
		(&sveltosclusters.Controller{
			Hub: h.GetClient(), Shard: shard, LimitConfig: h.members.LimitConnections, MemberConfig: h.members.Config, Forget: h.engines.forget, Heartbeats: h.heartbeats,
			Sandbox: pool, Events: h.GetEventRecorder(reportingController), Clock: clock.RealClock{},
		}).Setup(ctx, h),
		(&summaries.Controller{
			Hub: h.GetClient(), Live: h.live, Shard: shard, Composer: composer, Transport: transport, Configurations: configurations,
			RecheckDelay: map[fleet.Mode]time.Duration{fleet.Push: pushRecheck, fleet.Local: pushRecheck}, Wakeups: h.engines.reportedSummaries, UnreachableReason: h.unreachableReason(),
			OnDeliveryStart: h.metricsRecorder.recordStart,
			Resources:       h.resources, Flux: h.newFluxWatcher(composer.Contents.Artifacts), Events: h.GetEventRecorder(reportingController), Clock: clock.RealClock{},
		}).Setup(ctx, h),
		(&shards.Controller{
			Hub: h.GetClient(), Live: h.live, Shard: shard, SummaryIndex: summaries.ClusterIndex, LabelGroups: h.labelGroups,
		}).Setup(h),
		(&unclaimed.Controller{
			Hub: h.GetClient(), Live: h.live, Shard: shard, Transport: transport, Configurations: configurations,
			HubUID: composer.HubUID, Events: h.GetEventRecorder(reportingController),
		}).Setup(ctx, h),
	)
}

// addEngines sets h.members and h.engines: the clients and the engines of push members, which are created on demand.
func (h *hub) addEngines(ctx context.Context) error {
	identities := h.opts.Identity
	identities.NewTransportWrapper = identity.Wrap
	h.members = fleet.NewClients(fleet.SecretReaders{Live: h.live, Metadata: h.GetCache()}, h.selfConfig(), identities, h.opts.Egress)
	h.members.Wrap = h.health.leaseTracker.fenceWrites
	h.engines = newEngines(h.members, h.GetConfig(), h.isServed, h.metricsRecorder.recordDrift)
	h.engines.partitions = h.localPartitions()
	if err := h.watchShards(ctx); err != nil {
		return err
	}
	if err := h.Add(h.engines); err != nil {
		return fmt.Errorf("add the engines: %w", err)
	}
	return nil
}

// selfConfig returns the configuration for the member mgmt/mgmt, nil unless RegisterSelf is set.
func (h *hub) selfConfig() *rest.Config {
	if !h.opts.RegisterSelf {
		return nil
	}
	return h.GetConfig()
}

// setupClients sets the fields for the access to the hub's API server: live, resources and bundleKey.
func (h *hub) setupClients(ctx context.Context) error {
	var err error
	if h.live, err = newClient(h, nil); err != nil {
		return err
	}
	if h.resources, err = newResources(h, h.live); err != nil {
		return err
	}
	if err := ensureNamespace(ctx, h.live, kube.AgentNamespace); err != nil {
		return err
	}
	h.bundleKey, err = deliver.LoadOrCreateKey(ctx, h.live)
	return err
}

// addFleetControllers adds the controllers that only the hub of the default shard runs.
func (h *hub) addFleetControllers(ctx context.Context, contents *source.Contents) error {
	if err := join.SetDefaultPatches(ctx, h.live, h.opts.AgentPatchConfigMap); err != nil {
		return err
	}
	if h.opts.RegisterSelf {
		if err := h.Add(selfRegistration{hub: h.live}); err != nil {
			return fmt.Errorf("add the registration of the hub: %w", err)
		}
	}
	return errors.Join(
		(&profiles.Controller{Hub: h.GetClient(), Unsupported: summaries.UnsupportedFields, Events: h.GetEventRecorder(reportingController)}).Setup(h),
		(&rolerequests.Controller{Hub: h.GetClient(), Contents: contents}).Setup(h),
	)
}

// hashKey returns the key of the hashes in the status of summaries.
func (h *hub) hashKey() status.HashKey { return h.bundleKey.ForStatus() }

// setupMetrics registers the metrics, and gives health the check of the manager's caches.
func (h *hub) setupMetrics(ctx context.Context) error {
	h.health.setCacheCheck(cacheCheckFunc(h.GetCache()))
	h.metricsRecorder = newMetricsRecorder(h.GetCache(), h.opts.shard(), h.Elected(), clock.RealClock{})
	h.metricsRecorder.hashKey = h.hashKey()
	h.metricsCollector = newMetricsCollector(h.GetCache(), h.opts.shard(), h.Elected())
	if err := h.registry.Register(h.metricsCollector); err != nil {
		return fmt.Errorf("register metrics: %w", err)
	}
	return errors.Join(h.metricsRecorder.register(h.registry), h.metricsRecorder.watch(ctx, h.GetCache()))
}

// addChartChecker adds the periodic check for outdated charts, and its metrics.
func (h *hub) addChartChecker(composer *summaries.Composer) error {
	if h.opts.OutdatedChartInterval <= 0 {
		return nil
	}
	checker := outdated.New(outdated.Options{
		Hub: h.GetCache(), Secrets: composer.Objects, Newest: composer.Charts.Newest, Shard: h.opts.shard(), Elected: h.Elected(), Sandbox: composer.Sandbox, Resources: h.resources,
		Interval: h.opts.OutdatedChartInterval, Clock: clock.RealClock{},
	})
	if err := h.registry.Register(checker); err != nil {
		return fmt.Errorf("register metrics: %w", err)
	}
	if err := h.Add(checker); err != nil {
		return fmt.Errorf("add the check for newer charts: %w", err)
	}
	return nil
}

// isServed returns whether the cluster of m is in this shard according to the cache. A cluster that is not in the cache
// counts as served.
func (h *hub) isServed(ctx context.Context, m fleet.Member) (bool, error) {
	cluster, err := fleet.Object(ctx, h.GetClient(), m.ID())
	if apierrors.IsNotFound(err) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	return h.opts.shard().Serves(cluster), nil
}

// newClient returns a client of the hub with requestTimeout for each request. With cacheOptions it reads from a cache.
func newClient(mgr ctrl.Manager, cacheOptions *client.CacheOptions) (client.Client, error) {
	cfg := rest.CopyConfig(mgr.GetConfig())
	cfg.Timeout = requestTimeout
	hub, err := client.New(cfg, client.Options{Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(), Cache: cacheOptions})
	if err != nil {
		return nil, fmt.Errorf("create a client of the hub: %w", err)
	}
	return hub, nil
}

// newTransport returns a transport that passes each call to the transport of the member's mode, and counts deliveries
// and withdrawals.
func (h *hub) newTransport() (deliver.Transport, error) {
	local := &deliver.LocalTransport{Push: &deliver.PushTransport{Engines: h.engines.forLocal}}
	if h.opts.Transports != nil {
		transports := deliver.ByMode{fleet.Local: local}
		maps.Copy(transports, h.opts.Transports)
		return countingTransport{transports, h.metricsRecorder.operations}, nil
	}
	cached, err := newClient(h, &client.CacheOptions{Reader: h.GetCache()})
	if err != nil {
		return nil, err
	}
	pull, err := deliver.NewShardPullTransport(cached, h.live, h.bundleKey, h.opts.shard())
	if err != nil {
		return nil, fmt.Errorf("create the pull transport: %w", err)
	}
	h.labelGroups = pull.LabelGroups
	if err := h.Add(&deliver.GarbageCollector{Transport: pull, Grace: deliver.CollectorGrace}); err != nil {
		return nil, fmt.Errorf("add the garbage collector: %w", err)
	}
	return countingTransport{deliver.ByMode{fleet.Push: &deliver.PushTransport{Engines: h.engines.forTransport}, fleet.Pull: pull, fleet.Local: local}, h.metricsRecorder.operations}, nil
}

// newComposer returns the Composer, which builds the bundles of summaries.
func newComposer(ctx context.Context, mgr ctrl.Manager, live client.Client, opts Options, pool *sandbox.Pool) (*summaries.Composer, error) {
	hubUID, err := join.ClusterUID(ctx, live)
	if err != nil {
		return nil, err
	}
	charts, err := source.NewCharts(filepath.Join(opts.CacheDir, "charts"), clock.RealClock{})
	if err != nil {
		return nil, err
	}
	artifacts, err := source.NewArtifacts(filepath.Join(opts.CacheDir, "artifacts"), clock.RealClock{})
	if err != nil {
		return nil, err
	}
	var codeVersion string
	program, err := os.Executable()
	if err == nil {
		codeVersion, err = summaries.CodeVersion(program)
	}
	if err != nil {
		log.FromContext(ctx).Error(err, "after a restart, all bundles will be built again")
	}
	objects := newContentCache(mgr.GetCache(), live)
	remote := source.NewRemoteFetcher(objects, clock.RealClock{})
	charts.Egress, artifacts.Egress, remote.Egress = opts.Egress, opts.Egress, opts.Egress
	if err := mgr.Add(remote); err != nil {
		return nil, fmt.Errorf("add the fetcher of URLs: %w", err)
	}
	return &summaries.Composer{
		Contents: &source.Contents{Hub: objects, Remote: remote, Artifacts: artifacts, Digests: source.NewDigests()}, Objects: objects, Hub: live,
		Charts: charts, Renderer: render.NewCharts(pool), Manifests: render.NewManifestRenderer(),
		Kustomizations: render.NewKustomizationRenderer(pool), Changer: render.NewChanger(pool),
		HubUID: hubUID, CodeVersion: codeVersion, Sandbox: pool, Expansions: source.NewExpansions(),
	}, nil
}

// ensureNamespace creates a namespace if it does not exist.
func ensureNamespace(ctx context.Context, hub client.Client, name string) error {
	err := hub.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, client.FieldOwner(kube.FieldManager))
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create namespace %s: %w", name, err)
	}
	return nil
}
