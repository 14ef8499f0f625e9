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
	// sweepDelay is how long a trigger waits for others, so that a rollout is swept up in a few passes.
	sweepDelay = 1500 * time.Millisecond
	// sweepInterval is the longest time between two passes. It catches what no trigger tells, such as content that was replaced
	// before it was applied.
	sweepInterval = 10 * time.Minute
	// sweepBatch is how many bundles are deleted while deliveries wait.
	sweepBatch = 32
	// sweepParallel is how many of them are deleted at the same time.
	sweepParallel = 8
	// strayAge is how old the bundle of another shard must be for the default one to delete it, if no group needs it: the sweeper of that
	// shard would have done so, unless there is none any more.
	strayAge = 24 * time.Hour
	// sweepPage is how many objects are listed per request.
	sweepPage = 500
)

// Sweeper deletes the bundles that no group needs any more: those of groups that were provisioned, replaced or withdrawn.
// Only the process that delivers may run one: it is the Outbox that keeps it from deleting what is about to be pointed at.
type Sweeper struct {
	Outbox *Outbox
	Clock  clock.Clock
}

// Trigger asks the sweeper of o to look soon. The Outbox does so by itself.
func (o *Outbox) Trigger() {
	select {
	case o.trigger <- struct{}{}:
	default:
	}
}

// NeedLeaderElection makes a controller-runtime manager run the sweeper in the leader only.
func (s *Sweeper) NeedLeaderElection() bool { return true }

// Start sweeps at once, soon after each trigger and now and then, until ctx ends.
func (s *Sweeper) Start(ctx context.Context) error {
	for {
		if err := s.Sweep(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "sweep bundles")
		}
		if !s.sleep(ctx, s.Outbox.trigger, sweepInterval) || !s.sleep(ctx, nil, sweepDelay) {
			return nil
		}
	}
}

// sleep returns after limit, or when wake has a value. It returns false if ctx ends.
func (s *Sweeper) sleep(ctx context.Context, wake <-chan struct{}, limit time.Duration) bool {
	timer := s.Clock.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-wake:
	case <-timer.C():
	}
	return true
}

// Sweep deletes what no group needs now.
func (s *Sweeper) Sweep(ctx context.Context) error {
	// A delivery that began before this ends before it, and its group is in the list below; one that begins later marks the bundles
	// that it uses, and those are left alone.
	pass := s.Outbox.staging.begin()
	bundles, err := s.bundles(ctx)
	if err != nil || len(bundles) == 0 {
		return err
	}
	needed, err := s.needed(ctx)
	if err != nil {
		return err
	}
	for key := range needed {
		delete(bundles, key)
	}
	n, err := s.remove(ctx, bundles, pass)
	if n > 0 {
		log.FromContext(ctx).Info("removed delivered bundles", logkeys.Count, n)
	}
	return err
}

// ours says whether bundle is one that this sweeper deletes.
func (s *Sweeper) ours(bundle client.Object) bool {
	shard := s.Outbox.shard
	if bundle.GetLabels()[labelShard] == labelValue(string(shard)) {
		return true
	}
	return shard.IsDefault() && s.Clock.Since(bundle.GetCreationTimestamp().Time) > strayAge
}

// bundles lists the bundles of the hub that are ours.
func (s *Sweeper) bundles(ctx context.Context) (map[client.ObjectKey]types.UID, error) {
	found := map[client.ObjectKey]types.UID{}
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(libv1beta1.GroupVersion.WithKind(libv1beta1.ConfigurationBundleKind + "List"))
	for {
		err := s.Outbox.live.List(ctx, list, client.MatchingLabels{labelManagedBy: managedBy}, client.Limit(sweepPage), client.Continue(list.Continue))
		if err != nil {
			return nil, fmt.Errorf("list bundles: %w", err)
		}
		for i := range list.Items {
			if s.ours(&list.Items[i]) {
				found[client.ObjectKeyFromObject(&list.Items[i])] = list.Items[i].UID
			}
		}
		if list.Continue == "" {
			return found, nil
		}
	}
}

// needed lists the bundles that groups still to be provisioned point at.
func (s *Sweeper) needed(ctx context.Context) (map[client.ObjectKey]struct{}, error) {
	needed := map[client.ObjectKey]struct{}{}
	list := &libv1beta1.ConfigurationGroupList{}
	for {
		if err := s.Outbox.live.List(ctx, list, client.Limit(sweepPage), client.Continue(list.Continue)); err != nil {
			return nil, fmt.Errorf("list groups: %w", err)
		}
		for i := range list.Items {
			group := &list.Items[i]
			if observed(group) && ReportOf(group).State == bundle.StateApplied {
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

// remove deletes bundles, a few at a time so that deliveries do not wait long, and returns how many it deleted.
func (s *Sweeper) remove(ctx context.Context, bundles map[client.ObjectKey]types.UID, pass uint64) (int, error) {
	deleted := 0
	batch := make(map[client.ObjectKey]types.UID, sweepBatch)
	for key, uid := range bundles {
		batch[key] = uid
		delete(bundles, key)
		if len(batch) < sweepBatch && len(bundles) > 0 {
			continue
		}
		n, err := s.removeBatch(ctx, batch, pass)
		deleted += n
		if err != nil {
			return deleted, err
		}
		clear(batch)
	}
	return deleted, nil
}

func (s *Sweeper) removeBatch(ctx context.Context, batch map[client.ObjectKey]types.UID, pass uint64) (int, error) {
	staging := s.Outbox.staging
	staging.delivery.Lock()
	defer staging.delivery.Unlock()
	deletions, ctx := errgroup.WithContext(ctx)
	deletions.SetLimit(sweepParallel)
	deleted := 0
	for key, uid := range batch {
		if !staging.release(key, pass) {
			continue
		}
		deleted++
		deletions.Go(func() error {
			obj := &libv1beta1.ConfigurationBundle{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}}
			err := s.Outbox.hub.Delete(ctx, obj, client.Preconditions{UID: &uid})
			if client.IgnoreNotFound(err) != nil {
				return fmt.Errorf("delete bundle %s: %w", key, err)
			}
			return nil
		})
	}
	return deleted, deletions.Wait()
}
