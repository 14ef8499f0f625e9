package registrations

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/events"
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

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/phase"
)

const (
	// workers is how many clusters are registered at once. Each takes about a dozen requests.
	workers = 10
	// resync is the time after which what was made is looked at again, and repaired; jitter adds a fifth at most.
	resync       = 10 * time.Minute
	resyncJitter = 0.2
	// retryFirst and retryMost are the first and the longest pause before a failed attempt is repeated; each is twice the one before.
	retryFirst = 500 * time.Millisecond
	retryMost  = time.Minute
	// leaseIndex finds the pull-mode cluster that a Lease is the heartbeat of.
	leaseIndex = "registration-lease"
)

// Controller registers clusters: it holds every cluster with kube.FinalizerCluster before anything is done for it, and gives those in pull mode
// an identity and, while they wait for their agent, a manifest.
type Controller struct {
	// Hub reads SveltosClusters and Leases from a cache; Live reads from the API server.
	Hub  client.Client
	Live client.Client
	// Keep keeps a manifest ready for a cluster while it waits for its agent, and returns when to call it again; zero means that only news
	// of the cluster can change anything.
	Keep func(ctx context.Context, cluster *libv1beta1.SveltosCluster) (again time.Duration, err error)
	// Turns keeps a registration from making again what a departure takes back.
	Turns *Turns
	// Shard is the one whose clusters are looked after.
	Shard  fleet.Shard
	Events events.EventRecorder
}

// Setup makes mgr run the controller.
func (c *Controller) Setup(ctx context.Context, mgr ctrl.Manager) error {
	err := mgr.GetFieldIndexer().IndexField(ctx, &libv1beta1.SveltosCluster{}, leaseIndex, func(obj client.Object) []string {
		if m := fleet.FromSveltosCluster(obj.(*libv1beta1.SveltosCluster)); m.Mode == fleet.Pull {
			return []string{m.DeliveryNamespace + "/" + m.Name}
		}
		return nil
	})
	if err != nil {
		return err
	}
	namespaces := &metav1.PartialObjectMetadata{}
	namespaces.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	return ctrl.NewControllerManagedBy(mgr).
		Named("registrations").
		For(&libv1beta1.SveltosCluster{}, builder.WithPredicates(c.Shard.Predicate(), wantedChanged())).
		Watches(&coordinationv1.Lease{}, handler.EnqueueRequestsFromMapFunc(c.ofLease), builder.WithPredicates(exchanged())).
		WatchesMetadata(namespaces, handler.EnqueueRequestsFromMapFunc(c.ofNamespace), builder.WithPredicates(claimLost())).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: workers,
			RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](retryFirst, retryMost),
		}).
		Complete(c)
}

// wantedChanged passes what can change what a cluster needs. Heartbeats cannot.
func wantedChanged() predicate.Predicate {
	return predicate.Funcs{
		UpdateFunc: func(e event.UpdateEvent) bool {
			before, after := e.ObjectOld.(*libv1beta1.SveltosCluster), e.ObjectNew.(*libv1beta1.SveltosCluster)
			return before.Generation != after.Generation || !maps.Equal(before.Annotations, after.Annotations) ||
				!maps.Equal(before.Labels, after.Labels) || len(before.Finalizers) != len(after.Finalizers) ||
				before.Status.Ready != after.Status.Ready || before.Status.ConnectionStatus != after.Status.ConnectionStatus ||
				// A look that did not see our own message yet could not take it back.
				before.Status.FailureMessage != after.Status.FailureMessage && strings.HasPrefix(after.Status.FailureMessage, prefix)
		},
		DeleteFunc: func(event.DeleteEvent) bool { return false },
	}
}

// exchanged passes what an agent says of its credentials, and that its Lease is gone.
func exchanged() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return false },
		UpdateFunc: func(e event.UpdateEvent) bool {
			return !maps.Equal(e.ObjectOld.GetAnnotations(), e.ObjectNew.GetAnnotations())
		},
	}
}

// ofLease names the cluster whose agent renews a Lease.
func (c *Controller) ofLease(ctx context.Context, lease client.Object) []reconcile.Request {
	var clusters libv1beta1.SveltosClusterList
	if err := c.Hub.List(ctx, &clusters, client.MatchingFields{leaseIndex: client.ObjectKeyFromObject(lease).String()}); err != nil {
		log.FromContext(ctx).Error(err, "find the cluster of a lease")
		return nil
	}
	var requests []reconcile.Request
	for i := range clusters.Items {
		if c.Shard.Serves(&clusters.Items[i]) {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&clusters.Items[i])})
		}
	}
	return requests
}

// claimLost passes that the claim of a cluster to a namespace is gone or another one.
func claimLost() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return false },
		UpdateFunc: func(e event.UpdateEvent) bool {
			before := e.ObjectOld.GetAnnotations()[kube.AnnotationDeliveryHolder]
			return before != "" && before != e.ObjectNew.GetAnnotations()[kube.AnnotationDeliveryHolder]
		},
		DeleteFunc: func(event.DeleteEvent) bool { return false },
	}
}

// ofNamespace names the clusters whose deliveries can be in a namespace.
func (c *Controller) ofNamespace(ctx context.Context, namespace client.Object) []reconcile.Request {
	var clusters libv1beta1.SveltosClusterList
	if err := c.Hub.List(ctx, &clusters, client.UnsafeDisableDeepCopy); err != nil {
		log.FromContext(ctx).Error(err, "find the clusters of a namespace")
		return nil
	}
	var requests []reconcile.Request
	for i := range clusters.Items {
		cluster := &clusters.Items[i]
		name := namespace.GetName()
		near := name == cluster.Namespace || name == fleet.DerivedNamespace(cluster.Namespace, cluster.Name)
		if near && cluster.Spec.PullMode && c.Shard.Serves(cluster) {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(cluster)})
		}
	}
	return requests
}

// Reconcile makes or repairs the registration of one cluster.
func (c *Controller) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	cluster := &libv1beta1.SveltosCluster{}
	if err := c.Hub.Get(ctx, req.NamespacedName, cluster); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if !c.Shard.Serves(cluster) {
		return reconcile.Result{}, nil
	}
	if !cluster.DeletionTimestamp.IsZero() {
		return reconcile.Result{}, c.restore(ctx, cluster)
	}
	if fleet.NameTooLong(cluster) != "" {
		// Nothing can be made for it, so that there is nothing to hold it for; the clusters controller says why.
		return reconcile.Result{}, nil
	}
	ctx = log.IntoContext(ctx, log.FromContext(ctx).WithValues(logkeys.Member, req.String()))
	s := &state{cluster: cluster}
	steps := []phase.Step[*state]{{Name: "reset", Run: c.reset}, {Name: "hold", Run: c.hold}}
	if cluster.Spec.PullMode {
		steps = append(steps,
			phase.Step[*state]{Name: "establish", Run: c.establish},
			phase.Step[*state]{Name: "expire", Run: c.expire},
			phase.Step[*state]{Name: "keep", Run: c.keep})
	}
	done := c.Turns.Take(req.NamespacedName)
	outcome := phase.Run(ctx, s, steps)
	done()
	if errors.Is(outcome.Err, join.ErrDeparting) || errors.Is(outcome.Err, join.ErrNotRegistered) {
		// The cache does not know yet that it leaves or has left.
		return reconcile.Result{}, nil
	}
	if apierrors.IsConflict(outcome.Err) {
		// The cache is behind, and what it lacks will wake us.
		return reconcile.Result{RequeueAfter: retryFirst}, nil
	}
	if err := c.report(ctx, s, outcome.Err); err != nil {
		return reconcile.Result{}, err
	}
	if outcome.Kind == phase.Retriable {
		return reconcile.Result{}, fmt.Errorf("register cluster %s: %w", req, outcome.Err)
	}
	if !cluster.Spec.PullMode {
		return reconcile.Result{}, nil
	}
	return reconcile.Result{RequeueAfter: s.next()}, nil
}

// restore keeps a cluster that is being deregistered from losing which namespace its deliveries are in: what is there
// could not be withdrawn.
func (c *Controller) restore(ctx context.Context, cluster *libv1beta1.SveltosCluster) error {
	if !cluster.Spec.PullMode {
		return nil
	}
	defer c.Turns.Take(client.ObjectKeyFromObject(cluster))()
	return join.RestoreDelivery(ctx, c.Live, cluster)
}

// next says when to look again if nothing happens until then.
func (s *state) next() time.Duration {
	look := wait.Jitter(resync, resyncJitter)
	if s.again > 0 {
		return min(look, s.again)
	}
	return look
}

// reset removes from the cluster what the hub noted on it when it was leaving: it has been restored from a backup.
func (c *Controller) reset(ctx context.Context, s *state) error {
	clean := s.cluster.DeepCopy()
	if !fleet.RemoveDeregistration(clean) {
		return nil
	}
	// The lock makes sure that it still stays.
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Live.Patch(ctx, clean, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("remove the orders of an earlier departure: %w", err)
	}
	s.cluster = clean
	return nil
}

// hold puts our finalizer on the cluster before anything is made for it.
func (c *Controller) hold(ctx context.Context, s *state) error {
	for _, finalizer := range s.cluster.Finalizers {
		if finalizer == kube.FinalizerCluster {
			return nil
		}
	}
	held := s.cluster.DeepCopy()
	held.Finalizers = append(held.Finalizers, kube.FinalizerCluster)
	// The lock keeps finalizers of others, and fails if the cluster is not as it was seen.
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Live.Patch(ctx, held, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("add finalizer: %w", err)
	}
	s.cluster = held
	return nil
}
