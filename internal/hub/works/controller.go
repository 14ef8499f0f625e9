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
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/works"
)

const (
	// workers is how many Works are worked on at once, and clusterWorkers how many of one cluster. Once sharedWorkers are at work, the rest are
	// for clusters that nobody works on: several that fall silent together leave them free.
	workers        = 50
	clusterWorkers = 20
	sharedWorkers  = 30
	// retryFirst and retryMost are the first and the longest pause before a failed attempt is repeated; each is twice the one before.
	retryFirst = 500 * time.Millisecond
	retryMost  = 5 * time.Minute
	// reconcileLimit bounds one reconcile: the cluster has its time twice, to do and to show, and others may be waited for before.
	reconcileLimit = 3 * works.Limit
	// staleFirst and staleMost are how long a reconcile that saw an old state waits for the cache to catch up; each is twice the one before.
	staleFirst = 100 * time.Millisecond
	staleMost  = 10 * time.Second
)

// Controller carries the Works of push Clusters out, one at a time for each Work. Those of pull Clusters are their agents'.
type Controller struct {
	// Hub reads Works and Clusters from a cache, and writes; Live reads from the API server.
	Hub  client.Client
	Live client.Reader
	// Shard is the part of the fleet that this hub looks after.
	Shard fleet.Shard
	// Engines returns the engine of a member. It is called for every reconcile and keeps what should be kept.
	Engines func(ctx context.Context, m fleet.Member) (works.Engine, error)
	// Woken tells of Works whose objects have news; see News.
	Woken <-chan event.GenericEvent
	Clock clock.PassiveClock
	// Limit bounds what is done on a cluster for one Work at a time. Default: works.Limit.
	Limit time.Duration

	slots *slots
	// stale paces the reconciles that see an old state.
	stale workqueue.TypedRateLimiter[reconcile.Request]
}

// News returns the event for Woken when an engine has news of id on m. ok is false if that is nothing about a Work.
func News(m fleet.Member, id bundle.ID) (news event.GenericEvent, ok bool) {
	if id.RequestorKind != workv1alpha1.WorkKind {
		return event.GenericEvent{}, false
	}
	return event.GenericEvent{Object: &workv1alpha1.Work{ObjectMeta: metav1.ObjectMeta{Namespace: m.Namespace, Name: id.RequestorName}}}, true
}

// Setup makes mgr run the controller.
func (c *Controller) Setup(_ context.Context, mgr ctrl.Manager) error {
	c.slots = newSlots()
	c.stale = workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](staleFirst, staleMost)
	return ctrl.NewControllerManagedBy(mgr).
		Named("works").
		For(&workv1alpha1.Work{}, builder.WithPredicates(wantedChanged())).
		Watches(&clusterv1alpha1.Cluster{}, handler.EnqueueRequestsFromMapFunc(c.ofCluster), builder.WithPredicates(c.Shard.Predicate(), memberChanged())).
		WatchesRawSource(ctrlsource.Channel(c.Woken, &handler.EnqueueRequestForObject{})).
		WatchesRawSource(ctrlsource.Func(func(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
			c.slots.queue = queue
			return nil
		})).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: workers,
			ReconciliationTimeout:   reconcileLimit,
			RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](retryFirst, retryMost),
		}).
		Complete(c)
}

// wantedChanged drops the echo of what this controller writes itself.
func wantedChanged() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		return !equality.Semantic.DeepEqual(wanted(e.ObjectOld), wanted(e.ObjectNew))
	}}
}

// wanted returns what of a Work can matter to what is done for it.
func wanted(work client.Object) any {
	return []any{work.GetGeneration(), work.GetLabels(), work.GetAnnotations(), work.GetFinalizers(), work.GetDeletionTimestamp()}
}

// memberChanged drops what a Cluster says of itself that does not matter to its Works.
func memberChanged() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		return !equality.Semantic.DeepEqual(steady(e.ObjectOld), steady(e.ObjectNew))
	}}
}

// steady returns what of a Cluster can matter to what is done for its Works.
func steady(obj client.Object) any {
	cluster := obj.(*clusterv1alpha1.Cluster)
	m := fleet.FromCluster(cluster)
	return []any{
		cluster.Generation, cluster.Finalizers, cluster.Annotations[kube.AnnotationDeregister], m.Ready, m.Down, m.Deleting, m.Refused, m.Shard, m.Hub,
	}
}

// ofCluster lists the Works of a Cluster.
func (c *Controller) ofCluster(ctx context.Context, cluster client.Object) []reconcile.Request {
	var list workv1alpha1.WorkList
	err := c.Hub.List(ctx, &list, client.InNamespace(fleet.ExecutionSpace(cluster.GetName())), client.UnsafeDisableDeepCopy)
	if err != nil {
		log.FromContext(ctx).Error(err, "find the Works of a cluster", logkeys.Member, cluster.GetName())
		return nil
	}
	all := make([]reconcile.Request, 0, len(list.Items))
	for i := range list.Items {
		all = append(all, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])})
	}
	return all
}

// Reconcile carries out one Work.
func (c *Controller) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	name, ok := fleet.ClusterOfExecutionSpace(req.Namespace)
	if !ok {
		return reconcile.Result{}, nil
	}
	if !c.slots.take(name, req) {
		return reconcile.Result{}, nil
	}
	silent := false
	defer func() { c.slots.give(name, silent) }()
	result, err := c.look(ctx, req, name)
	silent = errors.Is(err, works.ErrUnresponsive)
	if errors.Is(err, works.ErrStale) {
		return reconcile.Result{RequeueAfter: c.stale.When(req)}, nil
	}
	c.stale.Forget(req)
	return result, err
}

// look carries out a Work of the cluster with this name.
func (c *Controller) look(ctx context.Context, req reconcile.Request, name string) (reconcile.Result, error) {
	work := &workv1alpha1.Work{}
	if err := c.Hub.Get(ctx, req.NamespacedName, work); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	cluster := &clusterv1alpha1.Cluster{}
	err := c.Hub.Get(ctx, types.NamespacedName{Name: name}, cluster)
	if apierrors.IsNotFound(err) {
		return c.stray(ctx, work, name)
	}
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("read cluster %s: %w", name, err)
	}
	m := fleet.FromCluster(cluster)
	if m.Mode != fleet.Push || !c.Shard.Serves(cluster) {
		return reconcile.Result{}, nil
	}
	return c.execute(ctx, work, m, circumstances(cluster, m))
}

// circumstances says how a cluster stands. One that is removed and not reached is waited for until its removal abandons it: a status that says so
// may have been lost, and its removal asks the member.
func circumstances(cluster *clusterv1alpha1.Cluster, m fleet.Member) works.ClusterState {
	reachable := m.Ready && !m.Down && m.Refused == ""
	held := controllerutil.ContainsFinalizer(cluster, clusterv1alpha1.ClusterFinalizer)
	return works.ClusterState{
		Reachable:         reachable,
		UnreachableReason: m.Refused,
		// What is not held goes without a word: what was applied could not be withdrawn in order.
		Deregistering: m.Deleting || !held,
		Orphan:        m.Deleting && m.KeepAddons,
		Abandon:       m.Abandoned,
	}
}

// execute carries out a Work of a push member.
func (c *Controller) execute(ctx context.Context, work *workv1alpha1.Work, m fleet.Member, at works.ClusterState) (reconcile.Result, error) {
	executor := &works.Executor{Hub: c.Hub, Clock: c.Clock, Limit: c.Limit}
	deleted := !work.DeletionTimestamp.IsZero()
	switch {
	case deleted && at.Abandon:
	case deleted && !at.Reachable, !deleted && at.Deregistering:
		// News of the cluster or of the Work wakes this controller.
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
			return reconcile.Result{}, fmt.Errorf("reach member %s: %w", m.Key(), err)
		}
	}
	after, err := executor.Execute(ctx, work, at)
	return reconcile.Result{RequeueAfter: after}, err
}

// stray lets go of a deleted Work whose Cluster is gone, so that its namespace can go: nobody else will.
func (c *Controller) stray(ctx context.Context, work *workv1alpha1.Work, name string) (reconcile.Result, error) {
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
	after, err := (&works.Executor{Hub: c.Hub, Clock: c.Clock}).Execute(ctx, work, works.ClusterState{Abandon: true})
	return reconcile.Result{RequeueAfter: after}, err
}
