package approvals

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/spaces"
	"github.com/towline/towline/internal/kube"
)

// settlePause is the time from when a Cluster is ready until its registration counts as through: whoever runs that may fail, or be interrupted, at
// the last moment, and try again.
const settlePause = 10 * time.Second

// settling makes mgr run what sees the end of registrations.
func (c *Controller) settling(mgr ctrl.Manager) error {
	type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]
	later := func(obj client.Object, q queue) {
		q.AddAfter(reconcile.Request{NamespacedName: client.ObjectKeyFromObject(obj)}, settlePause)
	}
	return ctrl.NewControllerManagedBy(mgr).
		Named("registrations-by-token").
		Watches(&clusterv1alpha1.Cluster{}, handler.Funcs{
			CreateFunc: func(_ context.Context, e event.CreateEvent, q queue) {
				if c.arrived(e.Object) {
					later(e.Object, q)
				}
			},
			UpdateFunc: func(_ context.Context, e event.UpdateEvent, q queue) {
				if !c.arrived(e.ObjectOld) && c.arrived(e.ObjectNew) {
					later(e.ObjectNew, q)
				}
			},
		}).
		Complete(reconcile.Func(c.settle))
}

// arrived says of a Cluster that was registered by token whether it is ready, while that may still be tried again.
func (c *Controller) arrived(obj client.Object) bool {
	cluster, ok := obj.(*clusterv1alpha1.Cluster)
	if !ok || cluster.Annotations[kube.AnnotationBootstrapToken] == "" {
		return false
	}
	approved, err := time.Parse(time.RFC3339, cluster.Annotations[kube.AnnotationApproved])
	return err == nil && c.Clock.Since(approved) < spaces.RegistrationTimeout && meta.IsStatusConditionTrue(cluster.Status.Conditions, clusterv1alpha1.ClusterConditionReady)
}

// settle makes the token that registered a cluster worth nothing without it: a registration that is through is not tried again.
func (c *Controller) settle(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	cluster, found, err := c.cluster(ctx, req.Name)
	if err != nil || !found {
		return reconcile.Result{}, err
	}
	token := cluster.Annotations[kube.AnnotationBootstrapToken]
	if token == "" || !cluster.DeletionTimestamp.IsZero() || !fleet.FromCluster(cluster).Ready {
		return reconcile.Result{}, nil
	}
	err = c.restrict(ctx, token, cluster)
	if apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: retryFirst}, nil
	}
	return reconcile.Result{}, err
}
