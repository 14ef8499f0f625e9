package deregistration

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
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
	"sigs.k8s.io/controller-runtime/pkg/source"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/ratelimit"
	"github.com/towline/towline/internal/hub/registration"
	"github.com/towline/towline/internal/hub/slots"
	"github.com/towline/towline/internal/join/foreign"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/phase"
)

const (
	// workers is the number of concurrent reconciles. A push member that does not answer occupies a worker for up to
	// contactTimeout in every pollInterval. Thus other members are delayed only if 150 members do not answer, or 120 in
	// their namespace.
	workers = 50
	// namespaceWorkers is the maximum number of workers for the members in one namespace, which belong to one tenant. The
	// other workers are reserved for namespaces without a running reconcile. In a fleet with one namespace they are idle.
	namespaceWorkers = 40
	// pollInterval is the interval between two checks of pending work: there is no watch for an agent that stops its
	// heartbeats, or for a namespace that is deleted.
	pollInterval = 30 * time.Second
	// shortPollInterval is the interval for pending work that takes seconds.
	shortPollInterval = 2 * time.Second
	// memberDeletionTimeout is the timeout for the deletion of the hub's identity on a push member: about five requests.
	memberDeletionTimeout = 30 * time.Second
	// retryMin and retryMax bound the delay before a failed reconcile is retried. The delay doubles with each failure.
	retryMin = 500 * time.Millisecond
	retryMax = time.Minute
	// reconcileTimeout limits one reconcile. The next reconcile continues with the unfinished steps.
	reconcileTimeout = 2 * time.Minute
	// The agent of a cluster can cause agentBurst reconciles of it at once, and then one per agentInterval.
	agentInterval = 6 * time.Second
	agentBurst    = 20
)

// Controller deregisters every SveltosCluster that is being deleted and has kube.FinalizerCluster.
type Controller struct {
	// Hub reads SveltosClusters and ClusterSummaries from a cache; Live reads from the API server.
	Hub  client.Client
	Live client.Client
	// Kinds discovers the kinds of objects on the hub. The hub deletes a namespace only if no objects of these kinds are
	// in it, except its own.
	Kinds foreign.Resources
	// Reachability checks whether members are reachable.
	Reachability *Reachability
	// Config returns the connection to a push member.
	Config func(ctx context.Context, m fleet.Member) (*rest.Config, error)
	// DeleteMemberObjects deletes the identity of this hub from a push member.
	DeleteMemberObjects func(ctx context.Context, member *rest.Config, hubUID string, cluster *libv1beta1.SveltosCluster) error
	// WithdrawRemaining withdraws this hub's bundles without a summary from a member, or from the hub for a Member.OnHub:
	// see unclaimed.BundleWithdrawer. It describes the bundles whose withdrawal is pending, and the bundles of other hubs,
	// which stay.
	WithdrawRemaining func(ctx context.Context, m fleet.Member) (pending, kept []string, err error)
	// Forget discards the cached state of an abandoned member "namespace/name", and cancels running operations on it. It
	// may be nil.
	Forget func(member string)
	// Locks excludes package registration while the objects of a registration are deleted.
	Locks *registration.ClusterLocks
	// Shard selects the clusters of this controller.
	Shard  fleet.Shard
	Events events.EventRecorder
	Clock  clock.PassiveClock

	// slots shares the workers among namespaces.
	slots *slots.Slots
}

// Setup adds the controller to mgr.
func (c *Controller) Setup(_ context.Context, mgr ctrl.Manager) error {
	c.slots = slots.New()
	agentLimiter := ratelimit.New(agentInterval, agentBurst, c.Clock)
	return ctrl.NewControllerManagedBy(mgr).
		Named("departures").
		Watches(&libv1beta1.SveltosCluster{}, agentLimiter.Handler(requestFor, ratelimit.ByAgentOfCluster), builder.WithPredicates(deregistering(), c.Shard.Predicate())).
		Watches(&configv1beta1.ClusterSummary{}, handler.EnqueueRequestsFromMapFunc(c.clusterOfSummary), builder.WithPredicates(summaryDeleting())).
		WatchesRawSource(source.Func(func(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
			c.slots.Queue = queue
			return nil
		})).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: workers,
			ReconciliationTimeout:   reconcileTimeout,
			RateLimiter:             c.slots.RateLimiter(workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](retryMin, retryMax)),
		}).
		Complete(reconcile.Func(c.reconcileInSlot))
}

// reconcileInSlot calls Reconcile if the namespace of the cluster has a free worker. Otherwise slots queues the request
// again when the namespace has one.
func (c *Controller) reconcileInSlot(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	key := slots.Key{Name: req.Namespace, Max: namespaceWorkers, Shared: namespaceWorkers}
	slot, ok := c.slots.Acquire(req, slots.Pool{Workers: workers, Slow: workers}, key)
	if !ok {
		return reconcile.Result{}, nil
	}
	defer slot.Release()
	return c.Reconcile(ctx, req)
}

// deregistering selects events of clusters that are being deleted, except heartbeats.
func deregistering() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return !e.Object.GetDeletionTimestamp().IsZero() },
		UpdateFunc: func(e event.UpdateEvent) bool {
			before, after := e.ObjectOld.(*libv1beta1.SveltosCluster), e.ObjectNew.(*libv1beta1.SveltosCluster)
			return !after.DeletionTimestamp.IsZero() && !equality.Semantic.DeepEqual(relevantFields(before), relevantFields(after))
		},
		DeleteFunc: func(event.DeleteEvent) bool { return false },
	}
}

// relevantFields returns the fields of a cluster that its deregistration depends on.
func relevantFields(cluster *libv1beta1.SveltosCluster) any {
	s := cluster.Status
	return []any{
		cluster.DeletionTimestamp, cluster.Annotations, cluster.Finalizers, cluster.Spec,
		s.Ready, s.ConnectionStatus, s.AgentRemovedAt, s.FailureMessage,
	}
}

// requestFor returns the request for a cluster.
func requestFor(_ context.Context, cluster client.Object) []reconcile.Request {
	return []reconcile.Request{{NamespacedName: client.ObjectKeyFromObject(cluster)}}
}

// summaryDeleting ignores updates of summaries that are not being deleted.
func summaryDeleting() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool { return !e.ObjectNew.GetDeletionTimestamp().IsZero() }}
}

// clusterOfSummary maps a summary to its cluster if the cluster is being deleted.
func (c *Controller) clusterOfSummary(ctx context.Context, obj client.Object) []reconcile.Request {
	name := types.NamespacedName{Namespace: obj.GetNamespace(), Name: obj.(*configv1beta1.ClusterSummary).Spec.ClusterName}
	cluster := &libv1beta1.SveltosCluster{}
	if err := c.Hub.Get(ctx, name, cluster); err != nil || cluster.DeletionTimestamp.IsZero() {
		return nil
	}
	return []reconcile.Request{{NamespacedName: name}}
}

// Reconcile starts or continues the deregistration of one cluster.
func (c *Controller) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	cluster, found, err := c.getDeregistering(ctx, req)
	if err != nil || !found {
		return reconcile.Result{}, err
	}
	ctx = log.IntoContext(ctx, log.FromContext(ctx).WithValues(logkeys.Member, req.String()))
	s := &state{cluster: cluster, member: fleet.FromSveltosCluster(cluster)}
	outcome := phase.Run(ctx, s, []phase.Step[*state]{
		{Name: "check force", Run: c.checkForce},
		{Name: "withdraw", Run: c.withdraw},
		{Name: "withdraw remaining", Run: c.withdrawRemaining},
		{Name: "remove registration", Run: c.removeRegistration},
		{Name: "delete hub objects", Run: c.deleteHubObjects},
		{Name: "remove finalizer", Run: c.removeFinalizer},
	})
	reported := c.report(ctx, s, outcome)
	if apierrors.IsConflict(outcome.Err) {
		// The cache is stale. Its update triggers a reconcile.
		return reconcile.Result{RequeueAfter: retryMin}, nil
	}
	if outcome.Kind == phase.Waiting {
		return reconcile.Result{RequeueAfter: c.requeueAfter(s)}, reported
	}
	if outcome.Err != nil {
		return reconcile.Result{}, fmt.Errorf("deregister cluster %s: %w", req, outcome.Err)
	}
	return reconcile.Result{}, reported
}

// getDeregistering reads a cluster. found is false unless this controller must deregister it. It reads the cache and
// then the API server, since a cluster in the cache may have been deleted and registered again.
func (c *Controller) getDeregistering(ctx context.Context, req reconcile.Request) (cluster *libv1beta1.SveltosCluster, found bool, err error) {
	for _, hubClient := range []client.Client{c.Hub, c.Live} {
		cluster = &libv1beta1.SveltosCluster{}
		if err := hubClient.Get(ctx, req.NamespacedName, cluster); err != nil {
			return nil, false, client.IgnoreNotFound(err)
		}
		if cluster.DeletionTimestamp.IsZero() || !controllerutil.ContainsFinalizer(cluster, kube.FinalizerCluster) || !c.Shard.Serves(cluster) {
			return nil, false, nil
		}
	}
	return cluster, true, nil
}

// requeueAfter returns the delay before the next reconcile if no watch triggers one.
func (c *Controller) requeueAfter(s *state) time.Duration {
	if s.pollSoon {
		return shortPollInterval
	}
	if s.member.Forced {
		if remaining := c.timeLeft(s); remaining > 0 {
			return remaining
		}
		return pollInterval
	}
	grace := s.cluster.Spec.CleanupGracePeriod
	if grace == nil {
		return pollInterval
	}
	remaining := grace.Duration - c.Clock.Since(s.cluster.DeletionTimestamp.Time)
	if remaining <= 0 {
		// The grace period has expired. It takes effect when the member is unreachable.
		return pollInterval
	}
	return min(pollInterval, max(remaining, retryMin))
}
