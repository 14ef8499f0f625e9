package deliver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
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
	// unavailableRetryLast limits the delay after deliveries that failed because the hub was not available. Up to the same
	// time is added at random.
	unavailableRetryLast = 5 * time.Second
	// resyncInterval is the interval in which groups with the report Applying are handled again, see Resync.
	resyncInterval = 30 * time.Second
	// apiServerStartup is the time after the last connection error in which unavailableRetryLast limits the delay. Later
	// the delay grows to retryLast: an overloaded API server must not get more requests.
	apiServerStartup = time.Minute
)

// groupStore is the store of the reflector of an AgentSource: the groups by name, and a queue with the names of the
// groups to handle.
type groupStore struct {
	queue   workqueue.TypedDelayingInterface[string]
	limiter workqueue.TypedRateLimiter[string]

	// mu guards the fields below.
	mu     sync.Mutex
	byName map[string]*libv1beta1.ConfigurationGroup
	// reporting has the number of running status writes of each group. Meanwhile a status change from the watch does not
	// queue the group, see beginReport.
	reporting map[string]int
	// synced is true after the first list.
	synced bool
	// lastUnreachable is the time when a delivery last failed because there was no connection to the hub.
	lastUnreachable time.Time
}

var _ cache.ReflectorStore = (*groupStore)(nil)

func newGroupStore() *groupStore {
	return &groupStore{
		queue:   workqueue.NewTypedDelayingQueue[string](),
		limiter: workqueue.NewTypedItemExponentialFailureRateLimiter[string](retryFirst, retryLast),
		byName:  map[string]*libv1beta1.ConfigurationGroup{}, reporting: map[string]int{},
	}
}

// handleNext handles one group. It returns false after the shutdown of the queue.
func (g *groupStore) handleNext(ctx context.Context, handle Handler) bool {
	name, shutdown := g.queue.Get()
	if shutdown {
		return false
	}
	defer g.queue.Done(name)
	g.mu.Lock()
	group := g.byName[name]
	g.mu.Unlock()
	if group == nil {
		g.limiter.Forget(name)
		return true
	}
	d, ok := newDelivery(group)
	if !ok {
		g.limiter.Forget(name)
		return true
	}
	if err := handle(ctx, d); err != nil {
		if ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "handle delivery", logkeys.Bundle, d.ID.String(), logkeys.Group, name)
		}
		g.queue.AddAfter(name, g.retryDelay(name, err))
		return true
	}
	g.limiter.Forget(name)
	return true
}

// retryDelay returns the delay after a delivery failed with err.
func (g *groupStore) retryDelay(name string, err error) time.Duration {
	delay := g.limiter.When(name)
	if !errors.Is(err, errHubUnavailable) {
		return delay
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if kube.IsUnreachable(err) {
		g.lastUnreachable = time.Now()
	}
	if time.Since(g.lastUnreachable) > apiServerStartup {
		return delay
	}
	return min(delay, wait.Jitter(unavailableRetryLast, 1))
}

// Add stores a new group.
func (g *groupStore) Add(obj any) error { return g.put(obj) }

// Update stores a changed group.
func (g *groupStore) Update(obj any) error { return g.put(obj) }

// Delete deletes a group from the store. This removes nothing from the member.
func (g *groupStore) Delete(obj any) error {
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
func (g *groupStore) Replace(objects []any, _ string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	listed := make(map[string]bool, len(objects))
	for _, obj := range objects {
		group, err := asGroup(obj)
		if err != nil {
			return err
		}
		listed[group.Name] = true
		// An older version is stored, too: the hub may have been restored from a backup.
		g.storeAndQueue(group)
		if ReportOf(group).State != bundle.StateApplied || !isObserved(group) {
			// Its status may have changed and changed back while the watch was interrupted.
			g.queue.Add(group.Name)
		}
	}
	maps.DeleteFunc(g.byName, func(name string, _ *libv1beta1.ConfigurationGroup) bool { return !listed[name] })
	g.synced = true
	return nil
}

// Resync queues the groups with the report Applying. The run that reported Applying may have ended without a final
// report, and nothing else would correct it. Handling such a group sends no request unless the report has changed.
func (g *groupStore) Resync() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	for name, group := range g.byName {
		if ReportOf(group).State == bundle.StateApplying {
			g.queue.Add(name)
		}
	}
	return nil
}

// put stores a group of the watch, unless the response of a status write was newer.
func (g *groupStore) put(obj any) error {
	group, err := asGroup(obj)
	if err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !isOlder(group, g.byName[group.Name]) {
		g.storeAndQueue(group)
	}
	return nil
}

// storeAndQueue stores group, and queues it if the hub has changed the request. The caller must hold mu.
func (g *groupStore) storeAndQueue(group *libv1beta1.ConfigurationGroup) {
	old := g.byName[group.Name]
	g.byName[group.Name] = group
	if isNewRequest(old, group) || (g.reporting[group.Name] == 0 && !isSameReport(old.Status, group.Status)) {
		// In the second case another client has changed the agent's report, or the status was lost.
		g.queue.Add(group.Name)
	}
}

// beginReport must be called before the status of a group is written, and endReport after the write, with the newest
// version that the writer knows. storeAndQueue ignores status changes during a write. endReport therefore queues the
// group if another client has changed the report: the stored version is newer than written and has another report.
func (g *groupStore) beginReport(name string) (endReport func(written *libv1beta1.ConfigurationGroup)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.reporting[name]++
	return func(written *libv1beta1.ConfigurationGroup) {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.reporting[name]--; g.reporting[name] > 0 {
			return
		}
		delete(g.reporting, name)
		if known := g.byName[name]; known != nil && isOlder(written, known) && !isSameReport(written.Status, known.Status) {
			g.queue.Add(name)
		}
	}
}

// latest returns the newest known version of group.
func (g *groupStore) latest(group *libv1beta1.ConfigurationGroup) *libv1beta1.ConfigurationGroup {
	g.mu.Lock()
	defer g.mu.Unlock()
	if known := g.byName[group.Name]; known != nil && known.UID == group.UID && isOlder(group, known) {
		return known
	}
	return group
}

// storeWritten stores the group in the response of a status write.
func (g *groupStore) storeWritten(group *libv1beta1.ConfigurationGroup) {
	g.mu.Lock()
	defer g.mu.Unlock()
	// A response with a new request is not stored: the watch delivers it later, and storeAndQueue queues it.
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
