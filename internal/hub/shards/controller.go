package shards

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/match"
)

const (
	// workers is the number of clusters reconciled in parallel.
	workers = 10
	// cacheDelay is the delay until the cache is read again if it lacks a change.
	cacheDelay = 100 * time.Millisecond
	// minRetryDelay and maxRetryDelay limit the delay before a failed reconcile is retried. The delay doubles with
	// each failure.
	minRetryDelay = 500 * time.Millisecond
	maxRetryDelay = time.Minute
)

// Controller labels the objects of the clusters of a shard.
type Controller struct {
	// Hub reads clusters and summaries from the cache, which selects summaries by fleet.LabelShard; Live reads from
	// the API server.
	Hub  client.Client
	Live client.Reader
	// Shard is the shard of this hub.
	Shard fleet.Shard
	// SummaryIndex is the index of summaries by the text of their cluster's fleet.ID.
	SummaryIndex string
	// LabelGroups labels the groups of a member. done is true when the cache has all of them with the label. It is nil if
	// there are no groups.
	LabelGroups func(ctx context.Context, m fleet.Member) (done bool, err error)
}

// Setup adds the controller to mgr. The caller must add the index of summaries.
func (c *Controller) Setup(mgr ctrl.Manager) error {
	built := builder.TypedControllerManagedBy[fleet.ID](mgr).
		Named("shards").
		WithOptions(controller.TypedOptions[fleet.ID]{
			MaxConcurrentReconciles: workers,
			RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[fleet.ID](minRetryDelay, maxRetryDelay),
		})
	for _, cluster := range fleet.NewObjects() {
		built = built.Watches(cluster, handler.TypedEnqueueRequestsFromMapFunc(idOf), builder.WithPredicates(shardChanged()))
	}
	if c.Shard.IsDefault() {
		built = built.Watches(&configv1beta1.ClusterSummary{}, handler.TypedEnqueueRequestsFromMapFunc(c.clusterOfMislabelled), builder.WithPredicates(labelChanged()))
	}
	return built.Complete(c)
}

func idOf(_ context.Context, obj client.Object) []fleet.ID {
	return []fleet.ID{fleet.FromObject(obj).ID()}
}

// shardChanged selects new clusters, and changes of the annotations that Reconcile reads.
func shardChanged() predicate.Predicate {
	return predicate.Funcs{
		DeleteFunc: func(event.DeleteEvent) bool { return false },
		UpdateFunc: func(e event.UpdateEvent) bool {
			before, after := e.ObjectOld.GetAnnotations(), e.ObjectNew.GetAnnotations()
			return before[libv1beta1.ShardAnnotation] != after[libv1beta1.ShardAnnotation] ||
				before[kube.AnnotationLabelledShard] != after[kube.AnnotationLabelledShard]
		},
	}
}

// labelChanged selects new summaries, and changes of their label.
func labelChanged() predicate.Predicate {
	return predicate.Funcs{
		DeleteFunc: func(event.DeleteEvent) bool { return false },
		UpdateFunc: func(e event.UpdateEvent) bool {
			return e.ObjectOld.GetLabels()[fleet.LabelShard] != e.ObjectNew.GetLabels()[fleet.LabelShard]
		},
	}
}

// clusterOfMislabelled returns the cluster of a summary if the summary does not have the label of the cluster's shard.
func (c *Controller) clusterOfMislabelled(ctx context.Context, obj client.Object) []fleet.ID {
	id := match.MemberID(obj.(*configv1beta1.ClusterSummary))
	cluster, err := fleet.Object(ctx, c.Hub, id)
	if err != nil || fleet.ShardOf(cluster).HasLabel(obj) {
		return nil
	}
	return []fleet.ID{id}
}

// Reconcile labels the objects of one cluster that this hub serves. In the default shard it also checks the labels of
// the summaries of clusters in other shards.
func (c *Controller) Reconcile(ctx context.Context, id fleet.ID) (reconcile.Result, error) {
	member, cluster, err := fleet.Get(ctx, c.Hub, id.Type, id.Namespace, id.Name)
	if err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	ctx = log.IntoContext(ctx, log.FromContext(ctx).WithValues(logkeys.Member, member.Key()))
	result, err := c.labelOrCheck(ctx, member, cluster)
	if apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: cacheDelay}, nil
	}
	if client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, fmt.Errorf("label the objects of cluster %s: %w", member.Key(), err)
	}
	return result, nil
}

// labelOrCheck labels a cluster that this hub serves. In the default shard it marks other clusters with mislabelled
// summaries, so that the hub of their shard labels them.
func (c *Controller) labelOrCheck(ctx context.Context, m fleet.Member, cluster client.Object) (reconcile.Result, error) {
	if c.Shard.Serves(cluster) && !c.Shard.AreObjectsLabelled(cluster) {
		return c.label(ctx, m, cluster)
	}
	if !c.Shard.IsDefault() || !fleet.ShardOf(cluster).AreObjectsLabelled(cluster) {
		return reconcile.Result{}, nil
	}
	isMislabelled, err := c.hasMislabelled(ctx, m, fleet.ShardOf(cluster))
	if err != nil || !isMislabelled {
		return reconcile.Result{}, err
	}
	log.FromContext(ctx).Info("a summary does not have the label of its cluster's shard")
	return reconcile.Result{}, c.setLabelled(ctx, cluster, fleet.BeingLabelled)
}

// label executes the next step of the package comment.
func (c *Controller) label(ctx context.Context, m fleet.Member, cluster client.Object) (reconcile.Result, error) {
	if cluster.GetAnnotations()[kube.AnnotationLabelledShard] != fleet.BeingLabelled {
		// The event of this write triggers the next reconcile.
		return reconcile.Result{}, c.setLabelled(ctx, cluster, fleet.BeingLabelled)
	}
	isComplete, err := c.labelSummaries(ctx, m)
	if err != nil {
		return reconcile.Result{}, err
	}
	if c.LabelGroups != nil {
		done, err := c.LabelGroups(ctx, m)
		if err != nil {
			return reconcile.Result{}, err
		}
		isComplete = isComplete && done
	}
	if !isComplete {
		return reconcile.Result{RequeueAfter: cacheDelay}, nil
	}
	if err := c.setLabelled(ctx, cluster, string(c.Shard)); err != nil {
		return reconcile.Result{}, err
	}
	log.FromContext(ctx).Info("labelled the objects of a cluster with its shard")
	return reconcile.Result{}, nil
}
