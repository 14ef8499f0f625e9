package deliver

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
)

const (
	// retryFirst and retryLast are the limits of the back-off for failed deliveries.
	retryFirst = 200 * time.Millisecond
	retryLast  = 5 * time.Minute
)

// Handler executes a delivery. After an error the AgentSource calls it again later, with the then current delivery.
type Handler func(ctx context.Context, d Delivery) error

// Run watches the member's groups with one watch and calls handle for each changed request, until ctx ends. It calls
// handle for up to workers groups concurrently, and not concurrently for the same group. After an error it calls handle
// again with a back-off. It does not call handle for a deleted group: only a delivery with Remove removes objects.
// While the hub is not reachable Run retries. After that it handles all groups that are not provisioned.
func (i *AgentSource) Run(ctx context.Context, workers int, handle Handler) error {
	reflector := cache.NewReflectorWithOptions(i.listWatch(), &libv1beta1.ConfigurationGroup{}, i.groups, cache.ReflectorOptions{
		Name: "inbox", Backoff: kube.WatchBackoff(),
	})
	var running sync.WaitGroup
	running.Go(func() { reflector.RunWithContext(ctx) })
	for range workers {
		running.Go(func() {
			for i.groups.handleNext(ctx, handle) {
			}
		})
	}
	<-ctx.Done()
	i.groups.queue.ShutDown()
	running.Wait()
	return nil
}

// Find returns the last known delivery for id; ok is false if there is none, or if the hub was not reached yet.
func (i *AgentSource) Find(id bundle.ID) (d Delivery, ok bool) {
	i.groups.mu.Lock()
	defer i.groups.mu.Unlock()
	for _, group := range i.groups.byName {
		if d, ok := newDelivery(group); ok && d.ID == id {
			return d, true
		}
	}
	return Delivery{}, false
}

// Wake makes Run handle the delivery for id again.
func (i *AgentSource) Wake(id bundle.ID) {
	if d, ok := i.Find(id); ok {
		i.groups.queue.Add(d.Name())
	}
}

// Synced returns whether all groups have been listed at least once.
func (i *AgentSource) Synced() bool {
	i.groups.mu.Lock()
	defer i.groups.mu.Unlock()
	return i.groups.synced
}

func (i *AgentSource) listWatch() cache.ListerWatcher {
	mine := []client.ListOption{
		client.InNamespace(i.namespace), client.MatchingLabels{libv1beta1.PullClusterNameLabel: labelValue(i.cluster)},
	}
	options := func(raw metav1.ListOptions) []client.ListOption {
		return append(slices.Clone(mine), &client.ListOptions{Raw: &raw, Limit: raw.Limit, Continue: raw.Continue})
	}
	return cache.ToListWatcherWithWatchListSemantics(kube.RetryConnection(kube.DetectRestore(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, raw metav1.ListOptions) (runtime.Object, error) {
			list := &libv1beta1.ConfigurationGroupList{}
			err := i.hub.List(ctx, list, options(raw)...)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, raw metav1.ListOptions) (watch.Interface, error) {
			return i.hub.Watch(ctx, &libv1beta1.ConfigurationGroupList{}, options(raw)...)
		},
	}), kube.AgentReconnectInterval), i.hub)
}

// groups is the store of the reflector: the groups by name, and a queue with the names of the groups to handle.
type groups struct {
	queue workqueue.TypedRateLimitingInterface[string]

	// mu guards the fields below.
	mu     sync.Mutex
	byName map[string]*libv1beta1.ConfigurationGroup
	// reporting counts the running status writes of each group. Status changes in the watch meanwhile are the agent's own.
	reporting map[string]int
	synced    bool
}

var _ cache.ReflectorStore = (*groups)(nil)

func newGroups() *groups {
	return &groups{
		queue:  workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[string](retryFirst, retryLast)),
		byName: map[string]*libv1beta1.ConfigurationGroup{}, reporting: map[string]int{},
	}
}

// handleNext handles one group. It returns false after the shutdown of the queue.
func (g *groups) handleNext(ctx context.Context, handle Handler) bool {
	name, shutdown := g.queue.Get()
	if shutdown {
		return false
	}
	defer g.queue.Done(name)
	g.mu.Lock()
	group := g.byName[name]
	g.mu.Unlock()
	if group == nil {
		g.queue.Forget(name)
		return true
	}
	d, ok := newDelivery(group)
	if !ok {
		g.queue.Forget(name)
		return true
	}
	if err := handle(ctx, d); err != nil {
		if ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "handle delivery", logkeys.Bundle, d.ID.String(), logkeys.Group, name)
		}
		g.queue.AddRateLimited(name)
		return true
	}
	g.queue.Forget(name)
	return true
}

// Add stores a new group.
func (g *groups) Add(obj any) error { return g.put(obj) }

// Update stores a changed group.
func (g *groups) Update(obj any) error { return g.put(obj) }

// Delete deletes a group from the store. This removes nothing from the member.
func (g *groups) Delete(obj any) error {
	group, err := asGroup(obj)
	if err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.byName, group.Name)
	return nil
}

// Replace stores the list of all groups.
func (g *groups) Replace(objects []any, _ string) error {
	g.mu.Lock()
	deleted := make(map[string]struct{}, len(g.byName))
	for name := range g.byName {
		deleted[name] = struct{}{}
	}
	g.mu.Unlock()
	for _, obj := range objects {
		group, err := asGroup(obj)
		if err != nil {
			return err
		}
		delete(deleted, group.Name)
		// An older version is stored, too: the hub may have been restored from a backup.
		g.mu.Lock()
		g.store(group)
		g.mu.Unlock()
		if ReportOf(group).State != bundle.StateApplied || !isObserved(group) {
			// It may have changed back after a change that was missed.
			g.queue.Add(group.Name)
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for name := range deleted {
		delete(g.byName, name)
	}
	g.synced = true
	return nil
}

// Resync does nothing, since the queue has all groups to handle.
func (g *groups) Resync() error { return nil }

func (g *groups) put(obj any) error {
	group, err := asGroup(obj)
	if err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !isOlder(group, g.byName[group.Name]) {
		g.store(group)
	}
	return nil
}

// store stores group, and queues it if the hub has changed the request. The caller must hold mu.
func (g *groups) store(group *libv1beta1.ConfigurationGroup) {
	old := g.byName[group.Name]
	g.byName[group.Name] = group
	if isNewRequest(old, group) || (g.reporting[group.Name] == 0 && !isSameReport(old.Status, group.Status)) {
		// In the second case another client has changed the agent's report, or the status was lost.
		g.queue.Add(group.Name)
	}
}

// beginReport must be called before the status of a group is written, and end after it.
func (g *groups) beginReport(name string) (end func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.reporting[name]++
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.reporting[name]--; g.reporting[name] == 0 {
			delete(g.reporting, name)
		}
	}
}

// latest returns the newest known version of group.
func (g *groups) latest(group *libv1beta1.ConfigurationGroup) *libv1beta1.ConfigurationGroup {
	g.mu.Lock()
	defer g.mu.Unlock()
	if known := g.byName[group.Name]; known != nil && known.UID == group.UID && isOlder(group, known) {
		return known
	}
	return group
}

// storeWritten stores the group in the response of a status write.
func (g *groups) storeWritten(group *libv1beta1.ConfigurationGroup) {
	g.mu.Lock()
	defer g.mu.Unlock()
	// If the response has a new request, which the watch has not delivered yet, it must not replace the group: then the
	// request would not be queued.
	if known := g.byName[group.Name]; known != nil && !isNewRequest(known, group) && isOlder(known, group) {
		g.byName[group.Name] = group
	}
}

// isOlder returns whether a is an older version of the same object as b.
func isOlder(a, b *libv1beta1.ConfigurationGroup) bool {
	if b == nil || a.UID != b.UID {
		return false
	}
	order, err := resourceversion.CompareResourceVersion(a.ResourceVersion, b.ResourceVersion)
	return err == nil && order < 0
}

// isNewRequest returns whether the hub has changed the request from old to group. Most changes are the agent's reports.
func isNewRequest(old, group *libv1beta1.ConfigurationGroup) bool {
	return old == nil || old.UID != group.UID || old.Generation != group.Generation ||
		(old.Status.ContentMissing && !group.Status.ContentMissing)
}

func asGroup(obj any) (*libv1beta1.ConfigurationGroup, error) {
	group, ok := obj.(*libv1beta1.ConfigurationGroup)
	if !ok {
		return nil, fmt.Errorf("store group: unexpected type %T", obj)
	}
	return group, nil
}
