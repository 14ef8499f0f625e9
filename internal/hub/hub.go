package hub

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/clusters"
	"github.com/towline/towline/internal/hub/profiles"
	"github.com/towline/towline/internal/hub/summaries"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/source"
)

const (
	// recorder is the name that events carry.
	recorder = "towline-hub"
	// leaderLease is the Lease in kube.AgentNamespace that the active hub holds.
	leaderLease = "towline-hub"
	// requestLimit is how long one request to the hub's API server may take; it is the API server's own default limit.
	requestLimit = time.Minute
	// pushRecheck is the shortest pause between two looks at a withdrawal from a push member; agents of pull members tell by themselves.
	pushRecheck = 2 * time.Second
)

// Options say how a hub runs.
type Options struct {
	// DiagnosticsAddress serves /metrics, /healthz and /readyz, without TLS and to whoever can reach it. Empty: nothing is served.
	DiagnosticsAddress string
	// CacheDir keeps charts and renderings over restarts. Empty: a directory that goes when the hub stops.
	CacheDir string
	// InstallCRDs installs or upgrades our CRDs first.
	InstallCRDs bool
	// RegisterSelf registers the hub as the member mgmt/mgmt, unless it is there already.
	RegisterSelf bool
	// LeaderElection lets several hubs run, of which one is active. It is needed wherever a second one might be started.
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
	// Version is the release of Towline that agents' manifests are told to be of.
	Version string
}

// Run runs a hub on the cluster of cfg until ctx ends, and returns nil then. It returns an error if the hub cannot start, or if it loses
// the lead, after which the process should end.
func Run(ctx context.Context, cfg *rest.Config, opts Options) error {
	cfg = rest.CopyConfig(cfg)
	cfg.UserAgent = rest.DefaultKubernetesUserAgent() + "/towline-hub"
	// The API server's priority and fairness limits the rate better than a client can.
	cfg.QPS = -1
	if opts.InstallCRDs {
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
	mgr, err := newManager(cfg, opts)
	if err != nil {
		return err
	}
	if err := wire(ctx, mgr, opts); err != nil {
		return err
	}
	if err := mgr.Start(ctx); err != nil && ctx.Err() == nil {
		return fmt.Errorf("run the hub: %w", err)
	}
	return nil
}

func newManager(cfg *rest.Config, opts Options) (ctrl.Manager, error) {
	healthy := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	metrics := metricsserver.Options{
		BindAddress:   opts.DiagnosticsAddress,
		ExtraHandlers: map[string]http.Handler{"/healthz": healthy, "/readyz": healthy},
	}
	if metrics.BindAddress == "" {
		metrics.BindAddress = "0"
	}
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{
		Scheme:  kube.Scheme(),
		Cache:   cacheOptions(),
		Client:  client.Options{Cache: &client.CacheOptions{DisableFor: []client.Object{&corev1.ConfigMap{}, &corev1.Secret{}}}},
		Metrics: metrics,
		// The process may hold a second hub after this one, as tests do.
		Controller:                    config.Controller{SkipNameValidation: ptr.To(true)},
		LeaderElection:                opts.LeaderElection,
		LeaderElectionID:              leaderLease,
		LeaderElectionNamespace:       kube.AgentNamespace,
		LeaderElectionReleaseOnCancel: true,
	})
	if err != nil {
		return nil, fmt.Errorf("make the hub's manager: %w", err)
	}
	return mgr, nil
}

// wire adds everything that runs in a hub to mgr, in the order of the journey.
func wire(ctx context.Context, mgr ctrl.Manager, opts Options) error {
	live, err := newClient(mgr, nil)
	if err != nil {
		return err
	}
	if err := ensureNamespace(ctx, live, kube.AgentNamespace); err != nil {
		return err
	}
	members := fleet.NewClients(live, mgr.GetConfig())
	engines := newEngines(members)
	if err := mgr.Add(engines); err != nil {
		return fmt.Errorf("add the engines: %w", err)
	}
	transport, err := transports(ctx, mgr, live, engines, opts)
	if err != nil {
		return err
	}
	composer, err := newComposer(mgr, live, opts.CacheDir)
	if err != nil {
		return err
	}
	if opts.RegisterSelf {
		if err := mgr.Add(registration{hub: live}); err != nil {
			return fmt.Errorf("add the registration of the hub: %w", err)
		}
	}
	return errors.Join(
		(&clusters.Controller{
			Hub: mgr.GetClient(), Dial: members.Config, Forget: engines.forget,
			Events: mgr.GetEventRecorder(recorder), Clock: clock.RealClock{},
		}).Setup(ctx, mgr),
		(&profiles.Controller{
			Hub: mgr.GetClient(), Unsupported: summaries.Unsupported, Events: mgr.GetEventRecorder(recorder),
		}).Setup(ctx, mgr),
		(&summaries.Controller{
			Hub: mgr.GetClient(), Live: live, Composer: composer, Transport: transport,
			Recheck: map[fleet.Mode]time.Duration{fleet.Push: pushRecheck}, Woken: engines.healed,
			Events: mgr.GetEventRecorder(recorder), Clock: clock.RealClock{},
		}).Setup(ctx, mgr),
	)
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

// contact asks a push member how it is.
func contact(members *fleet.Clients) func(context.Context, fleet.Member) (fleet.Facts, error) {
	return func(ctx context.Context, m fleet.Member) (fleet.Facts, error) {
		cfg, err := members.Config(ctx, m)
		if err != nil {
			return fleet.Facts{}, err
		}
		return fleet.Probe(ctx, cfg)
	}
}

// transports chooses how bundles get to the members of each mode.
func transports(ctx context.Context, mgr ctrl.Manager, live client.Client, engines *engines, opts Options) (deliver.Transport, error) {
	if opts.Transports != nil {
		return deliver.ByMode(opts.Transports), nil
	}
	key, err := deliver.LoadOrCreateKey(ctx, live)
	if err != nil {
		return nil, err
	}
	cached, err := newClient(mgr, &client.CacheOptions{Reader: mgr.GetCache()})
	if err != nil {
		return nil, err
	}
	outbox, err := deliver.NewOutbox(cached, live, key)
	if err != nil {
		return nil, fmt.Errorf("make the outbox: %w", err)
	}
	if err := mgr.Add(&deliver.Sweeper{Outbox: outbox, Clock: clock.RealClock{}}); err != nil {
		return nil, fmt.Errorf("add the sweeper: %w", err)
	}
	return deliver.ByMode{fleet.Push: &deliver.Direct{Engines: engines.of}, fleet.Pull: outbox}, nil
}

func newComposer(mgr ctrl.Manager, live client.Client, dir string) (*summaries.Composer, error) {
	charts, err := source.NewCharts(filepath.Join(dir, "charts"), clock.RealClock{})
	if err != nil {
		return nil, err
	}
	renderer, err := render.NewCharts(filepath.Join(dir, "renderings"))
	if err != nil {
		return nil, err
	}
	return &summaries.Composer{Contents: newContents(mgr.GetCache(), live), Charts: charts, Renderer: renderer}, nil
}

func ensureNamespace(ctx context.Context, hub client.Client, name string) error {
	err := hub.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, client.FieldOwner(kube.FieldManager))
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create namespace %s: %w", name, err)
	}
	return nil
}
