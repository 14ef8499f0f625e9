package clusters

import (
	"context"
	"errors"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/hub/ratelimit"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
)

const (
	// pushWorkers is the number of push members that are observed concurrently. A member that does not answer occupies
	// a worker for about 5 s of every 10 s. Thus other members are delayed only if 1,000 members do not answer. So many
	// workers are cheap: each needs a few KiB.
	pushWorkers = 500
	// pullWorkers is the number of pull members that are evaluated concurrently. An evaluation sends requests to the
	// hub only.
	pullWorkers = 10
	// observeInterval is the minimal time between two observations of a push member, as in Karmada. A random part of
	// observeJitter times this interval is added.
	observeInterval = 10 * time.Second
	observeJitter   = 0.1
	// conflictRetryDelay is the time until the next reconcile after a write conflict.
	conflictRetryDelay = 100 * time.Millisecond
	// minRetryDelay is the delay after the first error. It doubles with each further error, up to observeInterval.
	minRetryDelay = 200 * time.Millisecond
	// The agent of a pull member can cause agentBurst evaluations of its Cluster at once, and then one per agentInterval.
	agentInterval = time.Second
	agentBurst    = 20
	// credentialsIndex finds the Clusters whose credentials are in a Secret.
	credentialsIndex = "dialled-with"
)

// Controller reconciles Clusters. See the package comment.
type Controller struct {
	// Hub reads Clusters from a cache.
	Hub client.Client
	// Shard selects the clusters of this controller.
	Shard fleet.Shard
	// MemberConfig returns the configuration for requests to a push member. It must return the same pointer until the
	// configuration changes.
	MemberConfig func(ctx context.Context, m fleet.Member) (*rest.Config, error)
	// ReserveMemory returns a Reservation for the counters of nodes and pods of a push member. It may be nil: no limit.
	ReserveMemory func(m fleet.Member) *kube.Reservation
	// Heartbeats evaluates the agents of pull members.
	Heartbeats *heartbeats.Monitor
	Events     events.EventRecorder
	Clock      clock.PassiveClock

	observers observers
	// agentLimiter limits the evaluations that the agent of one pull member can cause.
	agentLimiter *ratelimit.Limiter

	// mu guards lastReady and failures.
	mu sync.Mutex
	// lastReady has, by the name of a Cluster, the conditionSummary of Ready at the last reconcile. The controller needs
	// it to record events about changes that agents write. After a restart of the hub an event can be missing.
	lastReady map[string]string
	// failures has the number of consecutive failed observations of each push member, by the name of its Cluster.
	failures map[string]int
}

// Setup adds the index, the two controllers and the observers to mgr. It is called once, before mgr starts.
func (c *Controller) Setup(ctx context.Context, mgr ctrl.Manager) error {
	c.agentLimiter = ratelimit.New(agentInterval, agentBurst, c.Clock)
	err := mgr.GetFieldIndexer().IndexField(ctx, &clusterv1alpha1.Cluster{}, credentialsIndex, func(obj client.Object) []string {
		if ref := obj.(*clusterv1alpha1.Cluster).Spec.SecretRef; ref != nil {
			return []string{ref.Namespace + "/" + ref.Name}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := mgr.Add(c); err != nil {
		return err
	}
	secrets := &metav1.PartialObjectMetadata{}
	secrets.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
	// Each mode has its own queue: push members that do not answer must not delay the evaluation of heartbeats.
	push := c.newBuilder(mgr, clusterv1alpha1.Push, pushWorkers).WatchesMetadata(secrets, handler.EnqueueRequestsFromMapFunc(c.clustersOfSecret))
	pull := c.newBuilder(mgr, clusterv1alpha1.Pull, pullWorkers).Watches(&coordinationv1.Lease{}, c.agentLimiter.Handler(clusterOfLease, ratelimit.ByAgent))
	return errors.Join(push.Complete(c.reconcilerFor(clusterv1alpha1.Push)), pull.Complete(c.reconcilerFor(clusterv1alpha1.Pull)))
}

// Start implements manager.Runnable. It runs the observers of push members until ctx ends, and waits for them.
func (c *Controller) Start(ctx context.Context) error { return c.observers.run(ctx) }

// newBuilder returns a builder for the controller of the members with one mode.
func (c *Controller) newBuilder(mgr ctrl.Manager, mode clusterv1alpha1.ClusterSyncMode, workers int) *builder.Builder {
	names := map[clusterv1alpha1.ClusterSyncMode]string{clusterv1alpha1.Push: "members", clusterv1alpha1.Pull: "members-pull"}
	return ctrl.NewControllerManagedBy(mgr).
		Named(names[mode]).
		Watches(&clusterv1alpha1.Cluster{}, c.agentLimiter.Handler(requestFor, ratelimit.ByAgentOfCluster), builder.WithPredicates(c.Shard.Predicate(), hasMode(mode), needsReconcile())).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: workers,
			RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](minRetryDelay, observeInterval),
		})
}

// hasMode passes events about Clusters with the mode, and updates from or to this mode.
func hasMode(mode clusterv1alpha1.ClusterSyncMode) predicate.Predicate {
	matches := func(obj client.Object) bool { return obj.(*clusterv1alpha1.Cluster).Spec.SyncMode == mode }
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return matches(e.Object) },
		UpdateFunc: func(e event.UpdateEvent) bool { return matches(e.ObjectOld) || matches(e.ObjectNew) },
		DeleteFunc: func(e event.DeleteEvent) bool { return matches(e.Object) },
	}
}

// needsReconcile drops updates of the status that this controller wrote. It passes changes of the spec and of the
// annotations. For a pull member it also passes changes of the condition Ready, and for a push member changes of
// Refused and the loss of parts of the status, see hasLostFacts.
func needsReconcile() predicate.Predicate {
	statusChanged := predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, after := e.ObjectOld.(*clusterv1alpha1.Cluster), e.ObjectNew.(*clusterv1alpha1.Cluster)
		if after.Spec.SyncMode == clusterv1alpha1.Pull {
			return !equality.Semantic.DeepEqual(readyCondition(before.Status), readyCondition(after.Status))
		}
		return fleet.FromCluster(before).Refused != fleet.FromCluster(after).Refused || hasLostFacts(before.Status, after.Status)
	}}
	return predicate.Or(predicate.GenerationChangedPredicate{}, predicate.AnnotationChangedPredicate{}, statusChanged)
}

// hasLostFacts returns whether the status has lost the version, the APIs or the condition Ready. This controller never
// removes them.
func hasLostFacts(before, after clusterv1alpha1.ClusterStatus) bool {
	return before.KubernetesVersion != "" && after.KubernetesVersion == "" || len(before.APIEnablements) > 0 && len(after.APIEnablements) == 0 ||
		readyCondition(before) != nil && readyCondition(after) == nil
}

func readyCondition(status clusterv1alpha1.ClusterStatus) *metav1.Condition {
	return meta.FindStatusCondition(status.Conditions, clusterv1alpha1.ClusterConditionReady)
}

// clustersOfSecret returns the Clusters whose credentials are in the Secret. It marks their observers as stale, so that
// the next reconcile calls MemberConfig.
func (c *Controller) clustersOfSecret(ctx context.Context, secret client.Object) []reconcile.Request {
	var clusters clusterv1alpha1.ClusterList
	if err := c.Hub.List(ctx, &clusters, client.MatchingFields{credentialsIndex: client.ObjectKeyFromObject(secret).String()}); err != nil {
		return nil
	}
	var requests []reconcile.Request
	for i := range clusters.Items {
		if c.Shard.Serves(&clusters.Items[i]) {
			c.observers.markStale(clusters.Items[i].Name)
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&clusters.Items[i])})
		}
	}
	return requests
}

// requestFor returns the request for a Cluster.
func requestFor(_ context.Context, cluster client.Object) []reconcile.Request {
	return []reconcile.Request{{NamespacedName: client.ObjectKeyFromObject(cluster)}}
}

// clusterOfLease returns the Cluster whose agent renews the Lease; none for other Leases.
func clusterOfLease(_ context.Context, lease client.Object) []reconcile.Request {
	cluster, ok := fleet.ClusterOfExecutionSpace(lease.GetNamespace())
	if !ok || lease.GetName() != cluster {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: cluster}}}
}

// reconcilerFor returns a reconciler that ignores members with another mode, because the mode can change while a
// request is queued.
func (c *Controller) reconcilerFor(mode clusterv1alpha1.ClusterSyncMode) reconcile.Reconciler {
	return reconcile.Func(func(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
		cluster := &clusterv1alpha1.Cluster{}
		if err := c.Hub.Get(ctx, req.NamespacedName, cluster); err == nil && cluster.Spec.SyncMode != mode {
			if mode == clusterv1alpha1.Push {
				c.observers.drop(req.Name)
			}
			return reconcile.Result{}, nil
		}
		return c.Reconcile(ctx, req)
	})
}

// Reconcile observes one member and writes its status and spec if they differ.
func (c *Controller) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	cluster := &clusterv1alpha1.Cluster{}
	if err := c.Hub.Get(ctx, req.NamespacedName, cluster); err != nil {
		if client.IgnoreNotFound(err) == nil {
			c.forget(req.Name)
		}
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	s := &state{cluster: cluster, member: fleet.FromCluster(cluster), status: cluster.Status}
	if !c.Shard.Serves(cluster) || s.member.Refused != "" {
		c.forget(req.Name)
		return reconcile.Result{}, nil
	}
	outcome := phase.Run(ctx, s, []phase.Step[*state]{
		{Name: "complete spec", Run: c.completeSpec},
		{Name: "observe", Run: c.observe},
		{Name: "patch status", Run: c.patchStatus},
		{Name: "update taints", Run: c.updateTaints},
		{Name: "return spec error", Run: func(_ context.Context, s *state) error { return s.specErr }},
	})
	switch outcome.Kind {
	case phase.Done:
		return reconcile.Result{RequeueAfter: s.requeueAfter}, nil
	case phase.Waiting:
		return reconcile.Result{RequeueAfter: outcome.After}, nil
	default:
		return reconcile.Result{}, client.IgnoreNotFound(outcome.Err)
	}
}

// Failures returns the number of consecutive observations of a push member that failed or found it unhealthy. name is
// the name of its Cluster. ok is false if the member has not been observed since the hub started.
func (c *Controller) Failures(name string) (times int, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	times, ok = c.failures[name]
	return times, ok
}

// updateFailures replaces the number of consecutive failures of a push member by the result of next.
func (c *Controller) updateFailures(name string, next func(before int) int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failures == nil {
		c.failures = map[string]int{}
	}
	c.failures[name] = next(c.failures[name])
}

// forget drops all state of a Cluster that does not exist or that this hub does not manage.
func (c *Controller) forget(name string) {
	c.observers.drop(name)
	c.Heartbeats.Forget(fleet.FromCluster(&clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: name}}).ID())
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.lastReady, name)
	delete(c.failures, name)
}
