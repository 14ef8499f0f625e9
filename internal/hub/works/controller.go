package works

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	ctrlsource "sigs.k8s.io/controller-runtime/pkg/source"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/slots"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/works"
)

const (
	// workers is the number of concurrent reconciles, clusterWorkers the maximum for one cluster, and silentWorkers the
	// maximum for all clusters that did not answer. When sharedWorkers are in use, the other workers serve only clusters
	// that have none, so that several unresponsive clusters cannot occupy all workers.
	workers        = 50
	clusterWorkers = 20
	sharedWorkers  = 30
	silentWorkers  = 20
	// retryMin and retryMax bound the delay before a failed reconcile is retried. The delay doubles with each failure.
	retryMin = 500 * time.Millisecond
	retryMax = 5 * time.Minute
	// reconcileTimeout limits one reconcile: it may use the limit of a cluster twice, to execute a Work and to report,
	// and wait for other reconciles before.
	reconcileTimeout = 3 * works.DefaultLimit
	// staleMin and staleMax bound the delay before a reconcile with a stale cache is retried. The delay doubles with
	// each retry.
	staleMin = 100 * time.Millisecond
	staleMax = 10 * time.Second
)

// Controller executes the Works of push Clusters, one reconcile at a time for each Work. The agents execute the Works
// of pull Clusters.
type Controller struct {
	// Hub reads Works and Clusters from a cache, and writes. The Works in the cache need no manifestStatuses. Live reads
	// from the API server.
	Hub  client.Client
	Live client.Reader
	// Shard selects the Clusters of this controller.
	Shard fleet.Shard
	// Engines returns the engine of a member. It is called for every reconcile, so it should cache engines.
	Engines func(ctx context.Context, m fleet.Member) (works.Engine, error)
	// Changes has an event for each Work whose objects have changed on the member; see ChangeEvent.
	Changes <-chan event.GenericEvent
	Clock   clock.PassiveClock
	// Limit is the time limit of one Work on a cluster. Default: works.DefaultLimit.
	Limit time.Duration

	slots *slots.Slots
	// stale delays the reconciles with a stale cache.
	stale workqueue.TypedRateLimiter[reconcile.Request]
}

// ChangeEvent returns the event for Changes when an engine reports a change of bundle id on m. ok is false if id is not
// the bundle of a Work.
func ChangeEvent(m fleet.Member, id bundle.ID) (changeEvent event.GenericEvent, ok bool) {
	if id.RequestorKind != workv1alpha1.WorkKind {
		return event.GenericEvent{}, false
	}
	return event.GenericEvent{Object: &workv1alpha1.Work{ObjectMeta: metav1.ObjectMeta{Namespace: m.Namespace, Name: id.RequestorName}}}, true
}

// Setup adds the controller to mgr.
func (c *Controller) Setup(_ context.Context, mgr ctrl.Manager) error {
	c.slots = slots.New()
	c.stale = workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](staleMin, staleMax)
	return ctrl.NewControllerManagedBy(mgr).
		Named("works").
		For(&workv1alpha1.Work{}, builder.WithPredicates(workChanged())).
		Watches(&clusterv1alpha1.Cluster{}, handler.EnqueueRequestsFromMapFunc(c.worksOfCluster), builder.WithPredicates(c.Shard.Predicate(), clusterChanged())).
		WatchesRawSource(ctrlsource.Channel(c.Changes, &handler.EnqueueRequestForObject{})).
		WatchesRawSource(ctrlsource.Func(func(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
			c.slots.Queue = queue
			return nil
		})).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: workers,
			ReconciliationTimeout:   reconcileTimeout,
			RateLimiter:             c.slots.RateLimiter(workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](retryMin, retryMax)),
		}).
		Complete(c)
}

// workChanged drops updates that change only the status, which this controller writes.
func workChanged() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		return !equality.Semantic.DeepEqual(relevantWorkFields(e.ObjectOld), relevantWorkFields(e.ObjectNew))
	}}
}

// relevantWorkFields returns the fields of a Work that its execution depends on.
func relevantWorkFields(work client.Object) any {
	return []any{work.GetGeneration(), work.GetLabels(), work.GetAnnotations(), work.GetFinalizers(), work.GetDeletionTimestamp()}
}

// clusterChanged drops updates of a Cluster that cannot change the execution of its Works. The Works of a pull Cluster
// are executed by its agent, which writes its status as often as it wants.
func clusterChanged() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		isPush := fleet.FromObject(e.ObjectNew).Mode == fleet.Push
		return isPush && !equality.Semantic.DeepEqual(relevantClusterFields(e.ObjectOld), relevantClusterFields(e.ObjectNew))
	}}
}

// relevantClusterFields returns the fields of a Cluster that the execution of its Works depends on.
func relevantClusterFields(obj client.Object) any {
	cluster := obj.(*clusterv1alpha1.Cluster)
	m := fleet.FromCluster(cluster)
	return []any{
		cluster.Generation, cluster.Finalizers, cluster.Annotations[kube.AnnotationDeregister], m.Ready, m.Down, m.Deleting, m.Refused, m.Shard, m.Hub,
	}
}

// worksOfCluster maps a Cluster to its Works.
func (c *Controller) worksOfCluster(ctx context.Context, cluster client.Object) []reconcile.Request {
	var list workv1alpha1.WorkList
	err := c.Hub.List(ctx, &list, client.InNamespace(fleet.ExecutionSpace(cluster.GetName())), client.UnsafeDisableDeepCopy)
	if err != nil {
		log.FromContext(ctx).Error(err, "list the Works of a cluster", logkeys.Member, cluster.GetName())
		return nil
	}
	all := make([]reconcile.Request, 0, len(list.Items))
	for i := range list.Items {
		all = append(all, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])})
	}
	return all
}

// Reconcile executes one Work.
func (c *Controller) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	name, ok := fleet.ClusterOfExecutionSpace(req.Namespace)
	if !ok {
		return reconcile.Result{}, nil
	}
	slot, ok := c.slots.Acquire(req, slots.Pool{Workers: workers, Slow: silentWorkers}, slots.Key{Name: name, Max: clusterWorkers, Shared: sharedWorkers})
	if !ok {
		return reconcile.Result{}, nil
	}
	var silent []string
	defer func() { slot.Release(silent...) }()
	result, err := c.reconcileWork(ctx, req, name)
	if errors.Is(err, works.ErrUnresponsive) {
		silent = []string{name}
	}
	if errors.Is(err, works.ErrStale) {
		return reconcile.Result{RequeueAfter: c.stale.When(req)}, nil
	}
	c.stale.Forget(req)
	return result, err
}

// reconcileWork executes a Work of the cluster with this name.
func (c *Controller) reconcileWork(ctx context.Context, req reconcile.Request, name string) (reconcile.Result, error) {
	work := &workv1alpha1.Work{}
	if err := c.Hub.Get(ctx, req.NamespacedName, work); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	cluster := &clusterv1alpha1.Cluster{}
	err := c.Hub.Get(ctx, types.NamespacedName{Name: name}, cluster)
	if apierrors.IsNotFound(err) {
		return c.releaseOrphaned(ctx, work, name)
	}
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("read cluster %s: %w", name, err)
	}
	m := fleet.FromCluster(cluster)
	if m.Mode != fleet.Push || !c.Shard.Serves(cluster) {
		return reconcile.Result{}, nil
	}
	work = &workv1alpha1.Work{} // the one in the cache has no manifestStatuses
	if err := c.Live.Get(ctx, req.NamespacedName, work); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	return c.execute(ctx, work, m, clusterState(cluster, m))
}

// clusterState returns the state of a cluster for the execution of its Works. A Work of an unreachable cluster that is
// being removed waits until the removal abandons the cluster: the status may be lost, so the removal checks the member
// itself.
func clusterState(cluster *clusterv1alpha1.Cluster, m fleet.Member) works.ClusterState {
	reachable := m.Ready && !m.Down && m.Refused == ""
	hasFinalizer := controllerutil.ContainsFinalizer(cluster, clusterv1alpha1.ClusterFinalizer)
	return works.ClusterState{
		Reachable:         reachable,
		UnreachableReason: m.Refused,
		// Without the finalizer, the Cluster can be deleted before applied objects are withdrawn.
		Deregistering: m.Deleting || !hasFinalizer,
		Orphan:        m.Deleting && m.KeepAddons,
		Abandon:       m.Abandoned,
	}
}

// execute executes a Work of a push member.
func (c *Controller) execute(ctx context.Context, work *workv1alpha1.Work, m fleet.Member, at works.ClusterState) (reconcile.Result, error) {
	executor := &works.Executor{Hub: c.Hub, Clock: c.Clock, Limit: c.Limit}
	deleted := !work.DeletionTimestamp.IsZero()
	switch {
	case deleted && at.Abandon:
	case deleted && !at.Reachable, !deleted && at.Deregistering:
		// A change of the cluster or of the Work triggers the next reconcile.
		return reconcile.Result{}, nil
	default:
		err := works.EnsureFinalizer(ctx, c.Hub, work)
		if apierrors.IsConflict(err) {
			return reconcile.Result{}, fmt.Errorf("%w: %w", works.ErrStale, err)
		}
		if err != nil {
			return reconcile.Result{}, err
		}
		if !at.Reachable {
			break
		}
		if executor.Engine, err = c.Engines(ctx, m); err != nil {
			return reconcile.Result{}, fmt.Errorf("connect to member %s: %w", m.Key(), err)
		}
	}
	return reconcile.Result{}, executor.Execute(ctx, work, at)
}

// releaseOrphaned releases a deleted Work whose Cluster is deleted, so that its namespace can be deleted.
func (c *Controller) releaseOrphaned(ctx context.Context, work *workv1alpha1.Work, name string) (reconcile.Result, error) {
	if work.DeletionTimestamp.IsZero() || !c.Shard.IsDefault() {
		return reconcile.Result{}, nil
	}
	err := c.Live.Get(ctx, types.NamespacedName{Name: name}, &clusterv1alpha1.Cluster{})
	if err == nil {
		return reconcile.Result{}, works.ErrStale
	}
	if !apierrors.IsNotFound(err) {
		return reconcile.Result{}, fmt.Errorf("read cluster %s: %w", name, err)
	}
	return reconcile.Result{}, (&works.Executor{Hub: c.Hub, Clock: c.Clock}).Execute(ctx, work, works.ClusterState{Abandon: true})
}
