package deliver

import (
	"context"
	"fmt"
	"maps"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube/logkeys"
)

const (
	// CollectorGrace is the GarbageCollector.Grace of a hub whose PullTransport reads groups from a cache. If the cache
	// lags more, content can be deleted too early: the agent reports it as missing, and it is written again.
	CollectorGrace = 15 * time.Second
	// collectDelay is the delay after a trigger and the grace period, so that one collection handles many triggers.
	collectDelay = 1500 * time.Millisecond
	// collectInterval is the longest time between two collections. Not all unneeded content has a trigger, for example
	// content that was replaced before it was applied.
	collectInterval = 10 * time.Minute
	// deleteParallel is the number of concurrent requests to delete content.
	deleteParallel = 8
	// otherShardAge is the age after which the default shard deletes content of another shard that no group needs, because
	// the shard may have been removed. If the shard still runs and needs the content again, the agent reports it as
	// missing, and it is written again.
	otherShardAge = 24 * time.Hour
	// otherShardInterval is the shortest time between two collections of the content of other shards. Their groups are not
	// in the cache, so each one lists them from the API server.
	otherShardInterval = time.Hour
	// listPage is the maximum number of objects per list request.
	listPage = 500
)

// GarbageCollector deletes the content that no group needs any more: the groups are provisioned, changed or deleted.
// Only the process with the PullTransport may run it, since it must not delete the content of running deliveries.
type GarbageCollector struct {
	Transport *PullTransport
	// Grace is the time for which content stays after the last delivery that used it. It must be longer than the delay of
	// the cache from which the PullTransport reads groups, and is 0 without a cache.
	Grace time.Duration

	// otherShardsCollected is the start of the last collection of the content of other shards.
	otherShardsCollected time.Time
}

// Trigger requests a collection. The PullTransport calls it itself.
func (t *PullTransport) Trigger() {
	select {
	case t.trigger <- struct{}{}:
	default:
	}
}

// NeedLeaderElection makes a controller-runtime manager run the collector in the leader only.
func (c *GarbageCollector) NeedLeaderElection() bool { return true }

// Start collects after each trigger and failure, and every collectInterval, until ctx ends. The first collection waits
// for Grace: the tracker does not know the deliveries of the former leader, and the cache may not have their groups
// yet.
func (c *GarbageCollector) Start(ctx context.Context) error {
	if !c.waitFor(ctx, nil, c.Grace) {
		return nil
	}
	for {
		if err := c.Collect(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "delete unneeded content")
			c.Transport.Trigger() // after the failed collection there may be no other trigger
		}
		if !c.waitFor(ctx, c.Transport.trigger, collectInterval) || !c.waitFor(ctx, nil, c.Grace+collectDelay) {
			return nil
		}
	}
}

// waitFor waits until wake has a value, for at most limit. It returns false if ctx ends.
func (c *GarbageCollector) waitFor(ctx context.Context, wake <-chan struct{}, limit time.Duration) bool {
	timer := c.Transport.tracker.clock.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-wake:
	case <-timer.C():
	}
	return true
}

// Collect deletes the content that no group needs.
func (c *GarbageCollector) Collect(ctx context.Context) error {
	// The cache has the groups of all deliveries that ended before the cutoff, so excludeNeeded sees them.
	cutoff := c.Transport.tracker.clock.Now().Add(-c.Grace)
	candidates, otherShards, err := c.listContent(ctx)
	if err != nil {
		return err
	}
	c.Transport.tracker.removeUnlisted(candidates, cutoff)
	if len(candidates) > 0 {
		if err := c.excludeNeeded(ctx, candidates); err != nil {
			return err
		}
	}
	if err := c.addOtherShards(ctx, candidates, otherShards); err != nil {
		return err
	}
	if len(candidates) == 0 {
		return nil
	}
	n, err := c.deleteContent(ctx, candidates, cutoff)
	if n > 0 {
		log.FromContext(ctx).Info("deleted unneeded content", logkeys.Count, n)
	}
	return err
}

// canDeleteOfOtherShard returns whether this collector may delete content of another shard.
func (c *GarbageCollector) canDeleteOfOtherShard(content client.Object) bool {
	return c.Transport.shard.IsDefault() && c.Transport.tracker.clock.Since(content.GetCreationTimestamp().Time) > otherShardAge
}

// listContent lists the content of this shard, and the content of other shards that this collector may delete.
func (c *GarbageCollector) listContent(ctx context.Context) (own, otherShards map[client.ObjectKey]types.UID, err error) {
	own, otherShards = map[client.ObjectKey]types.UID{}, map[client.ObjectKey]types.UID{}
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(libv1beta1.GroupVersion.WithKind(libv1beta1.ConfigurationBundleKind + "List"))
	for {
		err := c.Transport.live.List(ctx, list, client.MatchingLabels{labelManagedBy: managedBy}, client.Limit(listPage), client.Continue(list.Continue))
		if err != nil {
			return nil, nil, fmt.Errorf("list content: %w", err)
		}
		for i := range list.Items {
			content := &list.Items[i]
			switch {
			case c.Transport.shard.HasLabel(content):
				own[client.ObjectKeyFromObject(content)] = content.UID
			case c.canDeleteOfOtherShard(content):
				otherShards[client.ObjectKeyFromObject(content)] = content.UID
			}
		}
		if list.Continue == "" {
			return own, otherShards, nil
		}
	}
}

// excludeNeeded removes from candidates the content of groups that are not provisioned. It walks all groups in the
// cache: an index by content would cost memory and time at each change of a group.
func (c *GarbageCollector) excludeNeeded(ctx context.Context, candidates map[client.ObjectKey]types.UID) error {
	groups := &libv1beta1.ConfigurationGroupList{}
	if err := c.Transport.hub.List(ctx, groups, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("list groups: %w", err)
	}
	excludeNeededBy(groups.Items, candidates)
	return nil
}

// addOtherShards adds to candidates the content of other shards that no group of any shard needs. It does nothing if it
// has done so within otherShardInterval.
func (c *GarbageCollector) addOtherShards(ctx context.Context, candidates, otherShards map[client.ObjectKey]types.UID) error {
	now := c.Transport.tracker.clock.Now()
	if len(otherShards) == 0 || now.Sub(c.otherShardsCollected) < otherShardInterval {
		return nil
	}
	if err := c.excludeNeeded(ctx, otherShards); err != nil {
		return err
	}
	if err := c.excludeNeededInOtherShards(ctx, otherShards); err != nil {
		return err
	}
	maps.Copy(candidates, otherShards)
	c.otherShardsCollected = now
	return nil
}

// excludeNeededInOtherShards is excludeNeeded for the groups of other shards, which the cache lacks.
func (c *GarbageCollector) excludeNeededInOtherShards(ctx context.Context, candidates map[client.ObjectKey]types.UID) error {
	next := ""
	for {
		page := &libv1beta1.ConfigurationGroupList{}
		err := c.Transport.live.List(ctx, page, client.HasLabels{fleet.LabelShard}, client.Limit(listPage), client.Continue(next))
		if err != nil {
			return fmt.Errorf("list groups of other shards: %w", err)
		}
		excludeNeededBy(page.Items, candidates)
		if next = page.Continue; next == "" {
			return nil
		}
	}
}

// excludeNeededBy removes from candidates the content of those groups that are not provisioned.
func excludeNeededBy(groups []libv1beta1.ConfigurationGroup, candidates map[client.ObjectKey]types.UID) {
	for i := range groups {
		group := &groups[i]
		if isObserved(group) && ReportOf(group).State == bundle.StateApplied {
			continue
		}
		for _, item := range group.Spec.ConfigurationItems {
			if item.ContentRef != nil {
				delete(candidates, client.ObjectKey{Namespace: item.ContentRef.Namespace, Name: item.ContentRef.Name})
			}
		}
	}
}

// deleteContent deletes the candidates that no delivery has used since cutoff, and returns the number of deleted
// objects.
func (c *GarbageCollector) deleteContent(ctx context.Context, candidates map[client.ObjectKey]types.UID, cutoff time.Time) (int, error) {
	deletions, ctx := errgroup.WithContext(ctx)
	deletions.SetLimit(deleteParallel)
	var deleted atomic.Int32
	for key, uid := range candidates {
		deletions.Go(func() error {
			end, ok := c.Transport.tracker.beginDeletion(key, cutoff)
			if !ok {
				return nil
			}
			defer end()
			obj := &libv1beta1.ConfigurationBundle{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}}
			err := c.Transport.hub.Delete(ctx, obj, client.Preconditions{UID: &uid})
			if client.IgnoreNotFound(err) != nil {
				return fmt.Errorf("delete content %s: %w", key, err)
			}
			deleted.Add(1)
			return nil
		})
	}
	err := deletions.Wait()
	return int(deleted.Load()), err
}
