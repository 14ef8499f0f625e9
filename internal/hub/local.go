package hub

import (
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// Content with deploymentType Local is deployed to the hub's own cluster. In each hub, one engine does this for all
// clusters: the engine of selfMember. The engines of all shards store their records in one inventory scope. In this
// scope each cluster has a partition, and only the hub of the cluster's shard serves it (inventory.Partitions).

// selfMember returns the member for the engine of the hub's own cluster. Its key differs from all registered members,
// because its namespace is empty.
func selfMember() fleet.Member {
	return fleet.Member{Name: "hub", Mode: fleet.Local, MemberNamespace: kube.AgentNamespace, Scope: inventory.LocalScope().Registration}
}

// forLocal returns the engine of the hub's own cluster for the partition of m; deliver.LocalTransport calls it. The
// member mgmt/mgmt is the same cluster, but has its own engine and inventory.
func (e *engines) forLocal(ctx context.Context, m fleet.Member) (deliver.Engine, error) {
	started, err := e.engineFor(ctx, selfMember())
	if err != nil {
		return nil, err
	}
	partition := deliver.LocalPartition(m.ID())
	released, err := started.engine.Serve(ctx, partition)
	if errors.Is(err, inventory.ErrNotServed) {
		return nil, fmt.Errorf("start engine of the hub for %s: another shard manages it", m.Key())
	}
	if err != nil {
		return nil, err
	}
	return localEngine{memberEngine: &memberEngine{engine: started.engine, released: released}, partition: partition}, nil
}

// localEngine is the engine of the hub's own cluster, limited to the partition of one cluster.
type localEngine struct {
	*memberEngine
	partition string
}

// FindDeployed returns a bundle of the partition. It first calls ListDeployed, which caches the whole partition:
// otherwise each reconcile of a summary of a new cluster would send requests.
func (l localEngine) FindDeployed(ctx context.Context, id bundle.ID) (bundle.Deployed, bool, error) {
	if _, err := l.ListDeployed(ctx); err != nil {
		return bundle.Deployed{}, false, err
	}
	return l.memberEngine.FindDeployed(ctx, id)
}

// ListDeployed lists the bundles of the partition, mostly from the cache.
func (l localEngine) ListDeployed(ctx context.Context) ([]bundle.Deployed, error) {
	ctx, cancel := kube.ContextUntil(ctx, l.released)
	defer cancel()
	return l.engine.ListPartition(ctx, l.partition)
}

// releaseLocal stops serving the partition of a cluster, because another hub serves it.
func (e *engines) releaseLocal(cluster fleet.ID) {
	e.mu.Lock()
	existing := e.byMember[selfMember().Key()]
	e.mu.Unlock()
	if existing != nil {
		existing.engine.StopServing(deliver.LocalPartition(cluster))
	}
}

// localPartitions returns the partitions that this hub serves: one for each cluster of its shard. The default shard
// also serves the partitions of clusters that do not exist, so that it withdraws their bundles.
func (h *hub) localPartitions() *inventory.Partitions {
	return &inventory.Partitions{
		Of: func(id bundle.ID) string {
			cluster, _, _ := deliver.ParseLocalID(id)
			return deliver.LocalPartition(cluster)
		},
		ListAssigned: func(ctx context.Context) ([]string, error) {
			clusters, err := fleet.Objects(ctx, h.GetClient())
			if err != nil {
				return nil, err
			}
			var all []string
			for _, cluster := range clusters {
				if h.opts.shard().Serves(cluster) {
					all = append(all, deliver.LocalPartition(fleet.FromObject(cluster).ID()))
				}
			}
			return all, nil
		},
		IsAssigned: func(ctx context.Context, partition string) (bool, error) {
			cluster, err := fleet.Object(ctx, h.GetClient(), deliver.ParseLocalPartition(partition))
			if apierrors.IsNotFound(err) {
				return h.opts.shard().IsDefault(), nil
			}
			return err == nil && h.opts.shard().Serves(cluster), err
		},
	}
}

// watchShards releases the partitions of clusters that this hub no longer serves.
func (h *hub) watchShards(ctx context.Context) error {
	releaseOthers := func(obj any) {
		if cluster, ok := obj.(client.Object); ok && !h.opts.shard().Serves(cluster) {
			h.engines.releaseLocal(fleet.FromObject(cluster).ID())
		}
	}
	for _, kind := range fleet.NewObjects() {
		informer, err := h.GetCache().GetInformer(ctx, kind, cache.BlockUntilSynced(false))
		if err != nil {
			return fmt.Errorf("watch the shards of clusters: %w", err)
		}
		_, err = informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
			AddFunc:    releaseOthers,
			UpdateFunc: func(_, obj any) { releaseOthers(obj) },
			DeleteFunc: func(obj any) {
				if last, ok := obj.(toolscache.DeletedFinalStateUnknown); ok {
					obj = last.Obj
				}
				if cluster, ok := obj.(client.Object); ok && !h.opts.shard().IsDefault() {
					h.engines.releaseLocal(fleet.FromObject(cluster).ID())
				}
			},
		})
		if err != nil {
			return fmt.Errorf("watch the shards of clusters: %w", err)
		}
	}
	return nil
}
