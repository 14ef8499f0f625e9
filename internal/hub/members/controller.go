package members

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
	"github.com/towline/towline/internal/phase"
)

const (
	// pushWorkers is how many push members are asked at once. One that does not answer keeps its worker for some five of
	// every ten seconds, so that a thousand such members are needed for the others to be late. A worker that waits costs a
	// few KiB.
	pushWorkers = 500
	// pullWorkers is how many pull members are judged at once. That takes requests of the hub only, and waits for no
	// member.
	pullWorkers = 10
	// observeInterval is the time between two looks at a push member: that of the Karmada surface. observeJitter of it is
	// added at most.
	observeInterval = 10 * time.Second
	observeJitter   = 0.1
	// conflictPause is the time until the next try when somebody else wrote at the same moment.
	conflictPause = 100 * time.Millisecond
	// retryFirst is the first pause after an error; each is twice the one before, and none longer than that between two
	// looks.
	retryFirst = 200 * time.Millisecond
	// secretIndex finds the Clusters that are dialled with a Secret.
	secretIndex = "dialled-with"
)

// Controller keeps the status of Clusters true, and the taints that follow from it, and their specs complete.
type Controller struct {
	// Hub reads Clusters from a cache.
	Hub client.Client
	// Shard is the part of the fleet that this hub looks after.
	Shard fleet.Shard
	// Dial says how to reach a push member: by the same pointer until that changes.
	Dial func(ctx context.Context, m fleet.Member) (*rest.Config, error)
	// Heartbeats judges the agents of pull members.
	Heartbeats *heartbeats.Monitor
	Events     events.EventRecorder
	Clock      clock.PassiveClock

	observers observers

	// mu guards what follows.
	mu sync.Mutex
	// told is what the condition Ready said when we looked last, so that events tell of what agents write, too. A restart
	// loses no more than that.
	told map[string]string
	// failures counts the looks at each push member that failed in a row.
	failures map[string]int
}

// Setup makes mgr run the controller.
func (c *Controller) Setup(ctx context.Context, mgr ctrl.Manager) error {
	err := mgr.GetFieldIndexer().IndexField(ctx, &clusterv1alpha1.Cluster{}, secretIndex, func(obj client.Object) []string {
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
	// Members that do not answer must not delay that silence of others is noticed: each mode has its own queue.
	push := c.controller(mgr, clusterv1alpha1.Push, pushWorkers).WatchesMetadata(secrets, handler.EnqueueRequestsFromMapFunc(c.dialledWith))
	pull := c.controller(mgr, clusterv1alpha1.Pull, pullWorkers).Watches(&coordinationv1.Lease{}, handler.EnqueueRequestsFromMapFunc(renewedBy))
	return errors.Join(push.Complete(c.of(clusterv1alpha1.Push)), pull.Complete(c.of(clusterv1alpha1.Pull)))
}

// Start runs the observers of push members until ctx ends, and waits for them.
func (c *Controller) Start(ctx context.Context) error { return c.observers.run(ctx) }

// controller begins the controller of the members of one mode.
func (c *Controller) controller(mgr ctrl.Manager, mode clusterv1alpha1.ClusterSyncMode, workers int) *builder.Builder {
	names := map[clusterv1alpha1.ClusterSyncMode]string{clusterv1alpha1.Push: "members", clusterv1alpha1.Pull: "members-pull"}
	return ctrl.NewControllerManagedBy(mgr).
		Named(names[mode]).
		For(&clusterv1alpha1.Cluster{}, builder.WithPredicates(c.Shard.Predicate(), concerns(mode), othersChanged())).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: workers,
			RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](retryFirst, observeInterval),
		})
}

// concerns passes news of the Clusters of a mode, that one has left it included.
func concerns(mode clusterv1alpha1.ClusterSyncMode) predicate.Predicate {
	is := func(obj client.Object) bool { return obj.(*clusterv1alpha1.Cluster).Spec.SyncMode == mode }
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return is(e.Object) },
		UpdateFunc: func(e event.UpdateEvent) bool { return is(e.ObjectOld) || is(e.ObjectNew) },
		DeleteFunc: func(e event.DeleteEvent) bool { return is(e.Object) },
	}
}

// othersChanged drops the echo of what this controller writes itself.
func othersChanged() predicate.Predicate {
	othersWord := predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, after := e.ObjectOld.(*clusterv1alpha1.Cluster), e.ObjectNew.(*clusterv1alpha1.Cluster)
		if after.Spec.SyncMode == clusterv1alpha1.Pull {
			return !equality.Semantic.DeepEqual(readyOf(before.Status), readyOf(after.Status))
		}
		return fleet.FromCluster(before).Refused != fleet.FromCluster(after).Refused || factsLost(before.Status, after.Status)
	}}
	return predicate.Or(predicate.GenerationChangedPredicate{}, predicate.AnnotationChangedPredicate{}, othersWord)
}

// factsLost says whether what was reported of a member is no longer there. This controller never takes it away.
func factsLost(before, after clusterv1alpha1.ClusterStatus) bool {
	return before.KubernetesVersion != "" && after.KubernetesVersion == "" || len(before.APIEnablements) > 0 && len(after.APIEnablements) == 0 ||
		readyOf(before) != nil && readyOf(after) == nil
}

func readyOf(status clusterv1alpha1.ClusterStatus) *metav1.Condition {
	return meta.FindStatusCondition(status.Conditions, clusterv1alpha1.ClusterConditionReady)
}

// dialledWith returns the Clusters that are dialled with a Secret, and has them dialled anew.
func (c *Controller) dialledWith(ctx context.Context, secret client.Object) []reconcile.Request {
	var clusters clusterv1alpha1.ClusterList
	if err := c.Hub.List(ctx, &clusters, client.MatchingFields{secretIndex: client.ObjectKeyFromObject(secret).String()}); err != nil {
		return nil
	}
	var requests []reconcile.Request
	for i := range clusters.Items {
		if c.Shard.Serves(&clusters.Items[i]) {
			c.observers.doubt(clusters.Items[i].Name)
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&clusters.Items[i])})
		}
	}
	return requests
}

// renewedBy returns the Cluster whose agent renews a Lease.
func renewedBy(_ context.Context, lease client.Object) []reconcile.Request {
	cluster, ok := fleet.ClusterOfExecutionSpace(lease.GetNamespace())
	if !ok || lease.GetName() != cluster {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: cluster}}}
}

// of reconciles the members of one mode: one may have changed its mode while it was queued.
func (c *Controller) of(mode clusterv1alpha1.ClusterSyncMode) reconcile.Reconciler {
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

// Reconcile finds out how one member is and writes it, if that is new.
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
		{Name: "complete", Run: c.complete},
		{Name: "ask", Run: c.ask},
		{Name: "report", Run: c.report},
		{Name: "mark", Run: c.mark},
		{Name: "complain", Run: func(_ context.Context, s *state) error { return s.incomplete }},
	})
	switch outcome.Kind {
	case phase.Done:
		return reconcile.Result{RequeueAfter: s.next}, nil
	case phase.Waiting:
		return reconcile.Result{RequeueAfter: outcome.After}, nil
	default:
		return reconcile.Result{}, client.IgnoreNotFound(outcome.Err)
	}
}

// Failures returns how often in a row a push member, by the name of its Cluster, could not be asked or was not healthy;
// ok is false for one that has not been asked.
func (c *Controller) Failures(name string) (times int, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	times, ok = c.failures[name]
	return times, ok
}

// count notes how many looks at a push member have failed in a row by what that was before.
func (c *Controller) count(name string, next func(before int) int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failures == nil {
		c.failures = map[string]int{}
	}
	c.failures[name] = next(c.failures[name])
}

// forget drops what is kept of a Cluster that is gone, or not ours to look after.
func (c *Controller) forget(name string) {
	c.observers.drop(name)
	c.Heartbeats.Forget(fleet.FromCluster(&clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: name}}).ID())
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.told, name)
	delete(c.failures, name)
}
