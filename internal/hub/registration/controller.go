package registration

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
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
	"github.com/towline/towline/internal/hub/ratelimit"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/phase"
)

const (
	// workers is the number of concurrent reconciles. Each registration takes about a dozen requests.
	workers = 10
	// resyncInterval is the interval after which existing objects are checked and repaired. Up to resyncJitter times this
	// interval is added.
	resyncInterval = 10 * time.Minute
	resyncJitter   = 0.2
	// retryMin and retryMax bound the delay before a failed reconcile is retried. The delay doubles with each failure.
	retryMin = 500 * time.Millisecond
	retryMax = time.Minute
	// The agent of a cluster can cause agentBurst reconciles of it at once, and then one per agentInterval.
	agentInterval = 6 * time.Second
	agentBurst    = 20
	// leaseIndex is the index of pull-mode clusters by their agent's Lease.
	leaseIndex = "registration-lease"
)

// Controller registers SveltosClusters: it sets kube.FinalizerCluster, and then creates the objects of a pull member:
// the identity of the agent and, until the agent has registered, a manifest.
type Controller struct {
	// Hub reads SveltosClusters and Leases from a cache; Live reads from the API server.
	Hub  client.Client
	Live client.Client
	// Cache also has the metadata of Secrets, which Hub does not read from a cache.
	Cache client.Reader
	// EnsureManifest maintains the manifest of a cluster until its agent has registered, and returns the delay before
	// the next call; zero means that only a change of the cluster requires one.
	EnsureManifest func(ctx context.Context, cluster *libv1beta1.SveltosCluster) (after time.Duration, err error)
	// Locks excludes package deregistration while a cluster is registered.
	Locks *ClusterLocks
	// Shard selects the clusters of this controller.
	Shard  fleet.Shard
	Events events.EventRecorder

	// checks has the last identityCheck of each cluster.
	checks sync.Map
	// snapshots has the identities of all agents, so that periodic checks need no requests per cluster.
	snapshots snapshots
	// sharedMu guards hasSharedObjects, and is held while the objects are created. hasSharedObjects is true after this
	// process has called join.EnsureSharedObjects with success.
	sharedMu         sync.Mutex
	hasSharedObjects bool
}

// Setup adds the controller to mgr.
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
	agentLimiter := ratelimit.New(agentInterval, agentBurst, clock.RealClock{})
	return ctrl.NewControllerManagedBy(mgr).
		Named("registrations").
		Watches(&libv1beta1.SveltosCluster{}, agentLimiter.Handler(requestFor, ratelimit.ByAgentOfCluster), builder.WithPredicates(c.Shard.Predicate(), clusterChanged())).
		Watches(&coordinationv1.Lease{}, agentLimiter.Handler(c.clustersOfLease, ratelimit.ByAgent), builder.WithPredicates(leaseChanged())).
		WatchesMetadata(namespaces, handler.EnqueueRequestsFromMapFunc(c.clustersOfNamespace), builder.WithPredicates(claimChanged())).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: workers,
			RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](retryMin, retryMax),
		}).
		Complete(c)
}

// clusterChanged selects updates that can change the registration of a cluster, and drops heartbeats.
func clusterChanged() predicate.Predicate {
	return predicate.Funcs{
		UpdateFunc: func(e event.UpdateEvent) bool {
			before, after := e.ObjectOld.(*libv1beta1.SveltosCluster), e.ObjectNew.(*libv1beta1.SveltosCluster)
			return before.Generation != after.Generation || !maps.Equal(before.Annotations, after.Annotations) ||
				!maps.Equal(before.Labels, after.Labels) || len(before.Finalizers) > len(after.Finalizers) ||
				before.Status.Ready != after.Status.Ready || before.Status.ConnectionStatus != after.Status.ConnectionStatus ||
				// The failureMessage of an earlier reconcile may arrive late in the cache. The next reconcile deletes it.
				before.Status.FailureMessage != after.Status.FailureMessage && strings.HasPrefix(after.Status.FailureMessage, messagePrefix)
		},
		DeleteFunc: func(event.DeleteEvent) bool { return false },
	}
}

// leaseChanged selects the deletion of a Lease, and updates of its annotations, in which the agent reports the state of
// its credentials.
func leaseChanged() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return false },
		UpdateFunc: func(e event.UpdateEvent) bool {
			return !maps.Equal(e.ObjectOld.GetAnnotations(), e.ObjectNew.GetAnnotations())
		},
	}
}

// requestFor returns the request for a cluster.
func requestFor(_ context.Context, cluster client.Object) []reconcile.Request {
	return []reconcile.Request{{NamespacedName: client.ObjectKeyFromObject(cluster)}}
}

// clustersOfLease maps an agent's Lease to its cluster.
func (c *Controller) clustersOfLease(ctx context.Context, lease client.Object) []reconcile.Request {
	var clusters libv1beta1.SveltosClusterList
	if err := c.Hub.List(ctx, &clusters, client.MatchingFields{leaseIndex: client.ObjectKeyFromObject(lease).String()}); err != nil {
		log.FromContext(ctx).Error(err, "list the clusters of a Lease")
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

// claimChanged selects updates of a namespace that remove or replace the claim of a cluster: the annotation that
// reserves the namespace as its delivery namespace.
func claimChanged() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return false },
		UpdateFunc: func(e event.UpdateEvent) bool {
			before := e.ObjectOld.GetAnnotations()[kube.AnnotationDeliveryHolder]
			return before != "" && before != e.ObjectNew.GetAnnotations()[kube.AnnotationDeliveryHolder]
		},
		DeleteFunc: func(event.DeleteEvent) bool { return false },
	}
}

// clustersOfNamespace maps a namespace to the clusters that can have it as delivery namespace.
func (c *Controller) clustersOfNamespace(ctx context.Context, namespace client.Object) []reconcile.Request {
	var clusters libv1beta1.SveltosClusterList
	if err := c.Hub.List(ctx, &clusters, client.UnsafeDisableDeepCopy); err != nil {
		log.FromContext(ctx).Error(err, "list the clusters of a namespace")
		return nil
	}
	var requests []reconcile.Request
	for i := range clusters.Items {
		cluster := &clusters.Items[i]
		name := namespace.GetName()
		isCandidate := name == cluster.Namespace || name == fleet.DerivedNamespace(cluster.Namespace, cluster.Name)
		if isCandidate && cluster.Spec.PullMode && c.Shard.Serves(cluster) {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(cluster)})
		}
	}
	return requests
}

// Reconcile creates or repairs the registration of one cluster.
func (c *Controller) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	cluster := &libv1beta1.SveltosCluster{}
	if err := c.Hub.Get(ctx, req.NamespacedName, cluster); err != nil {
		c.checks.Delete(req.NamespacedName)
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if !c.Shard.Serves(cluster) {
		c.checks.Delete(req.NamespacedName)
		return reconcile.Result{}, nil
	}
	if !cluster.DeletionTimestamp.IsZero() {
		c.checks.Delete(req.NamespacedName)
		return reconcile.Result{}, c.restoreDelivery(ctx, cluster)
	}
	if fleet.ValidatePullName(cluster) != "" {
		// No object can be created for the cluster, so it needs no finalizer. Package clusters reports the reason.
		return reconcile.Result{}, nil
	}
	ctx = log.IntoContext(ctx, log.FromContext(ctx).WithValues(logkeys.Member, req.String()))
	s := &state{cluster: cluster}
	steps := []phase.Step[*state]{{Name: "clear deregistration", Run: c.clearDeregistration}, {Name: "ensure finalizer", Run: c.ensureFinalizer}}
	if cluster.Spec.PullMode {
		steps = append(steps,
			phase.Step[*state]{Name: "ensure identity", Run: c.ensureIdentity},
			phase.Step[*state]{Name: "ensure manifest", Run: c.ensureManifest})
	}
	unlock, err := c.Locks.Lock(ctx, req.NamespacedName)
	if err != nil {
		return reconcile.Result{}, err
	}
	outcome := phase.Run(ctx, s, steps)
	unlock()
	if errors.Is(outcome.Err, join.ErrDeregistering) || errors.Is(outcome.Err, join.ErrNotRegistered) {
		// The cache is stale: the cluster is being deregistered or deleted.
		return reconcile.Result{}, nil
	}
	if apierrors.IsConflict(outcome.Err) {
		// The cache is stale. Its update triggers a reconcile.
		return reconcile.Result{RequeueAfter: retryMin}, nil
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
	return reconcile.Result{RequeueAfter: s.requeueAfter()}, nil
}

// restoreDelivery restores the annotation with the delivery namespace on a cluster that is being deregistered. Without
// the annotation its deployments cannot be withdrawn.
func (c *Controller) restoreDelivery(ctx context.Context, cluster *libv1beta1.SveltosCluster) error {
	if !cluster.Spec.PullMode {
		return nil
	}
	unlock, err := c.Locks.Lock(ctx, client.ObjectKeyFromObject(cluster))
	if err != nil {
		return err
	}
	defer unlock()
	return join.RestoreDeliveryAnnotation(ctx, c.Live, cluster)
}

// requeueAfter returns the delay before the next reconcile.
func (s *state) requeueAfter() time.Duration {
	interval := wait.Jitter(resyncInterval, resyncJitter)
	if s.manifestAfter > 0 {
		return min(interval, s.manifestAfter)
	}
	return interval
}

// clearDeregistration removes the annotations of an earlier deregistration from a cluster that was restored from a
// backup.
func (c *Controller) clearDeregistration(ctx context.Context, s *state) error {
	changed := s.cluster.DeepCopy()
	if !fleet.RemoveDeregistration(changed) {
		return nil
	}
	// Optimistic lock: the patch fails if the cluster is deregistered meanwhile.
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Live.Patch(ctx, changed, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("remove the annotations of an earlier deregistration: %w", err)
	}
	s.cluster = changed
	return nil
}

// ensureFinalizer sets the finalizer before objects are created for the cluster.
func (c *Controller) ensureFinalizer(ctx context.Context, s *state) error {
	for _, finalizer := range s.cluster.Finalizers {
		if finalizer == kube.FinalizerCluster {
			return nil
		}
	}
	changed := s.cluster.DeepCopy()
	changed.Finalizers = append(changed.Finalizers, kube.FinalizerCluster)
	// Optimistic lock: finalizers that others add concurrently stay.
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Live.Patch(ctx, changed, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("add finalizer: %w", err)
	}
	s.cluster, s.isNew = changed, true
	return nil
}
