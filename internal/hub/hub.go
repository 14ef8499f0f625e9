package hub

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
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
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/hub/clusters"
	"github.com/towline/towline/internal/hub/outdated"
	"github.com/towline/towline/internal/hub/profiles"
	"github.com/towline/towline/internal/hub/summaries"
	"github.com/towline/towline/internal/hub/unclaimed"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/source"
)

const (
	// recorder is the name that events carry.
	recorder = "towline-hub"
	// requestLimit is how long one request to the hub's API server may take; it is the API server's own default limit.
	requestLimit = time.Minute
	// pushRecheck is the shortest pause between two looks at a withdrawal from a push member; agents of pull members tell by themselves.
	pushRecheck = 2 * time.Second
)

// Options say how a hub runs.
type Options struct {
	// ShardKey makes the hub look after the clusters of one shard: those with the annotation sharding.projectsveltos.io/key of this value.
	// Empty: the default shard, which has all clusters without it, and whose hub alone matches profiles, installs CRDs and registers itself.
	ShardKey string
	// HealthAddress serves /healthz and /readyz over HTTP to whoever can reach it, and DiagnosticsAddress /metrics over HTTPS to whoever may
	// get the non-resource URL /metrics of the hub's API server. Empty serves nothing.
	HealthAddress      string
	DiagnosticsAddress string
	// CacheDir keeps charts over restarts. Empty: a directory that goes when the hub stops.
	CacheDir string
	// InstallCRDs installs or upgrades our CRDs first.
	InstallCRDs bool
	// RegisterSelf registers the hub as the member mgmt/mgmt, unless it is there already.
	RegisterSelf bool
	// LeaderElection lets several hubs run, of which one per shard is active. It is needed wherever a second one might be started.
	LeaderElection bool
	// Transports carry bundles to the members of a mode. Default: engines in this process for push, groups and bundles for pull.
	Transports map[fleet.Mode]deliver.Transport
	// ManagementClusterURL is the https address under which agents reach the hub. Empty: what the hub publishes of itself (ConfigMap
	// kube-public/cluster-info), else its own kubeconfig, unless that is an address inside the cluster.
	ManagementClusterURL string
	// ManagementClusterCA is the certificate authority of that address, in PEM. Empty: the one that comes with the address found.
	ManagementClusterCA []byte
	// AgentImage is the container image of agents. Default: join.DefaultAgentImage.
	AgentImage string
	// AgentPatchConfigMap is <namespace>/<name> of a ConfigMap with patches for the manifests of agents whose clusters name none. The hub of
	// the default shard makes it known to everyone who makes manifests. Empty: none.
	AgentPatchConfigMap string
	// OutdatedChartInterval is the time between two looks which deployed charts have a newer version in their repository. 0: do not look.
	OutdatedChartInterval time.Duration
	// Version is the release of Towline that agents' manifests are told to be of.
	Version string
}

// Run runs a hub on the cluster of cfg until ctx ends, and returns nil then. It returns an error if the hub cannot start, or if it loses
// the lead, after which the process should end.
func Run(ctx context.Context, cfg *rest.Config, opts Options) error {
	if reasons := validation.IsDNS1123Label(opts.ShardKey); opts.ShardKey != "" && len(reasons) > 0 {
		return fmt.Errorf("shard key %q: %s", opts.ShardKey, reasons[0])
	}
	cfg = rest.CopyConfig(cfg)
	cfg.UserAgent = rest.DefaultKubernetesUserAgent() + "/towline-hub"
	// The API server's priority and fairness limits the rate better than a client can.
	cfg.QPS = -1
	health, err := newHealth(cfg, clock.RealClock{})
	if err != nil {
		return err
	}
	served := &endpoints{health: health, registry: prometheus.NewRegistry()}
	stop, err := served.serve(ctx, cfg, opts)
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
			return fmt.Errorf("make a cache directory: %w", err)
		}
		defer func() { _ = os.RemoveAll(dir) }()
		opts.CacheDir = dir
	}
	mgr, err := newManager(cfg, opts, health.tenure)
	if err != nil {
		return err
	}
	if err := (&hub{Manager: mgr, endpoints: served, opts: opts}).wire(ctx); err != nil {
		return err
	}
	if err := mgr.Start(ctx); err != nil && ctx.Err() == nil {
		return fmt.Errorf("run the hub: %w", err)
	}
	return nil
}

func (o Options) shard() fleet.Shard { return fleet.Shard(o.ShardKey) }

func newManager(cfg *rest.Config, opts Options, tenure *tenure) (ctrl.Manager, error) {
	options := ctrl.Options{
		Scheme: kube.Scheme(),
		Cache:  cacheOptions(),
		Client: client.Options{Cache: &client.CacheOptions{DisableFor: []client.Object{&corev1.ConfigMap{}, &corev1.Secret{}}}},
		// Its server would serve the metrics of the process only.
		Metrics: metricsserver.Options{BindAddress: "0"},
		Controller: config.Controller{
			// The process may hold a second hub after this one, as tests do.
			SkipNameValidation: ptr.To(true),
			// A hub that waits for the lead has its caches full when it gets it.
			EnableWarmup: ptr.To(true),
		},
	}
	if opts.LeaderElection {
		lock, err := newLock(cfg, opts.shard(), tenure)
		if err != nil {
			return nil, err
		}
		options.LeaderElection, options.LeaderElectionResourceLockInterface = true, lock
		options.LeaderElectionReleaseOnCancel = true
		options.LeaseDuration, options.RenewDeadline, options.RetryPeriod = ptr.To(leaseDuration), ptr.To(renewDeadline), ptr.To(retryPeriod)
	}
	mgr, err := ctrl.NewManager(cfg, options)
	if err != nil {
		return nil, fmt.Errorf("make the hub's manager: %w", err)
	}
	return mgr, nil
}

// hub is one hub that is being put together.
type hub struct {
	ctrl.Manager
	*endpoints
	opts    Options
	live    client.Client
	members *fleet.Clients
	tally   *tally
	census  *census
	engines *engines
	// remainder withdraws what deregistered clusters hold beyond summaries and Works.
	remainder unclaimed.Remainder
	// heartbeats judges the agents of pull members, for everything in this hub.
	heartbeats *heartbeats.Judge
}

// wire adds everything that runs in a hub to its manager, in the order of the journey.
func (h *hub) wire(ctx context.Context) error {
	var err error
	if h.live, err = newClient(h, nil); err != nil {
		return err
	}
	if err := ensureNamespace(ctx, h.live, kube.AgentNamespace); err != nil {
		return err
	}
	if err := h.observe(ctx); err != nil {
		return err
	}
	h.members = fleet.NewClients(h.live, h.GetConfig())
	h.engines = newEngines(h.members, h.serves, h.tally.healed)
	if err := h.Add(h.engines); err != nil {
		return fmt.Errorf("add the engines: %w", err)
	}
	transport, err := h.transport(ctx)
	if err != nil {
		return err
	}
	composer, err := newComposer(ctx, h, h.live, h.opts.CacheDir)
	if err != nil {
		return err
	}
	composer.ListDeployed = transport.ListDeployed
	composer.Dial = map[fleet.Mode]func(context.Context, fleet.Member) (*rest.Config, error){fleet.Push: h.members.Config}
	h.remainder = unclaimed.Remainder{Live: h.live, Transport: transport, HubUID: composer.HubUID}
	shard := h.opts.shard()
	h.heartbeats = &heartbeats.Judge{Hub: h.GetClient(), Live: h.live, Clock: clock.RealClock{}, SeesSince: h.health.seesSince}
	if shard.IsDefault() {
		if err := h.wireFleet(ctx); err != nil {
			return err
		}
	}
	return errors.Join(
		h.watchCharts(composer),
		h.lifecycle(ctx),
		h.karmada(ctx),
		(&clusters.Controller{
			Hub: h.GetClient(), Shard: shard, Dial: h.members.Config, Forget: h.engines.forget, Heartbeats: h.heartbeats,
			Events: h.GetEventRecorder(recorder), Clock: clock.RealClock{},
		}).Setup(ctx, h),
		(&summaries.Controller{
			Hub: h.GetClient(), Live: h.live, Shard: shard, Composer: composer, Transport: transport,
			Recheck: map[fleet.Mode]time.Duration{fleet.Push: pushRecheck}, Woken: h.engines.healed, Away: h.away(),
			Events: h.GetEventRecorder(recorder), Clock: clock.RealClock{},
		}).Setup(ctx, h),
		(&unclaimed.Controller{
			Hub: h.GetClient(), Live: h.live, Shard: shard, Transport: transport, HubUID: composer.HubUID, Events: h.GetEventRecorder(recorder),
		}).Setup(ctx, h),
	)
}

// wireFleet adds what is for the fleet as a whole, which the hub of the default shard looks after.
func (h *hub) wireFleet(ctx context.Context) error {
	if err := join.PublishPatches(ctx, h.live, h.opts.AgentPatchConfigMap); err != nil {
		return err
	}
	if h.opts.RegisterSelf {
		if err := h.Add(registration{hub: h.live}); err != nil {
			return fmt.Errorf("add the registration of the hub: %w", err)
		}
	}
	return (&profiles.Controller{
		Hub: h.GetClient(), Unsupported: summaries.Unsupported, Events: h.GetEventRecorder(recorder),
	}).Setup(ctx, h)
}

// observe makes the hub's health and metrics tell of this manager.
func (h *hub) observe(ctx context.Context) error {
	h.health.expect(allFull(h.GetCache()))
	h.tally = newTally(h.GetCache(), h.opts.shard(), h.Elected(), clock.RealClock{})
	h.census = newCensus(h.GetCache(), h.opts.shard(), h.Elected())
	if err := h.registry.Register(h.census); err != nil {
		return fmt.Errorf("register metrics: %w", err)
	}
	return errors.Join(h.tally.register(h.registry), h.tally.follow(ctx, h.GetCache()))
}

// watchCharts makes the metrics tell which charts are outdated.
func (h *hub) watchCharts(composer *summaries.Composer) error {
	if h.opts.OutdatedChartInterval <= 0 {
		return nil
	}
	watch := outdated.New(outdated.Options{
		Hub: h.GetCache(), Secrets: composer.Contents, Newest: composer.Charts.Newest, Shard: h.opts.shard(), Elected: h.Elected(),
		Interval: h.opts.OutdatedChartInterval, Clock: clock.RealClock{},
	})
	if err := h.registry.Register(watch); err != nil {
		return fmt.Errorf("register metrics: %w", err)
	}
	if err := h.Add(watch); err != nil {
		return fmt.Errorf("add the look for newer charts: %w", err)
	}
	return nil
}

// serves says whether m is still looked after by this shard, as far as is known.
func (h *hub) serves(ctx context.Context, m fleet.Member) (bool, error) {
	_, cluster, err := fleet.Get(ctx, h.GetClient(), m.Type, m.Namespace, m.Name)
	if apierrors.IsNotFound(err) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	return h.opts.shard().Serves(cluster), nil
}

// newClient returns a client of the hub none of whose requests hangs for longer than requestLimit.
func newClient(mgr ctrl.Manager, reads *client.CacheOptions) (client.Client, error) {
	cfg := rest.CopyConfig(mgr.GetConfig())
	cfg.Timeout = requestLimit
	hub, err := client.New(cfg, client.Options{Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(), Cache: reads})
	if err != nil {
		return nil, fmt.Errorf("make a client of the hub: %w", err)
	}
	return hub, nil
}

// transport chooses how bundles get to the members of each mode.
func (h *hub) transport(ctx context.Context) (deliver.Transport, error) {
	if h.opts.Transports != nil {
		return counted{deliver.ByMode(h.opts.Transports), h.tally.operations}, nil
	}
	key, err := deliver.LoadOrCreateKey(ctx, h.live)
	if err != nil {
		return nil, err
	}
	cached, err := newClient(h, &client.CacheOptions{Reader: h.GetCache()})
	if err != nil {
		return nil, err
	}
	pull, err := deliver.NewShardPullTransport(cached, h.live, key, h.opts.shard())
	if err != nil {
		return nil, fmt.Errorf("make the pull transport: %w", err)
	}
	if err := h.Add(&deliver.GarbageCollector{Transport: pull, Clock: clock.RealClock{}}); err != nil {
		return nil, fmt.Errorf("add the garbage collector: %w", err)
	}
	return counted{deliver.ByMode{fleet.Push: &deliver.PushTransport{Engines: h.engines.of}, fleet.Pull: pull}, h.tally.operations}, nil
}

func newComposer(ctx context.Context, mgr ctrl.Manager, live client.Client, dir string) (*summaries.Composer, error) {
	hubUID, err := join.HubUID(ctx, live)
	if err != nil {
		return nil, err
	}
	charts, err := source.NewCharts(filepath.Join(dir, "charts"), clock.RealClock{})
	if err != nil {
		return nil, err
	}
	return &summaries.Composer{
		Contents: newContents(mgr.GetCache(), live), Hub: live, Charts: charts, Renderer: render.NewCharts(), HubUID: hubUID,
	}, nil
}

func ensureNamespace(ctx context.Context, hub client.Client, name string) error {
	err := hub.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, client.FieldOwner(kube.FieldManager))
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create namespace %s: %w", name, err)
	}
	return nil
}
