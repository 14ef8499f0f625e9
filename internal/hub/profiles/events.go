package profiles

import (
	"context"
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/ratelimit"
	"github.com/towline/towline/internal/hub/summaries"
	"github.com/towline/towline/internal/match"
)

// gatherInterval is a delay of cluster events: after a reconcile has written a change of a profile's matching clusters,
// they reconcile the profile only after this time. Each reconcile writes the list of all matching clusters, so one
// reconcile handles many clusters that join at the same time.
const gatherInterval = time.Second

// summaryGatherInterval is the minimum time between a reconcile of a profile and the next reconcile by a summary event.
// Each reconcile compares all summaries, so one reconcile handles many events.
const summaryGatherInterval = 200 * time.Millisecond

// summaryEvents returns the handler of the events of summaries, which enqueues their profile. It ignores creations:
// only this controller creates summaries.
func (r *reconciler) summaryEvents() handler.EventHandler {
	enqueue := func(queue workqueue.TypedRateLimitingInterface[reconcile.Request], summary client.Object) {
		owner := summaries.ProfileOf(summary)
		if owner == nil || owner.Kind != r.kind.name {
			return
		}
		name := types.NamespacedName{Name: owner.Name}
		if owner.Kind == configv1beta1.ProfileKind {
			name.Namespace = summary.GetNamespace()
		}
		queue.AddAfter(reconcile.Request{NamespacedName: name}, r.reconcileTimes.delay(name, time.Now(), summaryGatherInterval))
	}
	return handler.Funcs{
		UpdateFunc: func(_ context.Context, e event.UpdateEvent, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
			enqueue(queue, e.ObjectOld) // it can have another owner
			enqueue(queue, e.ObjectNew)
		},
		DeleteFunc: func(_ context.Context, e event.DeleteEvent, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
			enqueue(queue, e.Object)
		},
	}
}

// clusterEvents returns the handler of the events of clusters. It enqueues only the profiles that an event can affect,
// since a reconcile compares all summaries of its profile.
func (r *reconciler) clusterEvents() handler.EventHandler {
	return handler.Funcs{
		CreateFunc: func(ctx context.Context, e event.CreateEvent, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
			member := fleet.FromObject(e.Object)
			r.enqueueProfiles(ctx, queue, member.Namespace, 0, func(s match.Selection) bool { return s.Selects(member) })
		},
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
			before, after := fleet.FromObject(e.ObjectOld), fleet.FromObject(e.ObjectNew)
			if !isRelevantUpdate(before, after) {
				return
			}
			delay := time.Duration(0)
			// The key identifies the agent of the cluster. It is empty if the agent cannot have written the update.
			if key := ratelimit.ByAgentOfCluster(e.ObjectOld, e.ObjectNew); key != "" {
				delay = r.agentLimiter.Delay(key) // this counts the event
			}
			r.enqueueProfiles(ctx, queue, after.Namespace, delay, func(s match.Selection) bool { return affectsProfile(s, before, after) })
		},
		// Selects excludes deleting members, so Deleting is reset to find the profiles that selected the cluster. Profiles
		// that selected the cluster only before an update were enqueued by the event of that update.
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
			member := fleet.FromObject(e.Object)
			member.Deleting = false
			r.enqueueProfiles(ctx, queue, member.Namespace, 0, func(s match.Selection) bool { return s.Selects(member) })
		},
	}
}

// isRelevantUpdate returns whether an update of a cluster can affect any profile. Most updates are reports of agents,
// which cannot.
func isRelevantUpdate(before, after fleet.Member) bool {
	return changesSummary(before, after) || before.Deleting != after.Deleting || !maps.Equal(before.Labels, after.Labels)
}

// affectsProfile returns whether an update of a cluster can change the members of a profile, or the member's summary.
// Labels that the selection does not read change nothing.
func affectsProfile(s match.Selection, before, after fleet.Member) bool {
	if s.Selects(before) != s.Selects(after) {
		return true
	}
	return s.Selects(after) && changesSummary(before, after)
}

// changesSummary returns whether an update of a selected cluster can change its summary. Ready decides whether it has
// one (match). Ready, Refused and HasFinalizer, the finalizer of the cluster object, decide whether a new summary gets
// the finalizer (isDeliveredAtOnce). Down and Paused do too, but cause no reconcile: package summaries adds a missing
// finalizer. Refused also decides whether the creation is retried while the namespace is missing (createNamed).
func changesSummary(before, after fleet.Member) bool {
	return before.Ready != after.Ready || before.HasFinalizer != after.HasFinalizer || before.Refused != after.Refused
}

// enqueueProfiles enqueues the profiles whose selection passes filter. It checks all ClusterProfiles, or the Profiles
// in namespace. The delay is at least minDelay.
func (r *reconciler) enqueueProfiles(
	ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request], namespace string, minDelay time.Duration,
	filter func(match.Selection) bool,
) {
	list := r.kind.newList()
	options := []client.ListOption{client.UnsafeDisableDeepCopy}
	if r.kind.name == configv1beta1.ProfileKind {
		options = append(options, client.InNamespace(namespace))
	}
	if err := r.Hub.List(ctx, list, options...); err != nil {
		log.FromContext(ctx).Error(err, "list profiles")
		return
	}
	// The callback returns no error, and list is a list.
	_ = meta.EachListItem(list, func(obj runtime.Object) error {
		profile := obj.(client.Object)
		// A profile with an invalid selector has no matching clusters until its spec changes.
		if selection, err := r.selections.get(r.kind, profile); err == nil && filter(selection) {
			name := client.ObjectKeyFromObject(profile)
			queue.AddAfter(reconcile.Request{NamespacedName: name}, max(minDelay, r.matchTimes.delay(name, time.Now(), gatherInterval)))
		}
		return nil
	})
}

// selectionCache caches the parsed selections of the profiles of one kind. The zero value is empty.
type selectionCache struct {
	// mu guards byName.
	mu     sync.Mutex
	byName map[types.NamespacedName]parsedSelection
}

// parsedSelection is the selection of one generation of a profile, or the error of its selector.
type parsedSelection struct {
	uid        types.UID
	generation int64
	selection  match.Selection
	err        error
}

// get returns the selection of a profile.
func (c *selectionCache) get(k kind, profile client.Object) (match.Selection, error) {
	name := client.ObjectKeyFromObject(profile)
	c.mu.Lock()
	defer c.mu.Unlock()
	parsed, ok := c.byName[name]
	if !ok || parsed.uid != profile.GetUID() || parsed.generation != profile.GetGeneration() {
		spec, _ := k.specAndStatus(profile)
		parsed = parsedSelection{uid: profile.GetUID(), generation: profile.GetGeneration()}
		parsed.selection, parsed.err = match.NewSelection(spec, profile.GetNamespace())
		if c.byName == nil {
			c.byName = map[types.NamespacedName]parsedSelection{}
		}
		c.byName[name] = parsed
	}
	return parsed.selection, parsed.err
}

// forget removes the selection of a deleted profile.
func (c *selectionCache) forget(name types.NamespacedName) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.byName, name)
}

// profileTimes has a time for each profile. The zero value is empty.
type profileTimes struct {
	// mu guards last.
	mu   sync.Mutex
	last map[types.NamespacedName]time.Time
}

// record sets the time of a profile to now.
func (c *profileTimes) record(profile types.NamespacedName, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.last == nil {
		c.last = map[types.NamespacedName]time.Time{}
	}
	c.last[profile] = now
}

// delay returns the rest of the interval that began at the recorded time of a profile, at least 0.
func (c *profileTimes) delay(profile types.NamespacedName, now time.Time, interval time.Duration) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return max(0, c.last[profile].Add(interval).Sub(now))
}

// forget removes a deleted profile.
func (c *profileTimes) forget(profile types.NamespacedName) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.last, profile)
}
