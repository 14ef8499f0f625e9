package unclaimed

import (
	"context"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/lru"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/slots"
	"github.com/towline/towline/internal/hub/summaries"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
)

const (
	// workers is the number of clusters reconciled in parallel. An unresponsive push member blocks a worker for up to
	// reconcileTimeout.
	workers          = 50
	reconcileTimeout = time.Minute
	// namespaceWorkers is the maximum number of workers for the clusters in one namespace, which belong to one tenant. The
	// other workers are reserved for namespaces without a running reconcile. In a fleet with one namespace they are idle.
	namespaceWorkers = 40
	// resyncInterval is the interval between two reconciles of a cluster without unclaimed bundles. A reconcile sends
	// no request to a pull member and one metadata list to a push member. Up to resyncJitter of the interval is added.
	resyncInterval = 30 * time.Minute
	resyncJitter   = 0.2
	// eventDelay is the delay of a reconcile after an event: an agent that continuously changes its objects causes at most
	// one reconcile in this time.
	eventDelay = 2 * time.Second
	// unclaimedResyncInterval is the interval between two reconciles of a cluster with unclaimed bundles. It is longer
	// than the time until an agent's Lease no longer lists a withdrawn bundle.
	unclaimedResyncInterval = 45 * time.Second
	// minRetryDelay and maxRetryDelay limit the delay before a failed reconcile is retried. The delay doubles with each
	// failure.
	minRetryDelay = time.Second
	maxRetryDelay = 5 * time.Minute
	// maxSeenDeleted is the maximum number of entries in seenDeleted.
	maxSeenDeleted = 10_000
	// deliveryIndex finds the pull clusters with a delivery namespace.
	deliveryIndex = "delivery-namespace"
)

// Controller handles the unclaimed bundles of each cluster: at startup, on events that can cause them, and
// periodically.
type Controller struct {
	// Hub reads clusters, profiles, summaries and ClusterConfigurations from a cache; Live reads from the API server.
	Hub       client.Client
	Live      client.Reader
	Shard     fleet.Shard
	Transport deliver.Transport
	// Configurations writes the ClusterConfigurations.
	Configurations *summaries.Configurations
	// HubUID is the UID of the hub's namespace kube-system.
	HubUID string
	Events events.EventRecorder

	// seenDeleted has the summaries and profiles that were deleted while this process watched them.
	seenDeleted *lru.Cache
	// slots shares the workers among namespaces.
	slots *slots.TypedSlots[fleet.ID]
}

// Setup adds the controller to mgr. summaries.Controller must be set up before, because it adds the index of summaries.
func (c *Controller) Setup(ctx context.Context, mgr ctrl.Manager) error {
	c.seenDeleted, c.slots = lru.New(maxSeenDeleted), slots.NewTyped[fleet.ID]()
	for _, cluster := range fleet.NewObjects() {
		if err := mgr.GetFieldIndexer().IndexField(ctx, cluster, deliveryIndex, deliveryNamespaceOf); err != nil {
			return err
		}
	}
	controllerBuilder := builder.TypedControllerManagedBy[fleet.ID](mgr).
		Named("unclaimed").
		Watches(&configv1beta1.ClusterSummary{}, enqueueDelayed(c.clustersOfSummary), builder.WithPredicates(c.recordDeletions())).
		// Profiles enqueue nothing: the predicate records the deletion.
		Watches(&configv1beta1.ClusterProfile{}, enqueueDelayed(noClusters), builder.WithPredicates(c.recordDeletions())).
		Watches(&configv1beta1.Profile{}, enqueueDelayed(noClusters), builder.WithPredicates(c.recordDeletions())).
		Watches(&libv1beta1.ConfigurationGroup{}, enqueueDelayed(c.clustersOfGroup), builder.WithPredicates(withdrawalCompleted())).
		Watches(&coordinationv1.Lease{}, enqueueDelayed(c.clustersOfLease), builder.WithPredicates(unrequestedChanged())).
		WatchesRawSource(source.TypedFunc[fleet.ID](func(_ context.Context, queue workqueue.TypedRateLimitingInterface[fleet.ID]) error {
			c.slots.Queue = queue
			return nil
		})).
		WithOptions(controller.TypedOptions[fleet.ID]{
			MaxConcurrentReconciles: workers,
			ReconciliationTimeout:   reconcileTimeout,
			RateLimiter:             c.slots.RateLimiter(workqueue.NewTypedItemExponentialFailureRateLimiter[fleet.ID](minRetryDelay, maxRetryDelay)),
		})
	for _, cluster := range fleet.NewObjects() {
		controllerBuilder = controllerBuilder.Watches(cluster, enqueueDelayed(idOf), builder.WithPredicates(c.Shard.Predicate(), clusterChanged()))
	}
	return controllerBuilder.Complete(reconcile.TypedFunc[fleet.ID](c.reconcileInSlot))
}

// reconcileInSlot calls Reconcile if the namespace of the cluster has a free worker. Otherwise slots queues the request
// again when the namespace has one.
func (c *Controller) reconcileInSlot(ctx context.Context, id fleet.ID) (reconcile.Result, error) {
	key := slots.Key{Name: id.Namespace, Max: namespaceWorkers, Shared: namespaceWorkers}
	slot, ok := c.slots.Acquire(id, slots.Pool{Workers: workers, Slow: workers}, key)
	if !ok {
		return reconcile.Result{}, nil
	}
	defer slot.Release()
	return c.Reconcile(ctx, id)
}

// enqueueDelayed enqueues the clusters of an event after eventDelay.
func enqueueDelayed(mapFunc func(context.Context, client.Object) []fleet.ID) handler.TypedEventHandler[client.Object, fleet.ID] {
	enqueue := func(ctx context.Context, obj client.Object, queue workqueue.TypedRateLimitingInterface[fleet.ID]) {
		for _, id := range mapFunc(ctx, obj) {
			queue.AddAfter(id, eventDelay)
		}
	}
	return handler.TypedFuncs[client.Object, fleet.ID]{
		CreateFunc: func(ctx context.Context, e event.CreateEvent, q workqueue.TypedRateLimitingInterface[fleet.ID]) {
			enqueue(ctx, e.Object, q)
		},
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q workqueue.TypedRateLimitingInterface[fleet.ID]) {
			enqueue(ctx, e.ObjectNew, q)
		},
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q workqueue.TypedRateLimitingInterface[fleet.ID]) {
			enqueue(ctx, e.Object, q)
		},
	}
}

// recordDeletions selects deletions and adds them to seenDeleted. It does not add an object that is only missing in a
// relist (DeleteStateUnknown), since the watch may have missed that the object was created again. It does not add a
// summary that only got the label of another shard.
func (c *Controller) recordDeletions() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return false },
		UpdateFunc: func(event.UpdateEvent) bool { return false },
		DeleteFunc: func(e event.DeleteEvent) bool {
			if !e.DeleteStateUnknown && !c.canHaveMoved(e.Object) {
				c.seenDeleted.Add(deletionOf(e.Object), true)
			}
			return true
		},
	}
}

// canHaveMoved returns whether obj may have left the cache because its shard label changed: it is a summary that was
// not being deleted. The cache of the default shard has all summaries.
func (c *Controller) canHaveMoved(obj client.Object) bool {
	_, isSummary := obj.(*configv1beta1.ClusterSummary)
	return isSummary && !c.Shard.IsDefault() && obj.GetDeletionTimestamp().IsZero()
}

// deletion identifies a deleted object.
type deletion struct{ kind, namespace, name string }

func deletionOf(obj client.Object) deletion {
	kind := configv1beta1.ClusterSummaryKind
	switch obj.(type) {
	case *configv1beta1.ClusterProfile:
		kind = configv1beta1.ClusterProfileKind
	case *configv1beta1.Profile:
		kind = configv1beta1.ProfileKind
	}
	return deletion{kind: kind, namespace: obj.GetNamespace(), name: obj.GetName()}
}

// withdrawalCompleted selects updates of groups whose agent reports that the withdrawal is complete.
func withdrawalCompleted() predicate.Predicate {
	return predicate.Funcs{
		DeleteFunc: func(event.DeleteEvent) bool { return false },
		CreateFunc: func(event.CreateEvent) bool { return false },
		UpdateFunc: func(e event.UpdateEvent) bool {
			group := e.ObjectNew.(*libv1beta1.ConfigurationGroup)
			return group.Spec.Action == libv1beta1.ActionRemove && deliver.ReportOf(group).State == bundle.StateRemoved
		},
	}
}

// unrequestedChanged selects changes of the Lease annotation in which the agent lists bundles without a group.
func unrequestedChanged() predicate.Predicate {
	return predicate.Funcs{
		DeleteFunc: func(event.DeleteEvent) bool { return false },
		CreateFunc: func(event.CreateEvent) bool { return false },
		UpdateFunc: func(e event.UpdateEvent) bool {
			return e.ObjectOld.GetAnnotations()[kube.AnnotationUnrequested] != e.ObjectNew.GetAnnotations()[kube.AnnotationUnrequested]
		},
	}
}

// clusterChanged selects new clusters and the changes that affect a reconcile: reachability, pause, finalizer, shard,
// the shard of its labels, refusal and the withdraw annotation.
func clusterChanged() predicate.Predicate {
	return predicate.Funcs{
		DeleteFunc: func(event.DeleteEvent) bool { return false },
		UpdateFunc: func(e event.UpdateEvent) bool {
			before, after := fleet.FromObject(e.ObjectOld), fleet.FromObject(e.ObjectNew)
			withdrawChanged := e.ObjectOld.GetAnnotations()[kube.AnnotationWithdraw] != e.ObjectNew.GetAnnotations()[kube.AnnotationWithdraw]
			return withdrawChanged || isReachable(before) != isReachable(after) || before.Paused != after.Paused || before.HasFinalizer != after.HasFinalizer ||
				before.Shard != after.Shard || labelledShard(e.ObjectOld) != labelledShard(e.ObjectNew) || before.Refused != after.Refused
		},
	}
}

func labelledShard(cluster client.Object) string {
	return cluster.GetAnnotations()[kube.AnnotationLabelledShard]
}

func isReachable(m fleet.Member) bool { return m.Ready && !m.Down }

func noClusters(context.Context, client.Object) []fleet.ID { return nil }

func idOf(_ context.Context, obj client.Object) []fleet.ID {
	return []fleet.ID{fleet.FromObject(obj).ID()}
}

func (c *Controller) clustersOfSummary(_ context.Context, obj client.Object) []fleet.ID {
	return []fleet.ID{match.MemberID(obj.(*configv1beta1.ClusterSummary))}
}

// clustersOfGroup returns the cluster of a group whose summary does not exist, nothing for other groups.
func (c *Controller) clustersOfGroup(ctx context.Context, obj client.Object) []fleet.ID {
	id, ok := deliver.IDOf(obj)
	ref := obj.(*libv1beta1.ConfigurationGroup).Spec.SourceRef
	if !ok || ref == nil || id.RequestorKind != configv1beta1.ClusterSummaryKind {
		return nil
	}
	err := c.Hub.Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: id.RequestorName}, &configv1beta1.ClusterSummary{})
	if !apierrors.IsNotFound(err) {
		return nil
	}
	return c.clustersOfNamespace(ctx, obj.GetNamespace())
}

// clustersOfLease returns the cluster of an agent's Lease.
func (c *Controller) clustersOfLease(ctx context.Context, obj client.Object) []fleet.ID {
	return c.clustersOfNamespace(ctx, obj.GetNamespace())
}

// clustersOfNamespace returns the pull clusters with this delivery namespace.
func (c *Controller) clustersOfNamespace(ctx context.Context, namespace string) []fleet.ID {
	members, err := fleet.List(ctx, c.Hub, client.MatchingFields{deliveryIndex: namespace})
	if err != nil {
		log.FromContext(ctx).Error(err, "list the clusters of a delivery namespace")
		return nil
	}
	all := make([]fleet.ID, 0, len(members))
	for _, m := range members {
		all = append(all, m.ID())
	}
	return all
}

// deliveryNamespaceOf returns the delivery namespace of a pull cluster, nothing for a push cluster.
func deliveryNamespaceOf(cluster client.Object) []string {
	if m := fleet.FromObject(cluster); m.Mode == fleet.Pull {
		return []string{m.DeliveryNamespace}
	}
	return nil
}

// Reconcile handles the unclaimed bundles on one cluster.
func (c *Controller) Reconcile(ctx context.Context, id fleet.ID) (reconcile.Result, error) {
	member, cluster, err := fleet.Get(ctx, c.Hub, id.Type, id.Namespace, id.Name)
	if apierrors.IsNotFound(err) || (err == nil && !c.Shard.SeesAll(cluster)) {
		return reconcile.Result{}, nil
	}
	if err != nil {
		return reconcile.Result{}, err
	}
	if member.Deleting || member.Paused || !member.HasFinalizer || member.Refused != "" || !isReachable(member) {
		return reconcile.Result{}, nil // a watch event triggers the next reconcile; a deregistration uses BundleWithdrawer
	}
	ctx = log.IntoContext(ctx, log.FromContext(ctx).WithValues(logkeys.Member, member.Key()))
	s := &state{cluster: cluster, member: member}
	outcome := phase.Run(ctx, s, []phase.Step[*state]{
		{Name: "list bundles", Run: c.listBundles},
		{Name: "withdraw", Run: c.withdrawBundles},
		{Name: "delete stale entries", Run: c.deleteStaleEntries},
		{Name: "delete withdraw annotation", Run: c.deleteWithdrawAnnotation},
		{Name: "patch condition", Run: c.patchCondition},
	})
	if apierrors.IsConflict(outcome.Err) {
		return reconcile.Result{RequeueAfter: eventDelay}, nil
	}
	if outcome.Err != nil {
		return reconcile.Result{}, fmt.Errorf("handle unclaimed bundles on cluster %s: %w", member.Key(), outcome.Err)
	}
	switch {
	case s.isWithdrawing:
		return reconcile.Result{RequeueAfter: eventDelay}, nil
	case s.withdrawnCount > 0 || len(s.kept) > 0:
		// No event triggers a reconcile when a new summary claims a kept bundle.
		return reconcile.Result{RequeueAfter: unclaimedResyncInterval}, nil
	}
	return reconcile.Result{RequeueAfter: wait.Jitter(resyncInterval, resyncJitter)}, nil
}
