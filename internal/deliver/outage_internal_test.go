package deliver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// failingHub has one group. Requests fail if failure returns an error.
type failingHub struct {
	client.WithWatch
	group   *libv1beta1.ConfigurationGroup
	failure func() error

	mu    sync.Mutex // guards the fields below
	lists int        // without the lists of kube.DetectRestore
	watch *watch.FakeWatcher
	// versions has the resource versions from which watches began.
	versions []string
}

// IsWatchListSemanticsUnSupported makes the reflector use List.
func (*failingHub) IsWatchListSemanticsUnSupported() bool { return true }

func (h *failingHub) List(_ context.Context, list client.ObjectList, opts ...client.ListOption) error {
	if err := h.failure(); err != nil {
		return err
	}
	options := (&client.ListOptions{}).ApplyOptions(opts)
	h.mu.Lock()
	defer h.mu.Unlock()
	if options.Limit != 1 {
		h.lists++
	}
	groups := list.(*libv1beta1.ConfigurationGroupList)
	groups.ResourceVersion, groups.Items = h.group.ResourceVersion, []libv1beta1.ConfigurationGroup{*h.group}
	return nil
}

func (h *failingHub) Watch(_ context.Context, _ client.ObjectList, opts ...client.ListOption) (watch.Interface, error) {
	if err := h.failure(); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.versions = append(h.versions, (&client.ListOptions{}).ApplyOptions(opts).Raw.ResourceVersion)
	h.watch = watch.NewFake()
	return h.watch, nil
}

// TestOverloadedHubGetsFewRequests makes requests fail with errors of a starting API server, long after an outage.
func TestOverloadedHubGetsFewRequests(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := newGroupStore()
		defer g.queue.ShutDown()
		overloaded := fmt.Errorf("report: %w", markUnavailable(apierrors.NewTooManyRequestsError("busy")))
		refused := fmt.Errorf("report: %w", markUnavailable(&net.OpError{Op: "dial", Err: errors.New("connection refused")}))
		last := func(failure error) (delay time.Duration) {
			for range 20 {
				delay = g.retryDelay("group", failure)
			}
			return delay
		}
		if delay := last(overloaded); delay != retryLast {
			t.Errorf("without an outage, the delay grows to %s, want %s", delay, retryLast)
		}
		if delay := last(refused); delay > 10*time.Second {
			t.Errorf("in an outage, the delay grows to %s, want 10 s", delay)
		}
		if delay := last(overloaded); delay > 10*time.Second {
			t.Errorf("after an outage, the delay grows to %s, want 10 s", delay)
		}
		<-time.After(2 * time.Minute)
		if delay := last(overloaded); delay != retryLast {
			t.Errorf("long after an outage, the delay grows to %s, want %s", delay, retryLast)
		}
	})
}

// TestAgentSourceRecoversSoonAfterAnOutage ends the watch of an agent and makes its reports fail, until the retry delay
// of a delivery that fails on the member is at its maximum. Then the API server forbids all requests for some seconds.
func TestAgentSourceRecoversSoonAfterAnOutage(t *testing.T) {
	t.Parallel()
	group, _ := pack(t, testBundle(objects("a", "1")))
	group.ResourceVersion = "5"
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		outage, reachable, ready := began.Add(time.Second), began.Add(time.Hour), began.Add(time.Hour+15*time.Second)
		hub := &failingHub{group: group, failure: func() error {
			switch now := time.Now(); {
			case now.Before(outage), !now.Before(ready):
				return nil
			case now.Before(reachable):
				return &net.OpError{Op: "dial", Err: errors.New("connection refused")}
			}
			return apierrors.NewForbidden(schema.GroupResource{}, "", errors.New("the roles are not read yet"))
		}}
		source := NewAgentSource(hub, group.Namespace, "member")
		reported := make(chan time.Time, 1)
		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() {
			_ = source.Run(ctx, 1, func(_ context.Context, d Delivery) error { // ends with ctx
				if time.Now().Before(outage) {
					return errors.New("the member is not ready") // the agent reports it during the outage
				}
				if err := hub.failure(); err != nil {
					return fmt.Errorf("report %s: %w", d.ID, markUnavailable(err))
				}
				reported <- time.Now()
				return nil
			})
		})
		<-time.After(time.Until(outage))
		hub.mu.Lock()
		hub.watch.Stop()
		hub.mu.Unlock()
		if late := (<-reported).Sub(ready); late > 10*time.Second {
			t.Errorf("the report was written %s after the API server was ready", late)
		}
		<-time.After(time.Until(ready.Add(10 * time.Second)))
		synctest.Wait()
		hub.mu.Lock()
		defer hub.mu.Unlock()
		if hub.lists != 1 || len(hub.versions) != 2 || hub.versions[1] != "5" {
			t.Errorf("%d lists and watches from %q 10 s after the API server was ready, want one list and the watch continued from 5", hub.lists, hub.versions)
		}
		stop()
		running.Wait()
	})
}

// TestStatusChangeDuringReportQueuesGroup changes the status as another client after the report of the agent, for
// example as a killed agent with a late request. The event arrives before the response to the agent.
func TestStatusChangeDuringReportQueuesGroup(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		events     []string // the resource versions that the watch delivers before the response, which has version 6
		wantQueued int
	}{
		"own event": {[]string{"6"}, 0}, "event of another client": {[]string{"6", "7"}, 1}, "no event": {nil, 0},
	} {
		group, _ := pack(t, testBundle(objects("a", "1")))
		groupWithVersion := func(version string) *libv1beta1.ConfigurationGroup {
			changed := group.DeepCopy()
			changed.ResourceVersion, changed.Status.DeploymentStatus = version, libv1beta1.FeatureStatusProvisioning
			if version == "6" {
				changed.Status.DeploymentStatus = libv1beta1.FeatureStatusProvisioned
			}
			return changed
		}
		groups := newGroupStore()
		defer groups.queue.ShutDown()
		groups.byName[group.Name] = groupWithVersion("5")
		endReport := groups.beginReport(group.Name)
		for _, version := range test.events {
			if err := groups.Update(groupWithVersion(version)); err != nil {
				t.Fatal(err)
			}
		}
		groups.storeWritten(groupWithVersion("6"))
		endReport(groupWithVersion("6"))
		if got := groups.queue.Len(); got != test.wantQueued {
			t.Errorf("%s: %d groups are queued, want %d", name, got, test.wantQueued)
		}
	}
}

// TestApplyingGroupsAreHandledRepeatedly has groups without changes. A group that is reported as applying is handled
// again, because the agent may have missed the end of the run.
func TestApplyingGroupsAreHandledRepeatedly(t *testing.T) {
	t.Parallel()
	for status, want := range map[libv1beta1.FeatureStatus]int{
		libv1beta1.FeatureStatusProvisioning: 4, libv1beta1.FeatureStatusProvisioned: 1, libv1beta1.FeatureStatusFailed: 1,
	} {
		group, _ := pack(t, testBundle(objects("a", "1")))
		group.ResourceVersion, group.Status.DeploymentStatus = "5", status
		synctest.Test(t, func(t *testing.T) {
			source := NewAgentSource(&failingHub{group: group, failure: func() error { return nil }}, group.Namespace, "member")
			var handled atomic.Int32
			ctx, stop := context.WithTimeout(t.Context(), 3*resyncInterval+time.Second)
			defer stop()
			_ = source.Run(ctx, 1, func(context.Context, Delivery) error { // ends with ctx
				handled.Add(1)
				return nil
			})
			if got := int(handled.Load()); got != want {
				t.Errorf("%s: handled %d times, want %d", status, got, want)
			}
		})
	}
}
