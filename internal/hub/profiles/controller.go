package profiles

import (
	"context"
	"fmt"
	"maps"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
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

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/phase"
)

const (
	// workers is how many profiles of one kind are looked at at once.
	workers = 5
	// retryFirst and retryMost are the first and the longest pause before a failed attempt is repeated; each is twice the one before.
	retryFirst = 5 * time.Millisecond
	retryMost  = time.Minute
	// writers is how many summaries of one profile are written at once.
	writers = 20
	// OwnerIndex finds the ClusterSummaries of a profile by the profile's uid.
	OwnerIndex = "owner"
)

// Controller keeps the ClusterSummaries of profiles.
type Controller struct {
	// Hub reads profiles, clusters and summaries from a cache.
	Hub client.Client
	// Unsupported lists what a profile asks for, by spec or by labels, that is not acted on yet.
	Unsupported func(spec configv1beta1.ProfileSpec, labels map[string]string) []string
	Events      events.EventRecorder
}

// reconciler is the Controller for one kind.
type reconciler struct {
	*Controller
	kind kind
}

// Setup makes mgr run the controller, once per kind of profile.
func (c *Controller) Setup(ctx context.Context, mgr ctrl.Manager) error {
	err := mgr.GetFieldIndexer().IndexField(ctx, &configv1beta1.ClusterSummary{}, OwnerIndex, func(obj client.Object) []string {
		var owners []string
		for _, owner := range obj.GetOwnerReferences() {
			owners = append(owners, string(owner.UID))
		}
		return owners
	})
	if err != nil {
		return err
	}
	for _, kind := range kinds() {
		r := &reconciler{Controller: c, kind: kind}
		made := ctrl.NewControllerManagedBy(mgr).
			Named("profiles-"+kind.name).
			For(kind.blank(), builder.WithPredicates(specChanged())).
			Watches(&configv1beta1.ClusterSummary{}, handler.EnqueueRequestForOwner(mgr.GetScheme(), mgr.GetRESTMapper(), kind.blank()),
				builder.WithPredicates(existing(), specChanged())).
			WithOptions(controller.Options{
				MaxConcurrentReconciles: workers,
				RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](retryFirst, retryMost),
			})
		for _, cluster := range fleet.Kinds() {
			made = made.Watches(cluster, handler.EnqueueRequestsFromMapFunc(r.all), builder.WithPredicates(matchingChanged()))
		}
		if err := made.Complete(r); err != nil {
			return err
		}
	}
	return nil
}

// specChanged drops changes of status.
func specChanged() predicate.Predicate {
	return predicate.Or(predicate.GenerationChangedPredicate{}, predicate.LabelChangedPredicate{}, predicate.AnnotationChangedPredicate{}, deletionBegan())
}

// existing drops news of summaries that were made just now: whoever made them knows.
func existing() predicate.Predicate {
	return predicate.Funcs{CreateFunc: func(event.CreateEvent) bool { return false }}
}

func deletionBegan() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		return e.ObjectOld.GetDeletionTimestamp().IsZero() != e.ObjectNew.GetDeletionTimestamp().IsZero()
	}}
}

// matchingChanged passes what can make a cluster match or stop matching, or let it have a summary.
func matchingChanged() predicate.Predicate {
	return predicate.Or(deletionBegan(), predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, after := fleet.FromObject(e.ObjectOld), fleet.FromObject(e.ObjectNew)
		return before.Ready != after.Ready || before.HasFinalizer != after.HasFinalizer || before.Refused != after.Refused || !maps.Equal(before.Labels, after.Labels)
	}})
}

// all lists the profiles that a cluster may match: every ClusterProfile, or the Profiles of its namespace.
func (r *reconciler) all(ctx context.Context, cluster client.Object) []reconcile.Request {
	list := r.kind.list()
	var options []client.ListOption
	if r.kind.name == configv1beta1.ProfileKind {
		options = append(options, client.InNamespace(fleet.FromObject(cluster).Namespace))
	}
	if err := r.Hub.List(ctx, list, options...); err != nil {
		log.FromContext(ctx).Error(err, "list profiles")
		return nil
	}
	var requests []reconcile.Request
	// The callback returns no error, and the lists are ours.
	_ = meta.EachListItem(list, func(obj runtime.Object) error {
		requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(obj.(client.Object))})
		return nil
	})
	return requests
}

// Reconcile makes the ClusterSummaries of one profile what they should be.
func (r *reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	profile := r.kind.blank()
	if err := r.Hub.Get(ctx, req.NamespacedName, profile); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	ctx = log.IntoContext(ctx, log.FromContext(ctx).WithValues(logkeys.Profile, r.kind.name+"/"+req.String()))
	s := r.newState(profile)
	steps := []phase.Step[*state]{
		{Name: "load", Run: r.load},
		{Name: "hold", Run: r.hold},
		{Name: "pause", Run: r.pause},
		{Name: "match", Run: r.match},
		{Name: "announce", Run: r.announce},
		{Name: "write", Run: r.write},
		{Name: "withdraw", Run: r.withdraw},
		{Name: "settle", Run: r.settle},
	}
	if !profile.GetDeletionTimestamp().IsZero() {
		steps = []phase.Step[*state]{{Name: "load", Run: r.load}, {Name: "withdraw", Run: r.withdraw}, {Name: "release", Run: r.release}}
	}
	outcome := phase.Run(ctx, s, steps)
	err := r.report(ctx, s, outcome)
	if outcome.Kind == phase.Retriable {
		err = fmt.Errorf("%s %s: %w", r.kind.name, req, outcome.Err)
	}
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		// The cache is behind. What it lacks will wake us.
		return reconcile.Result{RequeueAfter: staleDelay}, nil
	}
	return reconcile.Result{}, err
}

// owner returns the reference that makes a summary belong to profile.
func (k kind) owner(profile client.Object) metav1.OwnerReference {
	return *metav1.NewControllerRef(profile, configv1beta1.GroupVersion.WithKind(k.name))
}
