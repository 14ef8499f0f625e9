package deliver

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube/logkeys"
)

const (
	// collectDelay is the delay after a trigger, so that one collection handles many triggers.
	collectDelay = 1500 * time.Millisecond
	// collectInterval is the longest time between two collections. Some bundles have no trigger, for example content that
	// was replaced before it was applied.
	collectInterval = 10 * time.Minute
	// deleteBatch is the number of bundles that are deleted while deliveries wait.
	deleteBatch = 32
	// deleteParallel is the number of concurrent requests for them.
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
	Clock     clock.Clock
}

// Trigger requests a collection. The PullTransport calls it itself.
func (o *PullTransport) Trigger() {
	select {
	case o.trigger <- struct{}{}:
	default:
	}
}

// NeedLeaderElection makes a controller-runtime manager run the collector in the leader only.
func (c *GarbageCollector) NeedLeaderElection() bool { return true }

// Start collects at once, after each trigger and every collectInterval, until ctx ends.
func (c *GarbageCollector) Start(ctx context.Context) error {
	for {
		if err := c.Collect(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "delete unused bundles")
		}
		if !c.sleep(ctx, c.Transport.trigger, collectInterval) || !c.sleep(ctx, nil, collectDelay) {
			return nil
		}
	}
}

// sleep returns after limit, or when wake has a value. It returns false if ctx ends.
func (c *GarbageCollector) sleep(ctx context.Context, wake <-chan struct{}, limit time.Duration) bool {
	timer := c.Clock.NewTimer(limit)
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
	// Deliveries that began earlier have ended, and their groups are in the list below. Later deliveries mark the bundles
	// that they use, which are not deleted.
	collection := c.Transport.tracker.beginCollection()
	bundles, err := c.listBundles(ctx)
	if err != nil || len(bundles) == 0 {
		return err
	}
	needed, err := c.listNeeded(ctx)
	if err != nil {
		return err
	}
	for key := range needed {
		delete(bundles, key)
	}
	n, err := c.deleteBundles(ctx, bundles, collection)
	if n > 0 {
		log.FromContext(ctx).Info("deleted unused bundles", logkeys.Count, n)
	}
	return err
}

// canDelete returns whether this collector is responsible for bundle.
func (c *GarbageCollector) canDelete(bundle client.Object) bool {
	shard := c.Transport.shard
	if bundle.GetLabels()[labelShard] == labelValue(string(shard)) {
		return true
	}
	return shard.IsDefault() && c.Clock.Since(bundle.GetCreationTimestamp().Time) > otherShardAge
}

// listBundles lists the bundles that this collector is responsible for.
func (c *GarbageCollector) listBundles(ctx context.Context) (map[client.ObjectKey]types.UID, error) {
	found := map[client.ObjectKey]types.UID{}
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(libv1beta1.GroupVersion.WithKind(libv1beta1.ConfigurationBundleKind + "List"))
	for {
		err := c.Transport.live.List(ctx, list, client.MatchingLabels{labelManagedBy: managedBy}, client.Limit(listPage), client.Continue(list.Continue))
		if err != nil {
			return nil, fmt.Errorf("list bundles: %w", err)
		}
		for i := range list.Items {
			if c.canDelete(&list.Items[i]) {
				found[client.ObjectKeyFromObject(&list.Items[i])] = list.Items[i].UID
			}
		}
		if list.Continue == "" {
			return found, nil
		}
	}
}

// listNeeded lists the bundles of groups that are not provisioned yet.
func (c *GarbageCollector) listNeeded(ctx context.Context) (map[client.ObjectKey]struct{}, error) {
	needed := map[client.ObjectKey]struct{}{}
	list := &libv1beta1.ConfigurationGroupList{}
	for {
		if err := c.Transport.live.List(ctx, list, client.Limit(listPage), client.Continue(list.Continue)); err != nil {
			return nil, fmt.Errorf("list groups: %w", err)
		}
		for i := range list.Items {
			group := &list.Items[i]
			if isObserved(group) && ReportOf(group).State == bundle.StateApplied {
				continue
			}
			for _, item := range group.Spec.ConfigurationItems {
				if item.ContentRef != nil {
					needed[client.ObjectKey{Namespace: item.ContentRef.Namespace, Name: item.ContentRef.Name}] = struct{}{}
				}
			}
		}
		if list.Continue == "" {
			return needed, nil
		}
	}
}

// deleteBundles deletes bundles in batches, so that deliveries do not wait long, and returns the number of deleted
// ones.
func (c *GarbageCollector) deleteBundles(ctx context.Context, bundles map[client.ObjectKey]types.UID, collection uint64) (int, error) {
	deleted := 0
	batch := make(map[client.ObjectKey]types.UID, deleteBatch)
	for key, uid := range bundles {
		batch[key] = uid
		delete(bundles, key)
		if len(batch) < deleteBatch && len(bundles) > 0 {
			continue
		}
		n, err := c.deleteBundleBatch(ctx, batch, collection)
		deleted += n
		if err != nil {
			return deleted, err
		}
		clear(batch)
	}
	return deleted, nil
}

func (c *GarbageCollector) deleteBundleBatch(ctx context.Context, batch map[client.ObjectKey]types.UID, collection uint64) (int, error) {
	tracker := c.Transport.tracker
	tracker.delivery.Lock()
	defer tracker.delivery.Unlock()
	deletions, ctx := errgroup.WithContext(ctx)
	deletions.SetLimit(deleteParallel)
	deleted := 0
	for key, uid := range batch {
		if !tracker.removeUnused(key, collection) {
			continue
		}
		deleted++
		deletions.Go(func() error {
			obj := &libv1beta1.ConfigurationBundle{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}}
			err := c.Transport.hub.Delete(ctx, obj, client.Preconditions{UID: &uid})
			if client.IgnoreNotFound(err) != nil {
				return fmt.Errorf("delete bundle %s: %w", key, err)
			}
			return nil
		})
	}
	return deleted, deletions.Wait()
}
