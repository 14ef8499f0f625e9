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
	"github.com/towline/towline/internal/hub/departures"
	"github.com/towline/towline/internal/hub/registrations"
	"github.com/towline/towline/internal/join"
)

// lifecycle adds the controllers of how clusters come and go.
func (h *hub) lifecycle(ctx context.Context) error {
	locks := &registrations.ClusterLocks{}
	bounded := rest.CopyConfig(h.GetConfig())
	bounded.Timeout = requestLimit
	kinds, err := discovery.NewDiscoveryClientForConfig(bounded)
	if err != nil {
		return fmt.Errorf("make a client of the hub: %w", err)
	}
	return errors.Join(
		(&registrations.Controller{
			Hub: h.GetClient(), Live: h.live, Shard: h.opts.shard(), EnsureManifest: h.keeper(), Locks: locks,
			Events: h.GetEventRecorder(recorder),
		}).Setup(ctx, h),
		(&departures.Controller{
			Hub: h.GetClient(), Live: h.live, Kinds: kinds, Shard: h.opts.shard(), Reachability: h.reach(), Config: h.members.Config, RetractMember: join.RetractMember,
			WithdrawRemaining: h.remainder.Withdraw, Forget: h.engines.forget, Locks: locks, Events: h.GetEventRecorder(recorder), Clock: clock.RealClock{},
		}).Setup(ctx, h),
	)
}

func (h *hub) reach() *departures.Reachability {
	dial := func(ctx context.Context, m fleet.Member) (fleet.Facts, error) {
		config, err := h.members.Config(ctx, m)
		if err != nil {
			return fleet.Facts{}, err
		}
		return fleet.Probe(ctx, config)
	}
	return &departures.Reachability{Live: h.live, Contact: dial, Heartbeats: h.heartbeats}
}

// away says of any cluster why nothing can be done on it, "" if something can: of each type whoever knows.
func (h *hub) away() func(ctx context.Context, cluster client.Object) (string, error) {
	reach := h.reach()
	return func(ctx context.Context, cluster client.Object) (string, error) {
		m := fleet.FromObject(cluster)
		return map[fleet.Type]func() (string, error){
			fleet.TypeSveltos: func() (string, error) { return reach.UnreachableReason(ctx, cluster.(*libv1beta1.SveltosCluster)) },
			// Its removal finds that out, and then abandons what is on it.
			fleet.TypeKarmada: func() (string, error) { return "", nil },
		}[m.Type]()
	}
}

// keeper keeps manifests ready with the address under which agents reach the hub now.
func (h *hub) keeper() func(context.Context, *libv1beta1.SveltosCluster) (time.Duration, error) {
	given := join.HubAddress{Server: h.opts.ManagementClusterURL, CA: h.opts.ManagementClusterCA}
	return func(ctx context.Context, cluster *libv1beta1.SveltosCluster) (time.Duration, error) {
		address, err := join.FindHubAddress(ctx, h.GetConfig(), given)
		if err != nil && !errors.Is(err, join.ErrNoHubAddress) {
			return 0, err
		}
		// A cluster may have an address of its own for the hub.
		manifests := join.Manifests{
			Hub: h.live, Address: address, Image: h.opts.AgentImage, Version: h.opts.Version, Heartbeats: h.heartbeats, Clock: clock.RealClock{},
		}
		return manifests.Keep(ctx, cluster)
	}
}
