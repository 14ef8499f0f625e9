package sveltosclusters

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/hub/ratelimit"
	"github.com/towline/towline/internal/hub/slots"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/sandbox"
)

const (
	// pushWorkers is the number of push members that are contacted concurrently. A member that does not answer occupies
	// a worker for contactTimeout in every contactInterval. Thus other members are delayed only if 600 members do not
	// answer, or 480 in their namespace.
	pushWorkers = 100
	// pushNamespaceWorkers is the maximum number of workers for the members in one namespace, which belong to one tenant.
	// The other workers are reserved for namespaces without a running contact. In a fleet with one namespace they are
	// idle.
	pushNamespaceWorkers = 80
	// pullWorkers is the number of pull members that are evaluated concurrently. An evaluation sends requests to the
	// hub only.
	pullWorkers = 10
	// maxConcurrentChecks is the number of members whose checks run concurrently: each run can use much memory and CPU
	// time.
	maxConcurrentChecks = 4
	// maxChecksOfNamespace is the same maximum for the members in one namespace, which belong to one tenant.
	maxChecksOfNamespace = 3
	// A namespace is slow if its last checks took longer than slowChecks. A slow namespace has at most one running check,
	// and all slow namespaces together have at most maxSlowChecks.
	slowChecks    = 5 * time.Second
	maxSlowChecks = 2
	// contactTimeout limits the requests of one contact, without the checks.
	contactTimeout = 10 * time.Second
	// checksTimeout limits all checks of one member together.
	checksTimeout = 30 * time.Second
	// readinessInterval is the time between two contacts of a push member until its readiness checks pass.
	readinessInterval = 10 * time.Second
	// contactInterval is the time between two contacts of a push member, as in Sveltos.
	contactInterval = time.Minute
	// leaseIndex finds the pull member of a Lease.
	leaseIndex = "delivery"
	// The agent of a pull member can cause agentBurst evaluations of its cluster at once, and then one per agentInterval.
	agentInterval = time.Second
	agentBurst    = 20
	// kubeconfigIndex finds the push members that are contacted with the credentials in a Secret.
	kubeconfigIndex = "kubeconfig"
)

// Controller reconciles SveltosClusters. See the package comment.
type Controller struct {
	// Hub reads SveltosClusters from a cache.
	Hub client.Client
	// Shard selects the clusters of this controller.
	Shard fleet.Shard
	// LimitConfig limits the connections of config, a renewed configuration for a push member in namespace. It may be nil.
	LimitConfig func(config *rest.Config, namespace string) error
	// MemberConfig returns the configuration for requests to a push member.
	MemberConfig func(ctx context.Context, m fleet.Member) (*rest.Config, error)
	// Forget drops all cached state of the member "namespace/name". It is called when the SveltosCluster does not exist or
	// belongs to another shard.
	Forget func(member string)
	// Heartbeats evaluates the agents of pull members.
	Heartbeats *heartbeats.Monitor
	// Sandbox runs the scripts of checks; nil runs them in this process.
	Sandbox *sandbox.Pool
	Events  events.EventRecorder
	Clock   clock.PassiveClock

	// mu guards notReady and formerAPIs.
	mu sync.Mutex
	// notReady has the pull members that were not ready at the last reconcile. Their change to ready is recorded as an
	// event, unless the hub restarts before.
	notReady map[types.NamespacedName]struct{}
	// formerAPIs has the merged API list of each push member that last returned an incomplete list; see keepAPIVersions.
	formerAPIs map[types.NamespacedName][]string
	// agentLimiter limits the evaluations that the agent of one pull member can cause.
	agentLimiter *ratelimit.Limiter
	// contactSlots shares the workers for push members among namespaces. checkSlots shares the concurrent checks. Both are
	// nil without Setup, in tests.
	contactSlots, checkSlots *slots.Slots
}

// Setup adds the indexes and the two controllers to mgr. It is called once, before mgr starts.
func (c *Controller) Setup(ctx context.Context, mgr ctrl.Manager) error {
	c.agentLimiter, c.contactSlots, c.checkSlots = ratelimit.New(agentInterval, agentBurst, c.Clock), slots.New(), slots.New()
	for name, key := range map[string]func(*libv1beta1.SveltosCluster) string{leaseIndex: leaseKey, kubeconfigIndex: kubeconfigKey} {
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
	// Each mode has its own queue: push members that do not answer must not delay the evaluation of heartbeats.
	push := c.newBuilder(mgr, "clusters", fleet.Push, pushWorkers).WatchesMetadata(secrets, handler.EnqueueRequestsFromMapFunc(c.findByIndex(kubeconfigIndex))).
		// The slots need the queue, to which they add waiting requests. Only a source gets it.
		WatchesRawSource(source.Func(func(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
			c.contactSlots.Queue, c.checkSlots.Queue = queue, queue
			return nil
		}))
	pull := c.newBuilder(mgr, "clusters-pull", fleet.Pull, pullWorkers).Watches(&coordinationv1.Lease{}, c.agentLimiter.Handler(c.findByIndex(leaseIndex), ratelimit.ByAgent))
	return errors.Join(push.Complete(c.reconcilerFor(fleet.Push)), pull.Complete(c.reconcilerFor(fleet.Pull)))
}

// newBuilder returns a builder for the controller of the members with one mode.
func (c *Controller) newBuilder(mgr ctrl.Manager, name string, mode fleet.Mode, workers int) *builder.Builder {
	hasMode := predicate.NewPredicateFuncs(func(obj client.Object) bool { return modeOf(obj.(*libv1beta1.SveltosCluster)) == mode })
	return ctrl.NewControllerManagedBy(mgr).
		Named(name).
		Watches(&libv1beta1.SveltosCluster{}, c.agentLimiter.Handler(requestFor, ratelimit.ByAgentOfCluster), builder.WithPredicates(c.Shard.Predicate(), hasMode, needsContact())).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: workers,
			RateLimiter:             c.contactSlots.RateLimiter(c.checkSlots.RateLimiter(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())),
		})
}

// reconcilerFor returns a reconciler that ignores members with another mode, because the mode can change while a
// request is queued.
func (c *Controller) reconcilerFor(mode fleet.Mode) reconcile.Reconciler {
	return reconcile.Func(func(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
		if mode == fleet.Push {
			// If a slot was reserved for req and is not acquired, Skip passes it to the next request.
			defer c.contactSlots.Skip(req)
			defer c.checkSlots.Skip(req)
		}
		cluster := &libv1beta1.SveltosCluster{}
		err := c.Hub.Get(ctx, req.NamespacedName, cluster)
		if err == nil && modeOf(cluster) != mode {
			return reconcile.Result{}, nil
		}
		if err == nil && mode == fleet.Push {
			slot, ok := c.acquireContactSlot(req)
			if !ok {
				return reconcile.Result{}, nil
			}
			defer slot.Release()
		}
		return c.Reconcile(ctx, req)
	})
}

// acquireContactSlot acquires a slot for the contact of a push member. If ok is true, the caller must release it.
// Otherwise req is queued again when its namespace has a free worker. No namespace counts as slow.
func (c *Controller) acquireContactSlot(req reconcile.Request) (slot *slots.Slot, ok bool) {
	pool := slots.Pool{Name: "contacts", Workers: pushWorkers, Slow: pushWorkers}
	return c.contactSlots.Acquire(req, pool, slots.Key{Name: req.Namespace, Max: pushNamespaceWorkers, Shared: pushNamespaceWorkers})
}

func modeOf(cluster *libv1beta1.SveltosCluster) fleet.Mode {
	return fleet.FromSveltosCluster(cluster).Mode
}

// leaseKey returns namespace/name of the Lease of a pull member, "" for a push member.
func leaseKey(cluster *libv1beta1.SveltosCluster) string {
	if m := fleet.FromSveltosCluster(cluster); m.Mode == fleet.Pull {
		return m.DeliveryNamespace + "/" + m.Name
	}
	return ""
}

// kubeconfigKey returns namespace/name of the Secret with the credentials for a push member.
func kubeconfigKey(cluster *libv1beta1.SveltosCluster) string {
	return fleet.FromSveltosCluster(cluster).CredentialsSecret()
}

// requestFor returns the request for a cluster.
func requestFor(_ context.Context, cluster client.Object) []reconcile.Request {
	return []reconcile.Request{{NamespacedName: client.ObjectKeyFromObject(cluster)}}
}

// findByIndex returns a function that maps an object to the clusters that have its key in index.
func (c *Controller) findByIndex(index string) handler.MapFunc {
	return func(ctx context.Context, obj client.Object) []reconcile.Request {
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
	}
}

// needsContact drops most updates of the status, because this controller writes them and a contact is expensive. It
// passes updates of the status by other clients: lost facts (see hasLostFacts), and a changed agentReport.
func needsContact() predicate.Predicate {
	agentReported := predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, after := e.ObjectOld.(*libv1beta1.SveltosCluster), e.ObjectNew.(*libv1beta1.SveltosCluster)
		return hasLostFacts(before.Status, after.Status) || after.Spec.PullMode && agentReportIn(before.Status) != agentReportIn(after.Status)
	}}
	return predicate.Or(predicate.GenerationChangedPredicate{}, predicate.LabelChangedPredicate{}, predicate.AnnotationChangedPredicate{}, agentReported)
}

// hasLostFacts returns whether the status of a member has lost Ready, its version or its APIs. Neither this controller
// nor an agent removes them.
func hasLostFacts(before, after libv1beta1.SveltosClusterStatus) bool {
	return before.Ready && !after.Ready || before.Version != "" && after.Version == "" || len(before.APIVersions) > 0 && len(after.APIVersions) == 0
}

// agentReport has the fields of the status of a pull member that its agent writes, and the fields that this controller
// computes from them. If one of them changes, the member is reconciled.
type agentReport struct {
	// reportedAt counts as a heartbeat: the time limit for the next heartbeat begins when the controller reads a new
	// value.
	reportedAt    time.Time
	ready         bool
	message       string
	checkFailures int32
	checkMessage  string
	connection    libv1beta1.ConnectionStatus
	failures      int32 // of the connection
}

func agentReportIn(s libv1beta1.SveltosClusterStatus) agentReport {
	return agentReport{ptr.Deref(s.AgentLastReportTime, metav1.Time{}).UTC(), s.Ready, s.FailureMessage, s.AgentCheckFailures, s.AgentCheckMessage, s.ConnectionStatus, s.ConnectionFailures}
}

// Reconcile observes one member and writes its status and labels if they differ.
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
		{Name: "window", Run: c.applyWindow},
		{Name: "contact", Run: c.contact},
		{Name: "label", Run: c.patchLabels},
		{Name: "report", Run: c.patchStatus},
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

// forget drops all state of a cluster that does not exist or belongs to another shard.
func (c *Controller) forget(name types.NamespacedName) {
	c.Forget(name.String())
	c.Heartbeats.Forget(fleet.ID{Type: fleet.TypeSveltos, Namespace: name.Namespace, Name: name.Name})
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.notReady, name)
	delete(c.formerAPIs, name)
}

// keepAPIVersions returns facts. If the list of APIs is incomplete, because an aggregated API does not answer, it adds
// the former APIs, unless the list would not fit the status. Without them charts would be rendered as if the member did
// not serve the API. former is the list in the status. If the status was lost, keepAPIVersions uses the result of the
// last call with an incomplete list.
func (c *Controller) keepAPIVersions(name types.NamespacedName, former []string, facts fleet.Facts) fleet.Facts {
	c.mu.Lock()
	defer c.mu.Unlock()
	if facts.Complete {
		delete(c.formerAPIs, name)
		return facts
	}
	if len(former) == 0 {
		former = c.formerAPIs[name]
	}
	all := slices.Concat(former, facts.APIVersions)
	slices.Sort(all)
	if all = slices.Compact(all); fitsStatus(all) {
		facts.APIVersions = all
	}
	if c.formerAPIs == nil {
		c.formerAPIs = map[types.NamespacedName][]string{}
	}
	c.formerAPIs[name] = facts.APIVersions
	return facts
}
