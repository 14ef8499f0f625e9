package departures

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

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/registrations"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/phase"
)

const (
	// workers is how many clusters leave at once. One that does not answer keeps its worker for the limit of one contact, at each look: those of
	// 150 clusters are needed for them to be late.
	workers = 50
	// recheck is the time between two looks at what is waited for: no watch tells that an agent falls silent, or that a namespace goes.
	recheck = 30 * time.Second
	// unwatchedRecheck is the same for what takes seconds.
	unwatchedRecheck = 2 * time.Second
	// dismissLimit is how long a push member may take to remove our identity: about five requests.
	dismissLimit = 30 * time.Second
	// retryFirst and retryMost are the first and the longest pause before a failed attempt is repeated; each is twice the one before.
	retryFirst = 500 * time.Millisecond
	retryMost  = time.Minute
	// reconcileLimit bounds one reconcile. What was not finished goes on with the next attempt.
	reconcileLimit = 2 * time.Minute
)

// Controller carries out deregistrations: of every SveltosCluster that is being deleted and bears kube.FinalizerCluster.
type Controller struct {
	// Hub reads SveltosClusters and ClusterSummaries from a cache; Live reads from the API server.
	Hub  client.Client
	Live client.Client
	// Kinds lists what can be in a namespace that is to go.
	Kinds join.Kinds
	// Reach knows whether members can be reached.
	Reach *Reach
	// Config says how to connect to a push member.
	Config func(ctx context.Context, m fleet.Member) (*rest.Config, error)
	// RetractMember removes from a push member the identity that its registration made there for this hub.
	RetractMember func(ctx context.Context, member *rest.Config, hubUID string, cluster *libv1beta1.SveltosCluster) error
	// WithdrawRest withdraws what a member holds beyond its summaries: it returns what is not withdrawn yet, and what others deployed, which stays.
	WithdrawRest func(ctx context.Context, m fleet.Member) (pending, kept []string, err error)
	// Forget drops what is kept of a member "namespace/name" that is given up, and cuts off what is being done to it; it may be nil.
	Forget func(member string)
	// Turns keeps a registration from making again what a departure takes back.
	Turns *registrations.ClusterLocks
	// Shard is the one whose clusters are looked after.
	Shard  fleet.Shard
	Events events.EventRecorder
	Clock  clock.PassiveClock
}

// Setup makes mgr run the controller.
func (c *Controller) Setup(_ context.Context, mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).
		Named("departures").
		For(&libv1beta1.SveltosCluster{}, builder.WithPredicates(leaving(), c.Shard.Predicate())).
		Watches(&configv1beta1.ClusterSummary{}, handler.EnqueueRequestsFromMapFunc(c.ofSummary), builder.WithPredicates(summaryLeaving())).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: workers,
			ReconciliationTimeout:   reconcileLimit,
			RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](retryFirst, retryMost),
		}).
		Complete(c)
}

// leaving passes news of clusters that are being deleted, heartbeats and the echo of our own status apart.
func leaving() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return !e.Object.GetDeletionTimestamp().IsZero() },
		UpdateFunc: func(e event.UpdateEvent) bool {
			before, after := e.ObjectOld.(*libv1beta1.SveltosCluster), e.ObjectNew.(*libv1beta1.SveltosCluster)
			return !after.DeletionTimestamp.IsZero() && !equality.Semantic.DeepEqual(steady(before), steady(after))
		},
		DeleteFunc: func(event.DeleteEvent) bool { return false },
	}
}

// steady returns what of a cluster object can matter to its departure.
func steady(cluster *libv1beta1.SveltosCluster) any {
	s := cluster.Status
	return []any{
		cluster.DeletionTimestamp, cluster.Annotations, cluster.Finalizers, cluster.Spec,
		s.Ready, s.ConnectionStatus, s.AgentRemovedAt, s.FailureMessage,
	}
}

// summaryLeaving passes news of summaries that may be what a departure waits for.
func summaryLeaving() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool { return !e.ObjectNew.GetDeletionTimestamp().IsZero() }}
}

// ofSummary names the cluster of a summary, if it is being deleted.
func (c *Controller) ofSummary(ctx context.Context, obj client.Object) []reconcile.Request {
	spec := obj.(*configv1beta1.ClusterSummary).Spec
	name := types.NamespacedName{Namespace: spec.ClusterNamespace, Name: spec.ClusterName}
	cluster := &libv1beta1.SveltosCluster{}
	if err := c.Hub.Get(ctx, name, cluster); err != nil || cluster.DeletionTimestamp.IsZero() {
		return nil
	}
	return []reconcile.Request{{NamespacedName: name}}
}

// Reconcile takes one cluster a step nearer to its end.
func (c *Controller) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	cluster, leaves, err := c.leavingCluster(ctx, req)
	if err != nil || !leaves {
		return reconcile.Result{}, err
	}
	ctx = log.IntoContext(ctx, log.FromContext(ctx).WithValues(logkeys.Member, req.String()))
	s := &state{cluster: cluster, member: fleet.FromSveltosCluster(cluster)}
	outcome := phase.Run(ctx, s, []phase.Step[*state]{
		{Name: "force", Run: c.force},
		{Name: "withdraw", Run: c.withdraw},
		{Name: "withdraw the rest", Run: c.withdrawRest},
		{Name: "dismiss", Run: c.dismiss},
		{Name: "retract", Run: c.retract},
		{Name: "release", Run: c.release},
	})
	reported := c.report(ctx, s, outcome)
	if apierrors.IsConflict(outcome.Err) {
		// The cache is behind, and what it lacks will wake us.
		return reconcile.Result{RequeueAfter: retryFirst}, nil
	}
	if outcome.Kind == phase.Waiting {
		return reconcile.Result{RequeueAfter: c.next(s)}, reported
	}
	if outcome.Err != nil {
		return reconcile.Result{}, fmt.Errorf("deregister cluster %s: %w", req, outcome.Err)
	}
	return reconcile.Result{}, reported
}

// leavingCluster reads the cluster, and says whether it is ours to take out of the fleet. What the cache says is confirmed by
// the API server: a cluster that the cache still has may have left, and be registered again by now.
func (c *Controller) leavingCluster(ctx context.Context, req reconcile.Request) (cluster *libv1beta1.SveltosCluster, leaves bool, err error) {
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

// next says when to look again if no watch tells of anything until then.
func (c *Controller) next(s *state) time.Duration {
	if s.unwatched {
		return unwatchedRecheck
	}
	if s.member.Forced {
		if left := c.remaining(s); left > 0 {
			return left
		}
		return recheck
	}
	grace := s.cluster.Spec.CleanupGracePeriod
	if grace == nil {
		return recheck
	}
	left := grace.Duration - c.Clock.Since(s.cluster.DeletionTimestamp.Time)
	if left <= 0 {
		// It is over, and counts once the member is away.
		return recheck
	}
	return min(recheck, max(left, retryFirst))
}
