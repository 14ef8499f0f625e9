package deliver

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube/logkeys"
)

const (
	// CollectorGrace is the GarbageCollector.Grace of a hub whose PullTransport reads groups from a cache. A watch is
	// rarely that late. If it is, the agent reports missing content, which is written again.
	CollectorGrace = 15 * time.Second
	// collectDelay is the delay after a trigger and the grace period, so that one collection handles many triggers.
	collectDelay = 1500 * time.Millisecond
	// collectInterval is the longest time between two collections. Some bundles have no trigger, for example content that
	// was replaced before it was applied.
	collectInterval = 10 * time.Minute
	// deleteParallel is the number of concurrent requests to delete bundles.
	deleteParallel = 8
	// otherShardAge is the age after which the default shard deletes an unused bundle of another shard. The collector of
	// that shard has not deleted it, so it no longer runs.
	otherShardAge = 24 * time.Hour
	// listPage is the maximum number of objects per list request.
	listPage = 500
)

// GarbageCollector deletes the ConfigurationBundles that no group needs any more: their groups are provisioned, changed
// or deleted. Only the process with the PullTransport may run it, since it must not delete bundles of running
// deliveries.
type GarbageCollector struct {
	Transport *PullTransport
	// Grace is the time for which a bundle stays after the last delivery that used it. It must be longer than the delay
	// of the cache from which the PullTransport reads groups, and is 0 without a cache.
	Grace time.Duration
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

// Start collects after each trigger and every collectInterval, until ctx ends. The first collection waits for Grace:
// the tracker does not know the deliveries of the former leader, and the cache may not have their groups yet.
func (c *GarbageCollector) Start(ctx context.Context) error {
	if !c.waitFor(ctx, nil, c.Grace) {
		return nil
	}
	for {
		if err := c.Collect(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "delete unused bundles")
		}
		if !c.waitFor(ctx, c.Transport.trigger, collectInterval) || !c.waitFor(ctx, nil, c.Grace+collectDelay) {
			return nil
		}
	}
}

// sleep returns after limit, or when wake has a value. It returns false if ctx ends.
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

// Collect deletes the bundles that no group needs.
func (c *GarbageCollector) Collect(ctx context.Context) error {
	// The groups of deliveries that ended before are in the list of groups.
	cutoff := c.Transport.tracker.clock.Now().Add(-c.Grace)
	bundles, err := c.listContent(ctx)
	if err != nil {
		return err
	}
	c.Transport.tracker.removeMissing(bundles, cutoff)
	if len(bundles) == 0 {
		return nil
	}
	if err := c.removeNeeded(ctx, bundles); err != nil {
		return err
	}
	n, err := c.deleteContent(ctx, bundles, cutoff)
	if n > 0 {
		log.FromContext(ctx).Info("deleted unused bundles", logkeys.Count, n)
	}
	return err
}

// isResponsibleFor returns whether this collector is responsible for bundle.
func (c *GarbageCollector) isResponsibleFor(bundle client.Object) bool {
	shard := c.Transport.shard
	if bundle.GetLabels()[labelShard] == labelValue(string(shard)) {
		return true
	}
	return shard.IsDefault() && c.Transport.tracker.clock.Since(bundle.GetCreationTimestamp().Time) > otherShardAge
}

// listContent lists the bundles that this collector is responsible for.
func (c *GarbageCollector) listContent(ctx context.Context) (map[client.ObjectKey]types.UID, error) {
	found := map[client.ObjectKey]types.UID{}
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(libv1beta1.GroupVersion.WithKind(libv1beta1.ConfigurationBundleKind + "List"))
	for {
		err := c.Transport.live.List(ctx, list, client.MatchingLabels{labelManagedBy: managedBy}, client.Limit(listPage), client.Continue(list.Continue))
		if err != nil {
			return nil, fmt.Errorf("list bundles: %w", err)
		}
		for i := range list.Items {
			if c.isResponsibleFor(&list.Items[i]) {
				found[client.ObjectKeyFromObject(&list.Items[i])] = list.Items[i].UID
			}
		}
		if list.Continue == "" {
			return found, nil
		}
	}
}

// removeNeeded deletes the bundles of groups that are not provisioned yet from bundles.
func (c *GarbageCollector) removeNeeded(ctx context.Context, bundles map[client.ObjectKey]types.UID) error {
	groups := &libv1beta1.ConfigurationGroupList{}
	if err := c.Transport.hub.List(ctx, groups, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("list groups: %w", err)
	}
	for i := range groups.Items {
		group := &groups.Items[i]
		if isObserved(group) && ReportOf(group).State == bundle.StateApplied {
			continue
		}
		for _, item := range group.Spec.ConfigurationItems {
			if item.ContentRef != nil {
				delete(bundles, client.ObjectKey{Namespace: item.ContentRef.Namespace, Name: item.ContentRef.Name})
			}
		}
	}
	return nil
}

// deleteBundles deletes the bundles that no delivery has used since the given time, and returns their number.
func (c *GarbageCollector) deleteContent(ctx context.Context, bundles map[client.ObjectKey]types.UID, cutoff time.Time) (int, error) {
	deletions, ctx := errgroup.WithContext(ctx)
	deletions.SetLimit(deleteParallel)
	var deleted atomic.Int32
	for key, uid := range bundles {
		deletions.Go(func() error {
			end, ok := c.Transport.tracker.beginDeletion(key, cutoff)
			if !ok {
				return nil
			}
			defer end()
			obj := &libv1beta1.ConfigurationBundle{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}}
			err := c.Transport.hub.Delete(ctx, obj, client.Preconditions{UID: &uid})
			if client.IgnoreNotFound(err) != nil {
				return fmt.Errorf("delete bundle %s: %w", key, err)
			}
			deleted.Add(1)
			return nil
		})
	}
	err := deletions.Wait()
	return int(deleted.Load()), err
}
