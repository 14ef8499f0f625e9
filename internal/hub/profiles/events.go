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
	"github.com/towline/towline/internal/match"
)

// gatherInterval is the time after a change of a profile's matching clusters in which further events of clusters wait
// for a common reconcile. A reconcile writes the list of all matching clusters, so many clusters that join at the same
// time must not cause one reconcile each.
const gatherInterval = time.Second

// clusterEvents returns the handler of the events of clusters. It enqueues only the profiles that an event can affect,
// since a reconcile compares all summaries of its profile.
func (r *reconciler) clusterEvents() handler.EventHandler {
	return handler.Funcs{
		CreateFunc: func(ctx context.Context, e event.CreateEvent, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
			member := fleet.FromObject(e.Object)
			r.enqueueProfiles(ctx, queue, member.Namespace, func(s match.Selection) bool { return s.Selects(member) })
		},
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
			before, after := fleet.FromObject(e.ObjectOld), fleet.FromObject(e.ObjectNew)
			if !canAffectProfiles(before, after) {
				return
			}
			r.enqueueProfiles(ctx, queue, after.Namespace, func(s match.Selection) bool { return isAffected(s, before, after) })
		},
		// The last known state decides: with the events before, the profiles that selected the cluster are complete.
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
			member := fleet.FromObject(e.Object)
			member.Deleting = false
			r.enqueueProfiles(ctx, queue, member.Namespace, func(s match.Selection) bool { return s.Selects(member) })
		},
	}
}

// canAffectProfiles returns whether an update of a cluster can affect any profile: most updates are reports of agents,
// and the list of all profiles need not be read for them.
func canAffectProfiles(before, after fleet.Member) bool {
	return before.Ready != after.Ready || before.HasFinalizer != after.HasFinalizer || before.Refused != after.Refused ||
		before.Deleting != after.Deleting || !maps.Equal(before.Labels, after.Labels)
}

// isAffected returns whether an update of a cluster can change the members of a profile, or allows the member to have a
// summary. Labels that the selection does not read change nothing.
func isAffected(s match.Selection, before, after fleet.Member) bool {
	was, is := s.Selects(before), s.Selects(after)
	return was != is || is && (before.Ready != after.Ready || before.HasFinalizer != after.HasFinalizer || before.Refused != after.Refused)
}

// enqueueProfiles enqueues the profiles whose selection is affected: of all ClusterProfiles, or of the Profiles in a
// namespace.
func (r *reconciler) enqueueProfiles(
	ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request], namespace string, isAffected func(match.Selection) bool,
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
		if selection, err := r.selections.of(r.kind, profile); err == nil && isAffected(selection) {
			name := client.ObjectKeyFromObject(profile)
			queue.AddAfter(reconcile.Request{NamespacedName: name}, r.changes.remaining(name, time.Now()))
		}
		return nil
	})
}

// selections caches the parsed selections of the profiles of one kind. The zero value is empty.
type selections struct {
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

// of returns the selection of a profile.
func (c *selections) of(k kind, profile client.Object) (match.Selection, error) {
	name := client.ObjectKeyFromObject(profile)
	c.mu.Lock()
	defer c.mu.Unlock()
	parsed, ok := c.byName[name]
	if !ok || parsed.uid != profile.GetUID() || parsed.generation != profile.GetGeneration() {
		spec, _ := k.fields(profile)
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
func (c *selections) forget(name types.NamespacedName) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.byName, name)
}

// matchingChanges has the time of the last change of each profile's matching clusters. The zero value is empty.
type matchingChanges struct {
	// mu guards last.
	mu   sync.Mutex
	last map[types.NamespacedName]time.Time
}

// record sets the time of the last change.
func (c *matchingChanges) record(profile types.NamespacedName, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.last == nil {
		c.last = map[types.NamespacedName]time.Time{}
	}
	c.last[profile] = now
}

// remaining returns the rest of gatherInterval since the last change.
func (c *matchingChanges) remaining(profile types.NamespacedName, now time.Time) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return max(0, c.last[profile].Add(gatherInterval).Sub(now))
}

// forget removes a deleted profile.
func (c *matchingChanges) forget(profile types.NamespacedName) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.last, profile)
}
