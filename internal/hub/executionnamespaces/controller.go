package executionnamespaces

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
	"github.com/towline/towline/internal/hub/ratelimit"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/phase"
)

const (
	// workers is the number of concurrent reconciles. A member that does not answer blocks a worker until the timeout of
	// the request.
	workers = 50
	// retryMin and retryMax bound the delay before a failed reconcile is retried. The delay doubles with each failure.
	retryMin = 200 * time.Millisecond
	retryMax = 30 * time.Second
	// reconcileTimeout limits one reconcile. The next reconcile continues with the unfinished steps.
	reconcileTimeout = time.Minute
	// An agent can cause agentBurst reconciles of its Cluster at once, and then one per agentInterval. A second limit of
	// the same size is for the reconciles of its Works.
	agentInterval = 6 * time.Second
	agentBurst    = 20
)

// Controller manages the execution namespaces of Clusters. It claims the ID of each Cluster, sets
// clusterv1alpha1.ClusterFinalizer, creates the execution namespace, sets the finalizer of its Works, and runs the
// removal of deleted Clusters.
type Controller struct {
	// Hub reads from caches. Live reads from the API server, and makes all writes.
	Hub  client.Client
	Live client.Client
	// Shard selects the Clusters of this controller.
	Shard fleet.Shard
	// Config returns the connection to a push member.
	Config func(ctx context.Context, m fleet.Member) (*rest.Config, error)
	// WithdrawRemaining withdraws the deployments on a member that have no summary or Work, for example because the
	// summary was deleted by force. For m.OnHub() it withdraws the deployments for m on the hub's own cluster. pending
	// describes the deployments that are not withdrawn yet, and kept the deployments of other owners. It may be nil.
	WithdrawRemaining func(ctx context.Context, m fleet.Member) (pending, kept []string, err error)
	// Forget discards the cached state of the member "namespace/name" and cancels running operations on it. It is
	// called for Clusters that are deleted or abandoned. It may be nil.
	Forget func(member string)
	// Heartbeats evaluates the Leases of agents.
	Heartbeats *heartbeats.Monitor
	Events     events.EventRecorder
	Clock      clock.PassiveClock

	progress progressTracker
}

// Setup adds the controller to mgr.
func (c *Controller) Setup(_ context.Context, mgr ctrl.Manager) error {
	namespaces := &metav1.PartialObjectMetadata{}
	namespaces.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	agentLimiter := ratelimit.New(agentInterval, agentBurst, c.Clock)
	toCluster := handler.EnqueueRequestsFromMapFunc(c.clusterOfNamespace)
	clusters := ctrl.NewControllerManagedBy(mgr).
		Named("spaces").
		Watches(&clusterv1alpha1.Cluster{}, agentLimiter.Handler(requestFor, ratelimit.ByAgentOfCluster), builder.WithPredicates(c.Shard.Predicate(), clusterChanged())).
		Watches(&clusterv1alpha1.Cluster{}, handler.EnqueueRequestsFromMapFunc(c.clustersWithSameID), builder.WithPredicates(onlyDeletes())).
		Watches(&workv1alpha1.Work{}, toCluster, builder.WithPredicates(onlyDeletes())).
		Watches(&configv1beta1.ClusterSummary{}, toCluster, builder.WithPredicates(onlyDeletes())).
		Watches(&coordinationv1.Lease{}, agentLimiter.Handler(c.clusterOfNamespace, ratelimit.ByAgent), builder.WithPredicates(annotationsChanged())).
		WatchesMetadata(namespaces, toCluster, builder.WithPredicates(onlyDeletes())).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: workers,
			ReconciliationTimeout:   reconcileTimeout,
			RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](retryMin, retryMax),
		}).
		Complete(c)
	works := ctrl.NewControllerManagedBy(mgr).
		Named("work-finalizer").
		Watches(&workv1alpha1.Work{}, agentLimiter.Handler(requestFor, agentOfWork), builder.WithPredicates(lacksFinalizer())).
		Complete(&workReconciler{hub: c.Hub, live: c.Live, shard: c.Shard})
	if !c.Shard.IsDefault() {
		return errors.Join(clusters, works)
	}
	return errors.Join(clusters, works, mgr.Add(manager.RunnableFunc(c.deleteAllLeftoverRBAC)))
}

// clusterChanged selects updates that can change the result of a reconcile. It drops periodic status reports of
// members.
func clusterChanged() predicate.Predicate {
	return predicate.Funcs{
		UpdateFunc: func(e event.UpdateEvent) bool {
			before, after := e.ObjectOld.(*clusterv1alpha1.Cluster), e.ObjectNew.(*clusterv1alpha1.Cluster)
			return !equality.Semantic.DeepEqual(relevantFields(before), relevantFields(after))
		},
	}
}

// relevantFields returns the fields of a Cluster that its execution namespace and its removal depend on.
func relevantFields(cluster *clusterv1alpha1.Cluster) any {
	status, reason := metav1.ConditionUnknown, ""
	if ready := meta.FindStatusCondition(cluster.Status.Conditions, clusterv1alpha1.ClusterConditionReady); ready != nil {
		status, reason = ready.Status, ready.Reason
	}
	return []any{
		cluster.DeletionTimestamp, cluster.Annotations, cluster.Finalizers, cluster.Spec.ID, cluster.Spec.SyncMode, cluster.Spec.SecretRef,
		status, reason, cluster.Status.KubernetesVersion == "", // fleet.Member.Ready depends on the last one
	}
}

// onlyDeletes selects delete events.
func onlyDeletes() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return false },
		UpdateFunc: func(event.UpdateEvent) bool { return false },
	}
}

// annotationsChanged selects updates of annotations: an agent reports its removal in an annotation of its Lease.
func annotationsChanged() predicate.Predicate {
	return predicate.And(predicate.AnnotationChangedPredicate{}, predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return false },
		DeleteFunc: func(event.DeleteEvent) bool { return false },
	})
}

// requestFor returns the request for a Cluster or a Work.
func requestFor(_ context.Context, obj client.Object) []reconcile.Request {
	return []reconcile.Request{{NamespacedName: client.ObjectKeyFromObject(obj)}}
}

// clusterOfNamespace maps an execution namespace, or an object in it, to its Cluster. It ignores the object unless the
// Cluster is being deleted: only a removal waits for such objects.
func (c *Controller) clusterOfNamespace(ctx context.Context, obj client.Object) []reconcile.Request {
	namespace := obj.GetNamespace()
	if namespace == "" {
		namespace = obj.GetName()
	}
	name, ok := fleet.ClusterOfExecutionSpace(namespace)
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

// clustersWithSameID maps a deleted Cluster to the other Clusters with its ID, which can claim the ID now.
func (c *Controller) clustersWithSameID(ctx context.Context, obj client.Object) []reconcile.Request {
	deletedCluster := obj.(*clusterv1alpha1.Cluster)
	list := &clusterv1alpha1.ClusterList{}
	if err := c.Hub.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		log.FromContext(ctx).Error(err, "list clusters")
		return nil
	}
	var requests []reconcile.Request
	for i := range list.Items {
		other := &list.Items[i]
		if other.Spec.ID == deletedCluster.Spec.ID && other.UID != deletedCluster.UID && c.Shard.Serves(other) {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(other)})
		}
	}
	return requests
}

// state is the data that the steps of one reconcile share.
type state struct {
	// cluster is the last known version of the Cluster, and member is computed from it.
	cluster *clusterv1alpha1.Cluster
	member  fleet.Member
	// requeueAfter is the delay before the next reconcile; zero for none.
	requeueAfter time.Duration
}

// Reconcile sets up the execution namespace of one Cluster, or continues its removal.
func (c *Controller) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	cluster := &clusterv1alpha1.Cluster{}
	err := c.Hub.Get(ctx, req.NamespacedName, cluster)
	if apierrors.IsNotFound(err) {
		err = c.deleteLeftoverRBAC(ctx, req.Name)
	}
	if err != nil || cluster.UID == "" || !c.Shard.Serves(cluster) {
		return reconcile.Result{}, err
	}
	s := &state{cluster: cluster.DeepCopy(), member: fleet.FromCluster(cluster)}
	ctx = log.IntoContext(ctx, log.FromContext(ctx).WithValues(logkeys.Member, s.member.Key()))
	steps := []phase.Step[*state]{
		{Name: "clear deregistration", Run: c.clearDeregistration},
		{Name: "validate", Run: c.validate},
		{Name: "claim ID", Run: c.claimID},
		{Name: "ensure finalizer", Run: c.ensureFinalizer},
		{Name: "ensure namespace", Run: c.ensureNamespace},
		{Name: "finish registration", Run: c.finishRegistration},
	}
	if !cluster.DeletionTimestamp.IsZero() {
		if !controllerutil.ContainsFinalizer(cluster, clusterv1alpha1.ClusterFinalizer) {
			return reconcile.Result{}, nil
		}
		steps = []phase.Step[*state]{
			{Name: "abandon unreachable", Run: c.abandonUnreachable},
			{Name: "withdraw", Run: c.withdraw},
			{Name: "withdraw remaining", Run: c.withdrawRemaining},
			{Name: "remove registration", Run: c.removeRegistration},
			{Name: "delete hub objects", Run: c.deleteHubObjects},
			{Name: "remove finalizer", Run: c.removeFinalizer},
		}
	}
	outcome := phase.Run(ctx, s, steps)
	switch {
	case apierrors.IsConflict(outcome.Err):
		// The cached Cluster was stale. clusterChanged may drop the event of the newer version, which would trigger a retry.
		return reconcile.Result{RequeueAfter: retryMin}, nil
	case outcome.Kind == phase.Waiting:
		c.recordWaiting(s, outcome.Message())
		return reconcile.Result{RequeueAfter: outcome.After}, nil
	case outcome.Kind == phase.Terminal:
		return reconcile.Result{RequeueAfter: s.requeueAfter}, nil
	case outcome.Err != nil:
		return reconcile.Result{}, fmt.Errorf("reconcile cluster %s: %w", req.Name, outcome.Err)
	}
	return reconcile.Result{RequeueAfter: s.requeueAfter}, nil
}

// recordWaiting records an event when a removal waits for a new reason.
func (c *Controller) recordWaiting(s *state, reason string) {
	if !s.cluster.DeletionTimestamp.IsZero() && c.progress.recordEvent(s.cluster.UID, reason) {
		c.Events.Eventf(s.cluster, nil, corev1.EventTypeNormal, "RemovalPending", "Delete", "waiting for %s", reason)
	}
}
