package spaces

import (
	"context"
	"errors"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/phase"
)

const (
	// workers is how many Clusters are worked on at once. One that leaves and does not answer keeps its worker for the limit of one contact.
	workers = 50
	// retryFirst and retryMost are the first and the longest pause before a failed attempt is repeated; each is twice the one before.
	retryFirst = 200 * time.Millisecond
	retryMost  = 30 * time.Second
	// reconcileLimit bounds one reconcile. What was not finished goes on with the next attempt.
	reconcileLimit = time.Minute
)

// Controller looks after the execution spaces of Clusters. It claims the id of each one, holds it with clusterv1alpha1.ClusterFinalizer, makes its
// execution space, sees that its Works are not deleted unnoticed, and carries out its removal.
type Controller struct {
	// Hub reads Clusters from a cache; Live reads from the API server.
	Hub  client.Client
	Live client.Client
	// Shard is the one whose clusters are looked after.
	Shard fleet.Shard
	// Config says how to connect to a push member.
	Config func(ctx context.Context, m fleet.Member) (*rest.Config, error)
	// WithdrawRest withdraws what a member holds beyond its summaries and Works: it returns what is not withdrawn yet, and what others deployed,
	// which stays.
	WithdrawRest func(ctx context.Context, m fleet.Member) (pending, kept []string, err error)
	// Forget drops what is kept of a member "namespace/name" that is gone or given up, and cuts off what is being done to it; it may be nil.
	Forget func(member string)
	// Heartbeats judges the agents of pull members.
	Heartbeats *heartbeats.Judge
	Events     events.EventRecorder
	Clock      clock.PassiveClock

	patience patience
}

// Setup makes mgr run the controller.
func (c *Controller) Setup(_ context.Context, mgr ctrl.Manager) error {
	spaces := &metav1.PartialObjectMetadata{}
	spaces.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	inSpace := handler.EnqueueRequestsFromMapFunc(c.ofSpace)
	clusters := ctrl.NewControllerManagedBy(mgr).
		Named("spaces").
		For(&clusterv1alpha1.Cluster{}, builder.WithPredicates(c.Shard.Predicate(), wantedChanged())).
		Watches(&clusterv1alpha1.Cluster{}, handler.EnqueueRequestsFromMapFunc(c.rivals), builder.WithPredicates(gone())).
		Watches(&workv1alpha1.Work{}, inSpace, builder.WithPredicates(gone())).
		Watches(&configv1beta1.ClusterSummary{}, inSpace, builder.WithPredicates(gone())).
		Watches(&coordinationv1.Lease{}, inSpace, builder.WithPredicates(annotated())).
		WatchesMetadata(spaces, inSpace, builder.WithPredicates(gone())).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: workers,
			ReconciliationTimeout:   reconcileLimit,
			RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](retryFirst, retryMost),
		}).
		Complete(c)
	works := ctrl.NewControllerManagedBy(mgr).
		Named("work-holder").
		For(&workv1alpha1.Work{}, builder.WithPredicates(unheld())).
		Complete(&holder{hub: c.Hub, live: c.Live, shard: c.Shard})
	if !c.Shard.IsDefault() {
		return errors.Join(clusters, works)
	}
	return errors.Join(clusters, works, mgr.Add(manager.RunnableFunc(c.sweepAll)))
}

// wantedChanged passes what can matter here: not what the members report again and again.
func wantedChanged() predicate.Predicate {
	return predicate.Funcs{
		UpdateFunc: func(e event.UpdateEvent) bool {
			before, after := e.ObjectOld.(*clusterv1alpha1.Cluster), e.ObjectNew.(*clusterv1alpha1.Cluster)
			return !equality.Semantic.DeepEqual(steady(before), steady(after))
		},
	}
}

// steady returns what of a Cluster can matter to its execution space and to its removal.
func steady(cluster *clusterv1alpha1.Cluster) any {
	status, reason := metav1.ConditionUnknown, ""
	if ready := meta.FindStatusCondition(cluster.Status.Conditions, clusterv1alpha1.ClusterConditionReady); ready != nil {
		status, reason = ready.Status, ready.Reason
	}
	return []any{
		cluster.DeletionTimestamp, cluster.Annotations, cluster.Finalizers, cluster.Spec.ID, cluster.Spec.SyncMode, cluster.Spec.SecretRef,
		status, reason, cluster.Status.KubernetesVersion == "",
	}
}

// gone passes that an object is gone.
func gone() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return false },
		UpdateFunc: func(event.UpdateEvent) bool { return false },
	}
}

// annotated passes what an agent says on its Lease.
func annotated() predicate.Predicate {
	return predicate.And(predicate.AnnotationChangedPredicate{}, predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return false },
		DeleteFunc: func(event.DeleteEvent) bool { return false },
	})
}

// ofSpace names the Cluster whose execution space obj is, or is in. Of a Cluster that stays only its namespace matters.
func (c *Controller) ofSpace(ctx context.Context, obj client.Object) []reconcile.Request {
	space := obj.GetNamespace()
	if space == "" {
		space = obj.GetName()
	}
	name, ok := fleet.ClusterOfExecutionSpace(space)
	if !ok {
		return nil
	}
	cluster := &clusterv1alpha1.Cluster{}
	if err := c.Hub.Get(ctx, client.ObjectKey{Name: name}, cluster); err != nil || !c.Shard.Serves(cluster) {
		return nil
	}
	if cluster.DeletionTimestamp.IsZero() && obj.GetNamespace() != "" {
		return nil
	}
	return []reconcile.Request{{NamespacedName: client.ObjectKeyFromObject(cluster)}}
}

// rivals lists the Clusters that had to stand back behind one that is gone.
func (c *Controller) rivals(ctx context.Context, obj client.Object) []reconcile.Request {
	former := obj.(*clusterv1alpha1.Cluster)
	list := &clusterv1alpha1.ClusterList{}
	if err := c.Hub.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		log.FromContext(ctx).Error(err, "list clusters")
		return nil
	}
	var requests []reconcile.Request
	for i := range list.Items {
		rival := &list.Items[i]
		if rival.Spec.ID == former.Spec.ID && rival.UID != former.UID && c.Shard.Serves(rival) {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(rival)})
		}
	}
	return requests
}

// state is what the steps of one reconcile know.
type state struct {
	cluster *clusterv1alpha1.Cluster
	member  fleet.Member
	// again is when to look again though nothing happens; zero for never.
	again time.Duration
}

// Reconcile gives one Cluster what it needs, or takes it a step nearer to its end.
func (c *Controller) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	cluster := &clusterv1alpha1.Cluster{}
	err := c.Hub.Get(ctx, req.NamespacedName, cluster)
	if apierrors.IsNotFound(err) {
		err = c.sweep(ctx, req.Name)
	}
	if err != nil || cluster.UID == "" || !c.Shard.Serves(cluster) {
		return reconcile.Result{}, err
	}
	s := &state{cluster: cluster.DeepCopy(), member: fleet.FromCluster(cluster)}
	ctx = log.IntoContext(ctx, log.FromContext(ctx).WithValues(logkeys.Member, s.member.Key()))
	steps := []phase.Step[*state]{
		{Name: "reset", Run: c.reset},
		{Name: "accept", Run: c.accept},
		{Name: "claim", Run: c.claim},
		{Name: "hold", Run: c.hold},
		{Name: "make", Run: c.makeSpace},
		{Name: "adopt", Run: c.adopt},
		{Name: "expire", Run: c.expire},
	}
	if !cluster.DeletionTimestamp.IsZero() {
		if !controllerutil.ContainsFinalizer(cluster, clusterv1alpha1.ClusterFinalizer) {
			return reconcile.Result{}, nil
		}
		steps = []phase.Step[*state]{
			{Name: "judge", Run: c.judge},
			{Name: "withdraw", Run: c.withdraw},
			{Name: "withdraw the rest", Run: c.withdrawRest},
			{Name: "dismiss", Run: c.dismiss},
			{Name: "clear", Run: c.clear},
			{Name: "release", Run: c.release},
		}
	}
	outcome := phase.Run(ctx, s, steps)
	switch {
	case apierrors.IsConflict(outcome.Err):
		// The cache is behind, and what it lacks will wake us.
		return reconcile.Result{RequeueAfter: retryFirst}, nil
	case outcome.Kind == phase.Waiting:
		c.tell(s, outcome.Message())
		return reconcile.Result{RequeueAfter: outcome.After}, nil
	case outcome.Kind == phase.Rejected:
		return reconcile.Result{RequeueAfter: s.again}, nil
	case outcome.Err != nil:
		return reconcile.Result{}, fmt.Errorf("look after cluster %s: %w", req.Name, outcome.Err)
	}
	return reconcile.Result{RequeueAfter: s.again}, nil
}

// tell says in an event what a Cluster that leaves waits for, if that is new.
func (c *Controller) tell(s *state, why string) {
	if !s.cluster.DeletionTimestamp.IsZero() && c.patience.news(s.cluster.UID, why) {
		c.Events.Eventf(s.cluster, nil, corev1.EventTypeNormal, "Leaving", "Delete", "waiting for %s", why)
	}
}
