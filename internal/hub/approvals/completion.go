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
	"github.com/towline/towline/internal/hub/executionnamespaces"
	"github.com/towline/towline/internal/kube"
)

// completionDelay is the time between the readiness of a Cluster and the completion of its registration. In this time
// the registering client may fail, and must be able to retry.
const completionDelay = 10 * time.Second

// setupCompletion adds to mgr the controller that completes registrations.
func (c *Controller) setupCompletion(mgr ctrl.Manager) error {
	type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]
	enqueueDelayed := func(obj client.Object, q queue) {
		q.AddAfter(reconcile.Request{NamespacedName: client.ObjectKeyFromObject(obj)}, completionDelay)
	}
	return ctrl.NewControllerManagedBy(mgr).
		Named("registrations-by-token").
		Watches(&clusterv1alpha1.Cluster{}, handler.Funcs{
			CreateFunc: func(_ context.Context, e event.CreateEvent, q queue) {
				if c.isReadyBeforeTimeout(e.Object) {
					enqueueDelayed(e.Object, q)
				}
			},
			UpdateFunc: func(_ context.Context, e event.UpdateEvent, q queue) {
				if !c.isReadyBeforeTimeout(e.ObjectOld) && c.isReadyBeforeTimeout(e.ObjectNew) {
					enqueueDelayed(e.ObjectNew, q)
				}
			},
		}).
		Complete(reconcile.Func(c.completeRegistration))
}

// isReadyBeforeTimeout returns whether a Cluster that was registered with a token is ready and its registration can
// still be retried.
func (c *Controller) isReadyBeforeTimeout(obj client.Object) bool {
	cluster, ok := obj.(*clusterv1alpha1.Cluster)
	if !ok || cluster.Annotations[kube.AnnotationBootstrapToken] == "" {
		return false
	}
	return c.Clock.Since(cluster.CreationTimestamp.Time) < executionnamespaces.RegistrationTimeout && meta.IsStatusConditionTrue(cluster.Status.Conditions, clusterv1alpha1.ClusterConditionReady)
}

// completeRegistration restricts the token of a ready Cluster to this Cluster, which completes the registration.
func (c *Controller) completeRegistration(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	cluster, found, err := c.getCluster(ctx, req.Name)
	if err != nil || !found {
		return reconcile.Result{}, err
	}
	token := cluster.Annotations[kube.AnnotationBootstrapToken]
	if token == "" || !cluster.DeletionTimestamp.IsZero() || !fleet.FromCluster(cluster).Ready {
		return reconcile.Result{}, nil
	}
	err = c.restrictToken(ctx, token, cluster)
	if apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: minRetryDelay}, nil
	}
	return reconcile.Result{}, err
}
