package clusters

import (
	"context"
	"errors"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/phase"
)

const (
	// pushWorkers is how many push members are contacted at once. One that does not answer keeps its worker for
	// contactLimit at each contact, so that 600 such members are needed for the others to be late.
	pushWorkers = 100
	// pullWorkers is how many pull members are judged at once. That takes requests of the hub only, and waits for no
	// member.
	pullWorkers = 10
	// checksAtOnce is of how many members the checks run at once: each may take memory, and a processor.
	checksAtOnce = 4
	// contactLimit is how long a member may take to answer.
	contactLimit = 10 * time.Second
	// checksLimit is how long all checks of one member may take.
	checksLimit = 30 * time.Second
	// readinessInterval is the time between two contacts of a push member that is not ready by its checks: somebody waits
	// for it.
	readinessInterval = 10 * time.Second
	// contactInterval is the time between two contacts of a push member: that of the Sveltos surface.
	contactInterval = time.Minute
	// deliveryIndex finds the cluster whose Lease lives in a namespace.
	deliveryIndex = "delivery"
	// kubeconfigIndex finds the clusters that are reached with a Secret.
	kubeconfigIndex = "kubeconfig"
)

// Controller keeps the status of SveltosClusters true.
type Controller struct {
	// Hub reads SveltosClusters from a cache.
	Hub client.Client
	// Shard is the part of the fleet that this hub looks after.
	Shard fleet.Shard
	// Dial says how to reach a push member.
	Dial func(ctx context.Context, m fleet.Member) (*rest.Config, error)
	// Forget drops what was kept for the member "namespace/name", which is gone or another shard's.
	Forget func(member string)
	// Heartbeats judges the agents of pull members.
	Heartbeats *heartbeats.Monitor
	Events     events.EventRecorder
	Clock      clock.PassiveClock

	// mu guards awaited, gaps and turns.
	mu sync.Mutex
	// awaited are the pull members that we saw not ready: an event tells when one is. A restart loses no more than that.
	awaited map[types.NamespacedName]struct{}
	// gaps has the APIs of the push members that do not list all of them now, as they were listed before.
	gaps map[types.NamespacedName][]string
	// turns holds one entry for each member whose checks run.
	turns chan struct{}
}

// Setup makes mgr run the controller.
func (c *Controller) Setup(ctx context.Context, mgr ctrl.Manager) error {
	for name, key := range map[string]func(*libv1beta1.SveltosCluster) string{deliveryIndex: deliveryKey, kubeconfigIndex: kubeconfigKey} {
		err := mgr.GetFieldIndexer().IndexField(ctx, &libv1beta1.SveltosCluster{}, name, func(obj client.Object) []string {
			if value := key(obj.(*libv1beta1.SveltosCluster)); value != "" {
				return []string{value}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	secrets := &metav1.PartialObjectMetadata{}
	secrets.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
	// Members that do not answer must not delay that silence of others is noticed: each mode has its own queue.
	push := c.controller(mgr, "clusters", fleet.Push, pushWorkers).WatchesMetadata(secrets, c.lookup(kubeconfigIndex))
	pull := c.controller(mgr, "clusters-pull", fleet.Pull, pullWorkers).Watches(&coordinationv1.Lease{}, c.lookup(deliveryIndex))
	return errors.Join(push.Complete(c.of(fleet.Push)), pull.Complete(c.of(fleet.Pull)))
}

// controller begins the controller of the members of one mode.
func (c *Controller) controller(mgr ctrl.Manager, name string, mode fleet.Mode, workers int) *builder.Builder {
	ours := predicate.NewPredicateFuncs(func(obj client.Object) bool { return modeOf(obj.(*libv1beta1.SveltosCluster)) == mode })
	return ctrl.NewControllerManagedBy(mgr).
		Named(name).
		For(&libv1beta1.SveltosCluster{}, builder.WithPredicates(c.Shard.Predicate(), ours, othersChanged())).
		WithOptions(controller.Options{MaxConcurrentReconciles: workers})
}

// of reconciles the members of one mode: one may have changed its mode while it was queued.
func (c *Controller) of(mode fleet.Mode) reconcile.Reconciler {
	return reconcile.Func(func(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
		cluster := &libv1beta1.SveltosCluster{}
		if err := c.Hub.Get(ctx, req.NamespacedName, cluster); err == nil && modeOf(cluster) != mode {
			return reconcile.Result{}, nil
		}
		return c.Reconcile(ctx, req)
	})
}

func modeOf(cluster *libv1beta1.SveltosCluster) fleet.Mode {
	return fleet.FromSveltosCluster(cluster).Mode
}

// deliveryKey is namespace/name of the Lease of a pull member.
func deliveryKey(cluster *libv1beta1.SveltosCluster) string {
	if m := fleet.FromSveltosCluster(cluster); m.Mode == fleet.Pull {
		return m.DeliveryNamespace + "/" + m.Name
	}
	return ""
}

// kubeconfigKey is namespace/name of the Secret that a push member is reached with.
func kubeconfigKey(cluster *libv1beta1.SveltosCluster) string {
	return fleet.FromSveltosCluster(cluster).CredentialsSecret()
}

// lookup maps an object to the clusters that an index lists under its name.
func (c *Controller) lookup(index string) handler.EventHandler {
	return handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, obj client.Object) []reconcile.Request {
		var clusters libv1beta1.SveltosClusterList
		key := client.ObjectKeyFromObject(obj).String()
		if err := c.Hub.List(ctx, &clusters, client.MatchingFields{index: key}); err != nil {
			return nil
		}
		requests := make([]reconcile.Request, 0, len(clusters.Items))
		for i := range clusters.Items {
			if c.Shard.Serves(&clusters.Items[i]) {
				requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&clusters.Items[i])})
			}
		}
		return requests
	})
}

// othersChanged drops the echo of what this controller writes itself of push members, which costs a contact. No contact
// takes back that a member is ready: somebody else did.
func othersChanged() predicate.Predicate {
	agentReported := predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, after := e.ObjectOld.(*libv1beta1.SveltosCluster), e.ObjectNew.(*libv1beta1.SveltosCluster)
		return factsLost(before.Status, after.Status) || after.Spec.PullMode && said(before.Status) != said(after.Status)
	}}
	return predicate.Or(predicate.GenerationChangedPredicate{}, predicate.LabelChangedPredicate{}, predicate.AnnotationChangedPredicate{}, agentReported)
}

// factsLost says whether what was found of a member is no longer in its status. Neither this controller nor an agent
// removes it.
func factsLost(before, after libv1beta1.SveltosClusterStatus) bool {
	return before.Ready && !after.Ready || before.Version != "" && after.Version == "" || len(before.APIVersions) > 0 && len(after.APIVersions) == 0
}

// word is what an agent says of its cluster, and what we make of that, which others may edit.
type word struct {
	ready         bool
	failure       string
	checkFailures int32
	check         string
	connection    libv1beta1.ConnectionStatus
	failures      int32
}

func said(s libv1beta1.SveltosClusterStatus) word {
	return word{s.Ready, s.FailureMessage, s.AgentCheckFailures, s.AgentCheckMessage, s.ConnectionStatus, s.ConnectionFailures}
}

// Reconcile contacts one member and writes what it found, if that is new.
func (c *Controller) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	cluster := &libv1beta1.SveltosCluster{}
	if err := c.Hub.Get(ctx, req.NamespacedName, cluster); err != nil {
		if client.IgnoreNotFound(err) == nil {
			c.forget(req.NamespacedName)
		}
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if !c.Shard.Serves(cluster) {
		c.forget(req.NamespacedName)
		return reconcile.Result{}, nil
	}
	s := &state{cluster: cluster, member: fleet.FromSveltosCluster(cluster), status: cluster.Status, labels: cluster.Labels}
	outcome := phase.Run(ctx, s, []phase.Step[*state]{
		{Name: "window", Run: c.window},
		{Name: "contact", Run: c.contact},
		{Name: "label", Run: c.label},
		{Name: "report", Run: c.report},
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

func (c *Controller) forget(name types.NamespacedName) {
	c.Forget(name.String())
	c.Heartbeats.Forget(fleet.ID{Type: fleet.TypeSveltos, Namespace: name.Namespace, Name: name.Name})
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.awaited, name)
	delete(c.gaps, name)
}

// fillGaps returns facts with the APIs that were listed before if the member does not list all of them now: a list with
// gaps would make charts render as if an API had gone. They are remembered until it does: the status, which is old, may
// be lost before that.
func (c *Controller) fillGaps(name types.NamespacedName, old []string, facts fleet.Facts) fleet.Facts {
	c.mu.Lock()
	defer c.mu.Unlock()
	if facts.Complete {
		delete(c.gaps, name)
		return facts
	}
	if len(old) == 0 {
		old = c.gaps[name]
	}
	if len(old) == 0 {
		return facts
	}
	if c.gaps == nil {
		c.gaps = map[types.NamespacedName][]string{}
	}
	c.gaps[name], facts.APIVersions = old, old
	return facts
}

// checkTurns returns what is filled while checks run.
func (c *Controller) checkTurns() chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.turns == nil {
		c.turns = make(chan struct{}, checksAtOnce)
	}
	return c.turns
}
