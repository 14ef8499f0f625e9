package summaries

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
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
	ctrlsource "sigs.k8s.io/controller-runtime/pkg/source"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

const (
	// workers is how many summaries are worked on at once: the default of the Sveltos surface.
	workers = 20
	// retryFirst and retryMost are the first and the longest pause before a failed attempt is repeated; each is twice the
	// one before.
	retryFirst = 500 * time.Millisecond
	retryMost  = 5 * time.Minute
	// reconcileLimit bounds one reconcile, so that members that take requests and never answer do not keep all workers.
	// What was not finished goes on with the next attempt.
	reconcileLimit = 10 * time.Minute
	// staleDelay is how long a reconcile that saw an old state waits for the cache to catch up.
	staleDelay = 100 * time.Millisecond
	// ClusterIndex finds the summaries of a cluster by its fleet.ID, as text.
	ClusterIndex = "cluster"
)

// Controller carries what profiles want to clusters, one ClusterSummary at a time.
type Controller struct {
	// Hub reads summaries, profiles, clusters and inventories from a cache; Live reads from the API server.
	Hub  client.Client
	Live client.Reader
	// Shard is the part of the fleet that this hub looks after.
	Shard     fleet.Shard
	Composer  *Composer
	Transport deliver.Transport
	// Recheck is how soon to look again at a withdrawal that a member has not finished; zero for a mode in which a watch
	// tells.
	Recheck map[fleet.Mode]time.Duration
	// Away says why nothing can be done on a member, "" if something can; only members that leave by force are asked
	// about.
	Away func(ctx context.Context, cluster client.Object) (string, error)
	// Woken tells of summaries whose member has news that no watch on the hub shows.
	Woken  <-chan event.GenericEvent
	Events events.EventRecorder
	Clock  clock.PassiveClock

	// metadata reads the metadata of Secrets from the cache.
	metadata client.Reader
	reading  *watchlist
	echoes   echoFilter
}

// Setup makes mgr run the controller.
func (c *Controller) Setup(ctx context.Context, mgr ctrl.Manager) error {
	c.reading, c.metadata = newWatchlist(), mgr.GetCache()
	err := mgr.GetFieldIndexer().IndexField(ctx, &configv1beta1.ClusterSummary{}, ClusterIndex, func(obj client.Object) []string {
		return []string{match.Target(obj.(*configv1beta1.ClusterSummary)).String()}
	})
	if err != nil {
		return err
	}
	configMaps, secrets := &metav1.PartialObjectMetadata{}, &metav1.PartialObjectMetadata{}
	configMaps.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("ConfigMap"))
	secrets.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
	if err := mgr.GetFieldIndexer().IndexField(ctx, secrets, generatedIndex, indexGenerated); err != nil {
		return err
	}
	made := ctrl.NewControllerManagedBy(mgr).
		Named("summaries").
		For(&configv1beta1.ClusterSummary{}, builder.WithPredicates(predicate.Or(wantedChanged(), c.statusEdited()))).
		Watches(&configv1beta1.ClusterSummary{}, handler.EnqueueRequestsFromMapFunc(c.rivals), builder.WithPredicates(wantedChanged())).
		Watches(&libv1beta1.ConfigurationGroup{}, handler.EnqueueRequestsFromMapFunc(ofGroup), builder.WithPredicates(reportChanged())).
		WatchesMetadata(configMaps, c.readersOf("ConfigMap")).
		WatchesMetadata(secrets, c.readersOf("Secret")).
		WatchesRawSource(ctrlsource.Channel(c.Woken, &handler.EnqueueRequestForObject{})).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: workers,
			ReconciliationTimeout:   reconcileLimit,
			RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](retryFirst, retryMost),
		})
	for _, cluster := range fleet.Kinds() {
		made = made.Watches(cluster, handler.EnqueueRequestsFromMapFunc(c.ofCluster), builder.WithPredicates(c.Shard.Predicate(), memberChanged()))
	}
	return made.Complete(c)
}

// wantedChanged drops changes of status, and the finalizer that this controller adds itself.
func wantedChanged() predicate.Predicate {
	return predicate.Or(predicate.GenerationChangedPredicate{}, predicate.AnnotationChangedPredicate{}, predicate.LabelChangedPredicate{}, predicate.Funcs{
		UpdateFunc: func(e event.UpdateEvent) bool {
			removed := len(e.ObjectNew.GetFinalizers()) < len(e.ObjectOld.GetFinalizers())
			return removed || e.ObjectOld.GetDeletionTimestamp().IsZero() != e.ObjectNew.GetDeletionTimestamp().IsZero()
		},
	})
}

// statusEdited passes changes of status that this controller did not make: it reports again.
func (c *Controller) statusEdited() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return false },
		DeleteFunc: func(event.DeleteEvent) bool { return false },
		UpdateFunc: func(e event.UpdateEvent) bool {
			before, after := e.ObjectOld.(*configv1beta1.ClusterSummary), e.ObjectNew.(*configv1beta1.ClusterSummary)
			return !equality.Semantic.DeepEqual(before.Status, after.Status) && !c.echoes.isEcho(client.ObjectKeyFromObject(after), after.ResourceVersion)
		},
	}
}

// memberChanged drops heartbeats, and what nodes and pods do.
func memberChanged() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		return !equality.Semantic.DeepEqual(fleet.WithoutVolatileFields(e.ObjectOld), fleet.WithoutVolatileFields(e.ObjectNew))
	}}
}

// reportChanged passes what an agent says, and that a group is gone.
func reportChanged() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, after := e.ObjectOld.(*libv1beta1.ConfigurationGroup), e.ObjectNew.(*libv1beta1.ConfigurationGroup)
		return before.Generation != after.Generation || !equality.Semantic.DeepEqual(before.Status, after.Status)
	}}
}

// ofGroup names the summary that a group was made for.
func ofGroup(_ context.Context, obj client.Object) []reconcile.Request {
	id, ok := deliver.IDOf(obj)
	ref := obj.(*libv1beta1.ConfigurationGroup).Spec.SourceRef
	if !ok || ref == nil || id.RequestorKind != configv1beta1.ClusterSummaryKind {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: ref.Namespace, Name: id.RequestorName}}}
}

// ofCluster lists the summaries of a cluster.
func (c *Controller) ofCluster(ctx context.Context, cluster client.Object) []reconcile.Request {
	member := fleet.FromObject(cluster)
	summaries, err := c.siblings(ctx, member.ID())
	if err != nil {
		log.FromContext(ctx).Error(err, "find the summaries of a cluster", logkeys.Member, member.Key())
	}
	return requests(summaries)
}

// rivals lists the summaries that want a release that another one wants too: what happens to that one may free it.
func (c *Controller) rivals(ctx context.Context, obj client.Object) []reconcile.Request {
	if len(obj.(*configv1beta1.ClusterSummary).Spec.ClusterProfileSpec.HelmCharts) == 0 {
		return nil
	}
	changed, summaries, err := c.loadClusterSummaries(ctx, obj.(*configv1beta1.ClusterSummary))
	if err != nil {
		log.FromContext(ctx).Error(err, "find the summaries of a cluster", logkeys.Summary, client.ObjectKeyFromObject(obj))
		return nil
	}
	wanted := match.Installed(changed)
	return requests(slices.DeleteFunc(summaries, func(s configv1beta1.ClusterSummary) bool {
		shared := slices.ContainsFunc(match.Installed(&s), func(r match.Release) bool { return slices.Contains(wanted, r) })
		return s.Name == changed.Name || !shared
	}))
}

// ours says whether summary is of a cluster of this shard. One whose cluster is gone is the default shard's: somebody
// must let go of it.
func (c *Controller) ours(ctx context.Context, summary *configv1beta1.ClusterSummary) (bool, error) {
	of := match.Target(summary)
	_, cluster, err := fleet.Get(ctx, c.Hub, of.Type, of.Namespace, of.Name)
	if apierrors.IsNotFound(err) {
		return c.Shard.IsDefault(), nil
	}
	if err != nil {
		return false, err
	}
	return c.Shard.Serves(cluster), nil
}

// siblings lists the summaries of a cluster. They must not be changed.
func (c *Controller) siblings(ctx context.Context, cluster fleet.ID) ([]configv1beta1.ClusterSummary, error) {
	var list configv1beta1.ClusterSummaryList
	if err := c.Hub.List(ctx, &list, client.MatchingFields{ClusterIndex: cluster.String()}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list summaries of cluster %s: %w", cluster, err)
	}
	return slices.Clone(list.Items), nil
}

func requests(summaries []configv1beta1.ClusterSummary) []reconcile.Request {
	all := make([]reconcile.Request, 0, len(summaries))
	for i := range summaries {
		all = append(all, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&summaries[i])})
	}
	return all
}

// readersOf lists the summaries that are made from an object.
func (c *Controller) readersOf(kind string) handler.EventHandler {
	return handler.EnqueueRequestsFromMapFunc(func(_ context.Context, obj client.Object) []reconcile.Request {
		readers := c.reading.of(source.Reference{Kind: kind, Namespace: obj.GetNamespace(), Name: obj.GetName()})
		all := make([]reconcile.Request, 0, len(readers))
		for _, summary := range readers {
			all = append(all, reconcile.Request{NamespacedName: summary})
		}
		return all
	})
}

// Reconcile brings one profile to one cluster, or takes it away.
func (c *Controller) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	summary := &configv1beta1.ClusterSummary{}
	if err := c.Hub.Get(ctx, req.NamespacedName, summary); err != nil {
		if apierrors.IsNotFound(err) {
			c.reading.set(req.NamespacedName, nil)
			c.echoes.forget(req.NamespacedName)
		}
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if ours, err := c.ours(ctx, summary); err != nil || !ours {
		c.reading.set(req.NamespacedName, nil)
		return reconcile.Result{}, err
	}
	if c.echoes.isBehind(req.NamespacedName, summary.ResourceVersion, c.Clock.Now()) {
		return reconcile.Result{RequeueAfter: staleDelay}, nil
	}
	ctx = log.IntoContext(ctx, log.FromContext(ctx).WithValues(logkeys.Summary, req.String()))
	s := &state{summary: summary}
	steps := []phase.Step[*state]{
		{Name: "load", Run: c.load},
		{Name: "gate", Run: c.gate},
		{Name: "find deployed", Run: c.findDeployed},
		{Name: "compose", Run: c.compose},
		{Name: "hold", Run: c.hold},
		{Name: "announce", Run: c.announce},
		{Name: "deliver", Run: c.deliver},
		{Name: "retire", Run: c.retire},
		{Name: "record", Run: c.record},
		{Name: "clean up generated values", Run: c.cleanUpGenerated},
	}
	if !summary.DeletionTimestamp.IsZero() {
		steps = []phase.Step[*state]{
			{Name: "load", Run: c.load},
			{Name: "gate", Run: c.gate},
			{Name: "find deployed", Run: c.findDeployed},
			{Name: "retire", Run: c.retire},
			{Name: "record", Run: c.record},
			{Name: "clean up generated values", Run: c.cleanUpGenerated},
		}
	}
	outcome := phase.Run(ctx, s, steps)
	err := c.report(ctx, s, outcome)
	if err == nil && outcome.Kind == phase.Done {
		err = c.release(ctx, s)
	}
	return result(s, outcome, err)
}

// result says when to look again.
func result(s *state, outcome phase.Outcome, reported error) (reconcile.Result, error) {
	if apierrors.IsConflict(reported) || apierrors.IsConflict(outcome.Err) {
		// The cache is behind.
		return reconcile.Result{RequeueAfter: staleDelay}, nil
	}
	if reported != nil {
		return reconcile.Result{}, reported
	}
	if outcome.Kind == phase.Retriable {
		return reconcile.Result{}, outcome.Err
	}
	if s.retry != nil {
		return reconcile.Result{}, s.retry
	}
	if s.edited {
		return reconcile.Result{RequeueAfter: staleDelay}, nil
	}
	if outcome.Kind == phase.Waiting {
		return reconcile.Result{RequeueAfter: outcome.After}, nil
	}
	return reconcile.Result{RequeueAfter: s.next}, nil
}
