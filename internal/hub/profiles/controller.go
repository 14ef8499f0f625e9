package profiles

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/ratelimit"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/phase"
)

const (
	// workers is the number of concurrent reconciles of each kind of profile.
	workers = 5
	// retryMin and retryMax bound the delay before a failed reconcile is retried. The delay doubles with each failure.
	retryMin = 5 * time.Millisecond
	retryMax = time.Minute
	// maxConcurrentWrites limits the concurrent writes of summaries of one profile.
	maxConcurrentWrites = 20
	// The agent of a member can cause agentBurst reconciles of its profiles at once, and then one per agentInterval.
	agentInterval = 6 * time.Second
	agentBurst    = 20
)

// Controller creates, updates and deletes the ClusterSummaries of profiles.
type Controller struct {
	// Hub reads profiles, clusters and summaries from a cache.
	Hub client.Client
	// Unsupported returns the fields in spec that are not supported yet, nil if there are none.
	Unsupported func(spec configv1beta1.ProfileSpec) []string
	Events      events.EventRecorder
}

// reconciler is the Controller for one kind of profile.
type reconciler struct {
	*Controller
	kind       kind
	selections selectionCache
	// matchTimes has, for each profile, the time of the last change of the matching clusters, and reconcileTimes the end
	// of the last reconcile.
	matchTimes, reconcileTimes profileTimes
	// agentLimiter limits the reconciles that the agent of one member can cause by its status.
	agentLimiter *ratelimit.Limiter
}

// Setup adds one controller to mgr for each kind of profile. The caller must add summaries.ProfileIndex to mgr.
func (c *Controller) Setup(mgr ctrl.Manager) error {
	for _, kind := range kinds() {
		r := &reconciler{Controller: c, kind: kind, agentLimiter: ratelimit.New(agentInterval, agentBurst, clock.RealClock{})}
		controllerBuilder := ctrl.NewControllerManagedBy(mgr).
			Named("profiles-"+kind.name).
			For(kind.newObject(), builder.WithPredicates(ignoreStatusUpdates())).
			Watches(&configv1beta1.ClusterSummary{}, r.summaryEvents(), builder.WithPredicates(ignoreStatusUpdates())).
			WithOptions(controller.Options{
				MaxConcurrentReconciles: workers,
				RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](retryMin, retryMax),
			})
		for _, cluster := range fleet.NewObjects() {
			controllerBuilder = controllerBuilder.Watches(cluster, r.clusterEvents())
		}
		if err := controllerBuilder.Complete(r); err != nil {
			return err
		}
	}
	return nil
}

// ignoreStatusUpdates drops updates that change only the status or the finalizers.
func ignoreStatusUpdates() predicate.Predicate {
	return predicate.Or(predicate.GenerationChangedPredicate{}, predicate.LabelChangedPredicate{}, predicate.AnnotationChangedPredicate{},
		predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
			return e.ObjectOld.GetDeletionTimestamp().IsZero() != e.ObjectNew.GetDeletionTimestamp().IsZero() ||
				!equality.Semantic.DeepEqual(e.ObjectOld.GetOwnerReferences(), e.ObjectNew.GetOwnerReferences())
		}})
}

// Reconcile creates, updates and deletes the ClusterSummaries of one profile.
func (r *reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	profile := r.kind.newObject()
	if err := r.Hub.Get(ctx, req.NamespacedName, profile); err != nil {
		if apierrors.IsNotFound(err) {
			r.selections.forget(req.NamespacedName)
			r.matchTimes.forget(req.NamespacedName)
			r.reconcileTimes.forget(req.NamespacedName)
		}
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	defer func() { r.reconcileTimes.record(req.NamespacedName, time.Now()) }()
	ctx = log.IntoContext(ctx, log.FromContext(ctx).WithValues(logkeys.Profile, r.kind.name+"/"+req.String()))
	s := r.newState(profile)
	steps := []phase.Step[*state]{
		{Name: "load", Run: r.load},
		{Name: "ensure finalizer", Run: r.ensureFinalizer},
		{Name: "stop if paused", Run: r.stopIfPaused},
		{Name: "match", Run: r.match},
		{Name: "write summaries", Run: r.writeSummaries},
		{Name: "retry if not created", Run: r.retryIfNotCreated},
	}
	if !profile.GetDeletionTimestamp().IsZero() {
		// Without the step match no cluster matches, so writeSummaries deletes all summaries.
		steps = []phase.Step[*state]{{Name: "load", Run: r.load}, {Name: "delete summaries", Run: r.writeSummaries}, {Name: "remove finalizer", Run: r.removeFinalizer}}
	}
	outcome := phase.Run(ctx, s, steps)
	err := r.report(ctx, s, outcome)
	if outcome.Kind == phase.Retriable {
		// This replaces the error of report: the retry reports again.
		err = fmt.Errorf("%s %s: %w", r.kind.name, req, outcome.Err)
	}
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		// The cache is stale. Its next event may trigger no reconcile, since summaryEvents ignores creations.
		return reconcile.Result{RequeueAfter: staleDelay}, nil
	}
	return reconcile.Result{RequeueAfter: outcome.After}, err
}
