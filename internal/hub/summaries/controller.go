package summaries

import (
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"k8s.io/utils/lru"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	ctrlsource "sigs.k8s.io/controller-runtime/pkg/source"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/fluxsources"
	"github.com/towline/towline/internal/hub/ratelimit"
	"github.com/towline/towline/internal/hub/resources"
	"github.com/towline/towline/internal/hub/slots"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

const (
	// minRetryDelay is the delay of the first retry of a failed reconcile. The delay doubles up to maxRetryDelay.
	minRetryDelay = 500 * time.Millisecond
	maxRetryDelay = 5 * time.Minute
	// reconcileTimeout bounds one reconcile, so that members that never answer do not block all workers. The next
	// reconcile continues.
	reconcileTimeout = 10 * time.Minute
	// staleDelay is the delay until the next reconcile if the cache is older than the last write of the summary.
	staleDelay = 100 * time.Millisecond
	// normalEventsPerSecond and normalEventsBurst limit the events of type Normal.
	normalEventsPerSecond = 10
	normalEventsBurst     = 100
	// Status updates by the agent of a pull member cause at most agentBurst reconciles of one summary at once, and then
	// one per agentInterval. For all summaries of the member together the limits are memberBurst and memberInterval: the
	// reports about a change of a hundred profiles are within the burst.
	agentInterval  = 6 * time.Second
	agentBurst     = 20
	memberInterval = 100 * time.Millisecond
	memberBurst    = 1000
	// maxDeletedClusters is the maximum number of entries in deletedClusters.
	maxDeletedClusters = 10_000
	// ClusterIndex is the name of the index of summaries by the text of their cluster's fleet.ID.
	ClusterIndex = "cluster"
	// ProfileIndex is the name of the index of summaries by their profiles, see ProfileIndexKey.
	ProfileIndex = "owner"
)

// Controller delivers profiles to clusters. It reconciles ClusterSummaries: one per profile and cluster.
type Controller struct {
	// Hub reads summaries, profiles, clusters and ClusterConfigurations from a cache; Live reads from the API server.
	Hub  client.Client
	Live client.Reader
	// Shard selects the clusters of this hub.
	Shard fleet.Shard
	// Composer builds bundles, and Transport delivers them.
	Composer  *Composer
	Transport deliver.Transport
	// Resources reads and watches the objects of templateResourceRefs.
	Resources *resources.Watcher
	// Configurations writes the ClusterConfigurations.
	Configurations *Configurations
	// RecheckDelay is, by mode, the delay until a bundle with outdated releases is rendered again. It is zero for a mode
	// in which a watch triggers the reconcile.
	RecheckDelay map[fleet.Mode]time.Duration
	// UnreachableReason returns the reason why a SveltosCluster that is deregistered by force is unreachable, "" if it is
	// reachable. It returns "" for a Cluster: the controller that deregisters the Cluster checks this.
	UnreachableReason func(ctx context.Context, cluster client.Object) (string, error)
	// Wakeups is the channel of the summaries to reconcile after changes on push members, which no watch on the hub
	// reports.
	Wakeups <-chan event.GenericEvent
	// OnDeliveryStart is called before the delivery of a bundle whose hash is not in the status of the feature yet. It may
	// be nil.
	OnDeliveryStart func(summary client.ObjectKey, feature libv1beta1.FeatureID)
	// Flux watches the sources of Flux that summaries refer to.
	Flux   *fluxsources.Watcher
	Events events.EventRecorder
	Clock  clock.PassiveClock

	// metadata reads the metadata of Secrets from the cache.
	metadata client.Reader
	// fluxObject reads a source of Flux from the cache.
	fluxObject func(context.Context, source.Reference) (*unstructured.Unstructured, error)
	references *referenceIndex
	ownWrites  ownWrites
	starts     deliveryStarts
	// slots limits the concurrent reconciles for one cluster, profile or namespace (workers.go).
	slots *slots.Slots
	// raisedProfiles has the ProfileIndexKeys of the profiles whose summaries raisePriority has queued.
	raisedProfiles *lru.Cache
	// deletedClusters has the fleet.ID of the clusters that were deleted while this process watched them.
	deletedClusters *lru.Cache
	// normalEvents limits the events of type Normal.
	normalEvents *rate.Limiter
}

// Setup adds the indexes and the controller to mgr. It is called once, before mgr starts.
func (c *Controller) Setup(ctx context.Context, mgr ctrl.Manager) error {
	c.references, c.metadata, c.slots = newReferenceIndex(), mgr.GetCache(), slots.New()
	c.deletedClusters, c.raisedProfiles = lru.New(maxDeletedClusters), lru.New(maxRaised)
	c.normalEvents = newEventLimiter()
	err := mgr.GetFieldIndexer().IndexField(ctx, &configv1beta1.ClusterSummary{}, ClusterIndex, func(obj client.Object) []string {
		return []string{match.MemberID(obj.(*configv1beta1.ClusterSummary)).String()}
	})
	if err != nil {
		return err
	}
	if err := mgr.GetFieldIndexer().IndexField(ctx, &configv1beta1.ClusterSummary{}, ProfileIndex, ProfileIndexKeys); err != nil {
		return err
	}
	if err := c.watchDeletions(ctx, mgr.GetCache()); err != nil {
		return err
	}
	if err := c.setupFlux(mgr); err != nil {
		return err
	}
	configMaps, secrets := &metav1.PartialObjectMetadata{}, &metav1.PartialObjectMetadata{}
	configMaps.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("ConfigMap"))
	secrets.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
	if err := mgr.GetFieldIndexer().IndexField(ctx, secrets, generatedIndex, generatedOwnerUIDs); err != nil {
		return err
	}
	agentLimiter := ratelimit.NewWithin(ratelimit.New(memberInterval, memberBurst, c.Clock), agentInterval, agentBurst)
	controllerBuilder := ctrl.NewControllerManagedBy(mgr).
		Named("summaries").
		For(&configv1beta1.ClusterSummary{}, builder.WithPredicates(predicate.Or(specOrMetadataChanged(), c.statusChangedByOthers()))).
		Watches(&configv1beta1.ClusterSummary{}, handler.EnqueueRequestsFromMapFunc(c.summariesWithSameRelease), builder.WithPredicates(specOrMetadataChanged())).
		Watches(&libv1beta1.ConfigurationGroup{}, agentLimiter.Handler(summaryOfGroup, ratelimit.ByAgentOfGroup), builder.WithPredicates(reportChanged())).
		WatchesMetadata(configMaps, c.enqueueReferring("ConfigMap")).
		WatchesMetadata(secrets, c.enqueueReferring("Secret")).
		WatchesRawSource(ctrlsource.Channel(c.Wakeups, &handler.EnqueueRequestForObject{})).
		WatchesRawSource(ctrlsource.Channel(c.Resources.Changed, &handler.EnqueueRequestForObject{})).
		WatchesRawSource(ctrlsource.Func(func(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
			c.slots.Queue = queue
			return nil
		})).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: pullWorkers + pushWorkers,
			ReconciliationTimeout:   reconcileTimeout,
			RateLimiter:             c.slots.RateLimiter(workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](minRetryDelay, maxRetryDelay)),
		})
	if c.remoteFetcher() != nil {
		controllerBuilder = controllerBuilder.WatchesRawSource(c.changedURLSource())
	}
	for _, cluster := range fleet.NewObjects() {
		controllerBuilder = controllerBuilder.Watches(cluster, agentLimiter.Handler(c.summariesOfCluster, ratelimit.ByAgentOfCluster), builder.WithPredicates(c.Shard.Predicate(), memberChanged()))
	}
	return controllerBuilder.Complete(c)
}

// specOrMetadataChanged ignores changes of the status, and the finalizer that this controller adds.
func specOrMetadataChanged() predicate.Predicate {
	return predicate.Or(predicate.GenerationChangedPredicate{}, predicate.AnnotationChangedPredicate{}, predicate.LabelChangedPredicate{}, predicate.Funcs{
		UpdateFunc: func(e event.UpdateEvent) bool {
			removed := len(e.ObjectNew.GetFinalizers()) < len(e.ObjectOld.GetFinalizers())
			return removed || e.ObjectOld.GetDeletionTimestamp().IsZero() != e.ObjectNew.GetDeletionTimestamp().IsZero()
		},
	})
}

// statusChangedByOthers selects status updates by other clients. The reconcile reverts them.
func (c *Controller) statusChangedByOthers() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return false },
		DeleteFunc: func(event.DeleteEvent) bool { return false },
		UpdateFunc: func(e event.UpdateEvent) bool {
			before, after := e.ObjectOld.(*configv1beta1.ClusterSummary), e.ObjectNew.(*configv1beta1.ClusterSummary)
			return !equality.Semantic.DeepEqual(before.Status, after.Status) && !c.ownWrites.observeEvent(client.ObjectKeyFromObject(after), after.ResourceVersion)
		},
	}
}

// memberChanged ignores heartbeats and the counts of nodes and pods.
func memberChanged() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		return !equality.Semantic.DeepEqual(fleet.WithoutVolatileFields(e.ObjectOld), fleet.WithoutVolatileFields(e.ObjectNew))
	}}
}

// reportChanged selects changes of the spec and the status of a group, its creation and its deletion. It ignores
// changes of its metadata.
func reportChanged() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, after := e.ObjectOld.(*libv1beta1.ConfigurationGroup), e.ObjectNew.(*libv1beta1.ConfigurationGroup)
		return before.Generation != after.Generation || !equality.Semantic.DeepEqual(before.Status, after.Status)
	}}
}

// summaryOfGroup returns the request for the summary whose bundle a ConfigurationGroup delivers, nil for a group of
// another requestor, for example of a Work.
func summaryOfGroup(_ context.Context, obj client.Object) []reconcile.Request {
	id, ok := deliver.IDOf(obj)
	ref := obj.(*libv1beta1.ConfigurationGroup).Spec.SourceRef
	if !ok || ref == nil || id.RequestorKind != configv1beta1.ClusterSummaryKind {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: ref.Namespace, Name: id.RequestorName}}}
}

func (c *Controller) summariesOfCluster(ctx context.Context, cluster client.Object) []reconcile.Request {
	member := fleet.FromObject(cluster)
	summaries, err := c.listSummaries(ctx, member.ID())
	if err != nil {
		log.FromContext(ctx).Error(err, "find the summaries of a cluster", logkeys.Member, member.Key())
	}
	return toRequests(summaries)
}

// summariesWithSameRelease returns the other summaries of the cluster that can have a Helm release of obj: after a
// change of obj, another summary can become the manager of the release. Since an event handler must not block, it
// expands no templates: a release whose name is a template matches every release.
func (c *Controller) summariesWithSameRelease(ctx context.Context, obj client.Object) []reconcile.Request {
	changed := obj.(*configv1beta1.ClusterSummary)
	if len(changed.Spec.ClusterProfileSpec.HelmCharts) == 0 {
		return nil
	}
	summaries, err := c.listSummaries(ctx, match.MemberID(changed))
	if err != nil {
		log.FromContext(ctx).Error(err, "find the summaries with the same release", logkeys.Summary, client.ObjectKeyFromObject(obj))
		return nil
	}
	return toRequests(slices.DeleteFunc(summaries, func(s configv1beta1.ClusterSummary) bool {
		return s.Name == changed.Name || !canShareRelease(changed, &s)
	}))
}

// findMember returns the member of summary and its cluster object. cluster is nil if it does not exist; member then has
// only type, namespace and name. isServed is true if this hub reconciles the summary: the cluster belongs to its shard,
// and the cache has all summaries of the cluster. The default shard also serves the summaries of all shards whose
// cluster does not exist, so that their finalizers are removed.
func (c *Controller) findMember(ctx context.Context, summary *configv1beta1.ClusterSummary) (member fleet.Member, cluster client.Object, isServed bool, err error) {
	target := match.MemberID(summary)
	member, cluster, err = fleet.Get(ctx, c.Hub, target.Type, target.Namespace, target.Name)
	if apierrors.IsNotFound(err) {
		return fleet.Member{Type: target.Type, Namespace: target.Namespace, Name: target.Name}, nil, c.Shard.IsDefault(), nil
	}
	if err != nil {
		return fleet.Member{}, nil, false, err
	}
	return member, cluster, c.Shard.SeesAll(cluster) && c.Shard.HasLabel(summary), nil
}

// listSummaries returns the summaries of a cluster. The caller owns the slice, but must not change the maps, slices and
// pointers in it: they belong to the cache.
func (c *Controller) listSummaries(ctx context.Context, cluster fleet.ID) ([]configv1beta1.ClusterSummary, error) {
	var list configv1beta1.ClusterSummaryList
	if err := c.Hub.List(ctx, &list, client.MatchingFields{ClusterIndex: cluster.String()}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list summaries of cluster %s: %w", cluster, err)
	}
	return list.Items, nil
}

func toRequests(summaries []configv1beta1.ClusterSummary) []reconcile.Request {
	all := make([]reconcile.Request, 0, len(summaries))
	for i := range summaries {
		all = append(all, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&summaries[i])})
	}
	return all
}

// enqueueReferring enqueues the summaries that refer to an object of kind.
func (c *Controller) enqueueReferring(kind string) handler.EventHandler {
	return handler.EnqueueRequestsFromMapFunc(func(_ context.Context, obj client.Object) []reconcile.Request {
		return c.requestsReferring(source.Reference{Kind: kind, Namespace: obj.GetNamespace(), Name: obj.GetName()})
	})
}

// Reconcile delivers one profile to one cluster, or withdraws it. If no slot is free, it ends, and slots queues req
// again when a slot is free.
func (c *Controller) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	defer c.slots.Skip(req) // gives a slot that was kept for req to another request if Acquire is not called
	summary := &configv1beta1.ClusterSummary{}
	if err := c.Hub.Get(ctx, req.NamespacedName, summary); err != nil {
		if apierrors.IsNotFound(err) {
			c.ownWrites.forget(req.NamespacedName)
			c.starts.forget(req.NamespacedName)
			return reconcile.Result{}, c.forgetReferences(ctx, req.NamespacedName)
		}
		return reconcile.Result{}, err
	}
	member, cluster, isServed, err := c.findMember(ctx, summary)
	if err != nil {
		return reconcile.Result{}, err
	}
	if !isServed {
		return reconcile.Result{}, c.forgetReferences(ctx, req.NamespacedName)
	}
	if c.ownWrites.isBehind(req.NamespacedName, summary.ResourceVersion, c.Clock.Now()) {
		return reconcile.Result{RequeueAfter: staleDelay}, nil
	}
	if !c.Shard.HasLabel(summary) {
		// The summary is of another shard, and its cluster does not exist. The cache has only a part of its status.
		summary = &configv1beta1.ClusterSummary{}
		if err := c.Live.Get(ctx, req.NamespacedName, summary); err != nil {
			return reconcile.Result{}, client.IgnoreNotFound(err)
		}
	}
	pool, keys := workersFor(summary, member)
	slot, ok := c.slots.Acquire(req, pool, keys...)
	if !ok {
		return reconcile.Result{}, nil
	}
	s := newState(summary, cluster, member)
	defer func() { slot.Release(slowKeys(s, member)...) }()
	return c.reconcileSummary(ctx, s)
}

func (c *Controller) reconcileSummary(ctx context.Context, s *state) (reconcile.Result, error) {
	summary := s.summary
	s.setHashKey(c.Composer.HashKey)
	ctx = log.IntoContext(ctx, log.FromContext(ctx).WithValues(logkeys.Summary, client.ObjectKeyFromObject(summary).String()))
	steps := []phase.Step[*state]{
		{Name: "check cluster", Run: c.checkCluster},
		{Name: "check suspension", Run: c.checkSuspended},
		{Name: "withdraw from the hub", Run: c.withdrawLocal},
		{Name: "check support", Run: c.checkSupported},
		{Name: "check reachability", Run: c.checkReachable},
		{Name: "find deployed", Run: c.findDeployed},
		{Name: "compose", Run: c.compose},
		{Name: "add finalizer", Run: c.addFinalizer},
		{Name: "report start", Run: c.reportStart},
		{Name: "deliver", Run: c.deliver},
		{Name: "withdraw", Run: c.withdrawFeatures},
		{Name: "record", Run: c.recordDeployed},
		{Name: "clean up generated values", Run: c.cleanUpGenerated},
	}
	if !summary.DeletionTimestamp.IsZero() {
		steps = []phase.Step[*state]{
			{Name: "check cluster", Run: c.checkCluster},
			{Name: "check suspension", Run: c.checkSuspended},
			{Name: "withdraw from the hub", Run: c.withdrawLocal},
			{Name: "check reachability", Run: c.checkReachable},
			{Name: "find deployed", Run: c.findDeployed},
			{Name: "withdraw", Run: c.withdrawFeatures},
			{Name: "record", Run: c.recordDeployed},
			{Name: "clean up generated values", Run: c.cleanUpGenerated},
		}
	}
	defer func() { s.memory.Release() }()
	outcome := phase.Run(ctx, s, steps)
	s.mergeLocal()
	err := c.report(ctx, s, outcome)
	if err == nil && outcome.Kind == phase.Done {
		err = c.removeFinalizer(ctx, s)
	}
	return result(s, outcome, err)
}

// result returns the result of a reconcile. statusErr is the error of report or removeFinalizer.
func result(s *state, outcome phase.Outcome, statusErr error) (reconcile.Result, error) {
	if apierrors.IsConflict(statusErr) || apierrors.IsConflict(outcome.Err) {
		// The cache is behind.
		return reconcile.Result{RequeueAfter: staleDelay}, nil
	}
	if statusErr != nil {
		return reconcile.Result{}, statusErr
	}
	if outcome.Kind == phase.Retriable {
		return reconcile.Result{}, outcome.Err
	}
	if s.retryErr != nil {
		return reconcile.Result{}, s.retryErr
	}
	if s.isStatusEdited {
		return reconcile.Result{RequeueAfter: staleDelay}, nil
	}
	if outcome.Kind == phase.Waiting {
		return reconcile.Result{RequeueAfter: outcome.After}, nil
	}
	return reconcile.Result{RequeueAfter: s.recheckAfter}, nil
}
