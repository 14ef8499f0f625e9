package executionnamespaces

import (
	"context"
	"fmt"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// workReconciler sets the execution finalizer on Works, so that they are withdrawn from the member before they are
// deleted.
type workReconciler struct {
	hub, live client.Client
	shard     fleet.Shard
}

// agentOfWork is a key function for ratelimit.Limiter: all Works of a Cluster share a limit. An agent can trigger
// reconciles, since it can change the finalizer and the status of its Works.
func agentOfWork(_, after client.Object) string { return after.GetNamespace() }

// lacksFinalizer selects Works without the finalizer that are not being deleted.
func lacksFinalizer() predicate.Predicate {
	lacks := func(obj client.Object) bool {
		return obj.GetDeletionTimestamp().IsZero() && !controllerutil.ContainsFinalizer(obj, workv1alpha1.ExecutionFinalizer)
	}
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return lacks(e.Object) },
		UpdateFunc: func(e event.UpdateEvent) bool { return lacks(e.ObjectNew) },
		DeleteFunc: func(event.DeleteEvent) bool { return false },
	}
}

// Reconcile sets the finalizer on one Work of a Cluster that is not being deleted.
func (r *workReconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	name, ok := fleet.ClusterOfExecutionSpace(req.Namespace)
	if !ok {
		return reconcile.Result{}, nil
	}
	cluster := &clusterv1alpha1.Cluster{}
	if err := r.hub.Get(ctx, client.ObjectKey{Name: name}, cluster); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if !cluster.DeletionTimestamp.IsZero() || !r.shard.Serves(cluster) || fleet.FromCluster(cluster).Refused != "" {
		return reconcile.Result{}, nil
	}
	work := &workv1alpha1.Work{}
	if err := r.hub.Get(ctx, req.NamespacedName, work); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	withFinalizer := work.DeepCopy()
	if !work.DeletionTimestamp.IsZero() || !controllerutil.AddFinalizer(withFinalizer, workv1alpha1.ExecutionFinalizer) {
		return reconcile.Result{}, nil
	}
	// The optimistic lock keeps the finalizers of others.
	patch := client.MergeFromWithOptions(work, client.MergeFromWithOptimisticLock{})
	if err := r.live.Patch(ctx, withFinalizer, patch, client.FieldOwner(kube.FieldManager)); client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, fmt.Errorf("add finalizer to Work %s: %w", req, err)
	}
	return reconcile.Result{}, nil
}
