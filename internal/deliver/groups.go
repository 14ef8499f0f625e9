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
	"k8s.io/apimachinery/pkg/util/wait"
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
	// retryFirst and retryLast bound the growing time after which a failed handling of a delivery is tried again.
	retryFirst = 200 * time.Millisecond
	retryLast  = time.Minute
	// dialFirst and dialLast bound the growing time between attempts to reach a hub that does not answer; jitter doubles it at most.
	dialFirst = 300 * time.Millisecond
	dialLast  = 8 * time.Second
	dialSteps = 6
)

// Handler does what a delivery asks for. An error makes the Inbox call it again later, with the delivery as it is then.
type Handler func(ctx context.Context, d Delivery) error

// Run holds one watch on the member's groups and calls handle for each that asks for something new, until ctx ends. It calls handle
// for one group at a time per group and for as many groups at once as workers says. It calls again after an error, later each time.
// A group that goes away calls nothing: only a delivery with Remove set removes anything. Run goes on for as long as the hub is away,
// and looks at everything again when it is back.
func (i *Inbox) Run(ctx context.Context, workers int, handle Handler) error {
	reflector := cache.NewReflectorWithOptions(i.listWatch(), &libv1beta1.ConfigurationGroup{}, i.groups, cache.ReflectorOptions{
		Name:    "inbox",
		Backoff: &wait.Backoff{Duration: dialFirst, Cap: dialLast, Steps: dialSteps, Factor: 2, Jitter: 1},
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

// Find returns the delivery for id as it was last seen; ok is false if there is none, or the hub was not reached yet.
func (i *Inbox) Find(id bundle.ID) (d Delivery, ok bool) {
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
func (i *Inbox) Wake(id bundle.ID) {
	if d, ok := i.Find(id); ok {
		i.groups.queue.Add(d.Name())
	}
}

// Synced says whether the hub has been reached once and all groups it then had were seen.
func (i *Inbox) Synced() bool {
	i.groups.mu.Lock()
	defer i.groups.mu.Unlock()
	return i.groups.synced
}

func (i *Inbox) listWatch() cache.ListerWatcher {
	mine := []client.ListOption{
		client.InNamespace(i.namespace), client.MatchingLabels{libv1beta1.PullClusterNameLabel: labelValue(i.cluster)},
	}
	options := func(raw metav1.ListOptions) []client.ListOption {
		return append(slices.Clone(mine), &client.ListOptions{Raw: &raw, Limit: raw.Limit, Continue: raw.Continue})
	}
	return cache.ToListWatcherWithWatchListSemantics(kube.DetectRestore(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, raw metav1.ListOptions) (runtime.Object, error) {
			list := &libv1beta1.ConfigurationGroupList{}
			err := i.hub.List(ctx, list, options(raw)...)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, raw metav1.ListOptions) (watch.Interface, error) {
			return i.hub.Watch(ctx, &libv1beta1.ConfigurationGroupList{}, options(raw)...)
		},
	}), i.hub)
}

// groups is the reflector's store: the groups by name, and a queue of the names of those that have something new to say.
type groups struct {
	queue workqueue.TypedRateLimitingInterface[string]

	// mu guards the fields below.
	mu     sync.Mutex
	byName map[string]*libv1beta1.ConfigurationGroup
	// reporting counts the reports on a group that are being written: what the watch shows of its status meanwhile is their echo.
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

// handleNext handles one group; it returns false when there will be no more.
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

// Add takes a group that the watch saw for the first time.
func (g *groups) Add(obj any) error { return g.put(obj) }

// Update takes a group that changed.
func (g *groups) Update(obj any) error { return g.put(obj) }

// Delete forgets a group. It is no order to remove anything.
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

// Replace takes all groups that the hub has now.
func (g *groups) Replace(objects []any, _ string) error {
	g.mu.Lock()
	gone := make(map[string]struct{}, len(g.byName))
	for name := range g.byName {
		gone[name] = struct{}{}
	}
	g.mu.Unlock()
	for _, obj := range objects {
		group, err := asGroup(obj)
		if err != nil {
			return err
		}
		delete(gone, group.Name)
		// An older version counts, too: the hub may have been restored from a backup.
		g.mu.Lock()
		g.take(group)
		g.mu.Unlock()
		if ReportOf(group).State != bundle.StateApplied || !observed(group) {
			// It may have changed and changed back unseen.
			g.queue.Add(group.Name)
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for name := range gone {
		delete(g.byName, name)
	}
	g.synced = true
	return nil
}

// Resync does nothing: nothing is asked for that the queue does not know.
func (g *groups) Resync() error { return nil }

func (g *groups) put(obj any) error {
	group, err := asGroup(obj)
	if err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !older(group, g.byName[group.Name]) {
		g.take(group)
	}
	return nil
}

// take stores group and queues it if the hub said something new. Its caller holds mu.
func (g *groups) take(group *libv1beta1.ConfigurationGroup) {
	old := g.byName[group.Name]
	g.byName[group.Name] = group
	if newsIn(old, group) || (g.reporting[group.Name] == 0 && !sameNews(old.Status, group.Status)) {
		// The second: somebody else has changed the agent's report, or lost it.
		g.queue.Add(group.Name)
	}
}

// beginReport is called before a report on a group is written; end is called after it.
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

// latest returns group as it was seen or written last.
func (g *groups) latest(group *libv1beta1.ConfigurationGroup) *libv1beta1.ConfigurationGroup {
	g.mu.Lock()
	defer g.mu.Unlock()
	if seen := g.byName[group.Name]; seen != nil && seen.UID == group.UID && older(group, seen) {
		return seen
	}
	return group
}

// wrote takes a group as it is after a report, ahead of the watch.
func (g *groups) wrote(group *libv1beta1.ConfigurationGroup) {
	g.mu.Lock()
	defer g.mu.Unlock()
	// What was written on top of news that the watch has not told yet must not hide them.
	if seen := g.byName[group.Name]; seen != nil && !newsIn(seen, group) && older(seen, group) {
		g.byName[group.Name] = group
	}
}

// older says whether a is an older version of the object b. The versions of custom resources are decimal numbers that grow.
func older(a, b *libv1beta1.ConfigurationGroup) bool {
	if b == nil || a.UID != b.UID {
		return false
	}
	order, err := resourceversion.CompareResourceVersion(a.ResourceVersion, b.ResourceVersion)
	return err == nil && order < 0
}

// newsIn says whether the hub said something new between old and group. Most changes are the agent's own reports.
func newsIn(old, group *libv1beta1.ConfigurationGroup) bool {
	return old == nil || old.UID != group.UID || old.Generation != group.Generation ||
		(old.Status.ContentMissing && !group.Status.ContentMissing)
}

func asGroup(obj any) (*libv1beta1.ConfigurationGroup, error) {
	group, ok := obj.(*libv1beta1.ConfigurationGroup)
	if !ok {
		return nil, fmt.Errorf("take group: got %T", obj)
	}
	return group, nil
}
