package hub

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/deregistration"
	"github.com/towline/towline/internal/hub/registration"
	"github.com/towline/towline/internal/join"
)

// addSveltosControllers adds the controllers that register and deregister SveltosClusters. configMaps reads the
// ConfigMap with the hub's address for agents.
func (h *hub) addSveltosControllers(ctx context.Context, configMaps client.Reader) error {
	locks := &registration.ClusterLocks{}
	configWithTimeout := rest.CopyConfig(h.GetConfig())
	configWithTimeout.Timeout = requestTimeout
	hubDiscovery, err := discovery.NewDiscoveryClientForConfig(configWithTimeout)
	if err != nil {
		return fmt.Errorf("create a client of the hub: %w", err)
	}
	return errors.Join(
		(&registration.Controller{
			Hub: h.GetClient(), Live: h.live, Cache: h.GetCache(), Shard: h.opts.shard(), EnsureManifest: h.ensureManifestFunc(configMaps),
			Locks: locks, Events: h.GetEventRecorder(reportingController),
		}).Setup(ctx, h),
		(&deregistration.Controller{
			Hub: h.GetClient(), Live: h.live, Kinds: hubDiscovery, Shard: h.opts.shard(), Reachability: h.reachability(), Config: h.members.Config, DeleteMemberObjects: join.DeleteMemberObjects,
			WithdrawRemaining: h.bundleWithdrawer.Withdraw, Forget: h.engines.forget, Locks: locks, Events: h.GetEventRecorder(reportingController), Clock: clock.RealClock{},
		}).Setup(ctx, h),
	)
}

// reachability returns the check whether a SveltosCluster that is being deleted is reachable.
func (h *hub) reachability() *deregistration.Reachability {
	contact := func(ctx context.Context, m fleet.Member) (fleet.Facts, error) {
		config, err := h.members.Config(ctx, m)
		if err != nil {
			return fleet.Facts{}, err
		}
		return fleet.Probe(ctx, config)
	}
	return &deregistration.Reachability{Live: h.live, Contact: contact, Heartbeats: h.heartbeats}
}

// unreachableReason returns a function for summaries.Controller. It returns why a SveltosCluster that is being deleted
// is unreachable, "" if it is reachable.
func (h *hub) unreachableReason() func(ctx context.Context, cluster client.Object) (string, error) {
	reachability := h.reachability()
	return func(ctx context.Context, cluster client.Object) (string, error) {
		m := fleet.FromObject(cluster)
		return map[fleet.Type]func() (string, error){
			fleet.TypeSveltos: func() (string, error) {
				return reachability.UnreachableReason(ctx, cluster.(*libv1beta1.SveltosCluster))
			},
			// executionnamespaces.Controller, which removes the Cluster, checks the member itself.
			fleet.TypeKarmada: func() (string, error) { return "", nil },
		}[m.Type]()
	}
}

// ensureManifestFunc returns a function that creates or updates the agent's manifest of a cluster, with the present
// address of the hub. It returns the time until it must be called again.
func (h *hub) ensureManifestFunc(configMaps client.Reader) func(context.Context, *libv1beta1.SveltosCluster) (time.Duration, error) {
	configured := join.HubAddress{Server: h.opts.ManagementClusterURL, CA: h.opts.ManagementClusterCA}
	return func(ctx context.Context, cluster *libv1beta1.SveltosCluster) (time.Duration, error) {
		address, err := join.FindHubAddress(ctx, configMaps, h.GetConfig(), configured)
		if err != nil && !errors.Is(err, join.ErrNoHubAddress) {
			return 0, err
		}
		// Without a default address, only clusters that set their own address of the hub get a manifest.
		manifests := join.Manifests{
			Hub: h.live, Cache: h.GetCache(), Address: address, Image: h.opts.AgentImage, Version: h.opts.Version, Clock: clock.RealClock{},
		}
		return manifests.Reconcile(ctx, cluster)
	}
}
