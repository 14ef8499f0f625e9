package ratelimit_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/workqueue"
	testingclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/hub/ratelimit"
)

func TestBurstAndInterval(t *testing.T) {
	t.Parallel()
	clock := testingclock.NewFakePassiveClock(time.Unix(1e9, 0))
	limiter := ratelimit.New(10*time.Second, 3, clock)
	for i, step := range []struct{ after, want time.Duration }{
		{0, 0}, {0, 0}, {0, 0}, // the burst
		{0, 10 * time.Second}, {4 * time.Second, 6 * time.Second}, // one delayed event for all
		{6 * time.Second, 10 * time.Second},
		{10 * time.Second, 10 * time.Second}, {time.Minute, 0}, {0, 0}, {0, 0}, {0, 10 * time.Second},
	} {
		clock.SetTime(clock.Now().Add(step.after))
		if got := limiter.Delay("a"); got != step.want {
			t.Errorf("step %d: the delay is %s, want %s", i, got, step.want)
		}
	}
	if got := limiter.Delay("b"); got != 0 {
		t.Errorf("another key is delayed by %s", got)
	}
}

// An agent that changes its status all the time causes as many reconciles as the limiter allows. Each change is
// reconciled within the interval, also the last one.
func TestEventsOfAnHour(t *testing.T) {
	t.Parallel()
	clock := testingclock.NewFakePassiveClock(time.Unix(1e9, 0))
	limiter, allowed := ratelimit.New(6*time.Second, 20, clock), map[time.Time]bool{}
	for range 36_000 {
		delay := limiter.Delay("a")
		if delay < 0 || delay > 6*time.Second {
			t.Fatalf("a change is delayed by %s", delay)
		}
		allowed[clock.Now().Add(delay)] = true
		clock.SetTime(clock.Now().Add(100 * time.Millisecond))
	}
	if len(allowed) > 625 || len(allowed) < 600 {
		t.Errorf("%d reconciles in an hour, want 600 and the burst", len(allowed))
	}
}

func TestUpdatesOfAgents(t *testing.T) {
	t.Parallel()
	sveltos := func(change func(*libv1beta1.SveltosCluster)) client.Object {
		cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "b", Generation: 1}, Spec: libv1beta1.SveltosClusterSpec{PullMode: true}}
		change(cluster)
		return cluster
	}
	karmada := func(mode clusterv1alpha1.ClusterSyncMode, generation int64) client.Object {
		return &clusterv1alpha1.Cluster{
			ObjectMeta: metav1.ObjectMeta{Name: "b", Generation: generation}, Spec: clusterv1alpha1.ClusterSpec{SyncMode: mode},
		}
	}
	same := sveltos(func(*libv1beta1.SveltosCluster) {})
	for name, test := range map[string]struct {
		before, after client.Object
		isLimited     bool
	}{
		"status":       {same, sveltos(func(c *libv1beta1.SveltosCluster) { c.Status.Version = "v1.2.3" }), true},
		"spec":         {same, sveltos(func(c *libv1beta1.SveltosCluster) { c.Generation = 2 }), false},
		"labels":       {same, sveltos(func(c *libv1beta1.SveltosCluster) { c.Labels = map[string]string{"a": "b"} }), false},
		"annotations":  {same, sveltos(func(c *libv1beta1.SveltosCluster) { c.Annotations = map[string]string{"a": "b"} }), false},
		"deletion":     {same, sveltos(func(c *libv1beta1.SveltosCluster) { c.DeletionTimestamp = &metav1.Time{Time: time.Now()} }), false},
		"push":         {same, sveltos(func(c *libv1beta1.SveltosCluster) { c.Spec.PullMode = false }), false},
		"Cluster":      {karmada(clusterv1alpha1.Pull, 1), karmada(clusterv1alpha1.Pull, 2), true},
		"push Cluster": {karmada(clusterv1alpha1.Push, 1), karmada(clusterv1alpha1.Push, 1), false},
	} {
		if key := ratelimit.ByAgentOfCluster(test.before, test.after); (key != "") != test.isLimited {
			t.Errorf("%s: the key is %q", name, key)
		}
	}
	group := func(generation int64) client.Object {
		return &libv1beta1.ConfigurationGroup{ObjectMeta: metav1.ObjectMeta{Name: "b", Generation: generation}}
	}
	if key := ratelimit.ByAgentOfGroup(group(1), group(2)); key != "" {
		t.Errorf("a new spec of a group has the key %q", key)
	}
	if key := ratelimit.ByAgentOfGroup(group(1), group(1)); key == "" {
		t.Error("a new status of a group has no key")
	}
}

// delays records the delays of requests.
type delays struct {
	workqueue.TypedRateLimitingInterface[reconcile.Request]
	of []time.Duration
}

func (d *delays) AddAfter(_ reconcile.Request, delay time.Duration) { d.of = append(d.of, delay) }

func TestHandler(t *testing.T) {
	t.Parallel()
	limiter := ratelimit.New(time.Second, 1, testingclock.NewFakePassiveClock(time.Unix(1e9, 0)))
	requests := func(context.Context, client.Object) []reconcile.Request { return make([]reconcile.Request, 2) }
	handler := limiter.Handler(requests, ratelimit.ByAgentOfGroup)
	group, queue := &libv1beta1.ConfigurationGroup{}, &delays{}
	changed := group.DeepCopy()
	changed.Generation = 1
	handler.Create(t.Context(), event.CreateEvent{Object: group}, queue)
	for range 2 {
		handler.Update(t.Context(), event.UpdateEvent{ObjectOld: group, ObjectNew: group}, queue)
	}
	handler.Update(t.Context(), event.UpdateEvent{ObjectOld: group, ObjectNew: changed}, queue)
	handler.Delete(t.Context(), event.DeleteEvent{Object: group}, queue)
	if want := "[0s 0s 0s 0s 1s 1s 0s 0s 0s 0s]"; fmt.Sprint(queue.of) != want {
		t.Errorf("the delays are %s, want %s", queue.of, want)
	}
}

// Each event that Allow allows counts, and no other one.
func TestAllowCountsAllowedEvents(t *testing.T) {
	t.Parallel()
	clock := testingclock.NewFakePassiveClock(time.Unix(1e9, 0))
	limiter := ratelimit.New(10*time.Second, 2, clock)
	for i, step := range []struct {
		after time.Duration
		want  bool
	}{
		{0, true}, {0, true}, {0, false}, {9 * time.Second, false}, // the burst
		{time.Second, true}, {0, false}, {10 * time.Second, true}, // one per interval
		{time.Minute, true}, {0, true}, {0, false}, // the whole burst again
	} {
		clock.SetTime(clock.Now().Add(step.after))
		if got := limiter.Allow("a"); got != step.want {
			t.Errorf("step %d: got %t, want %t", i, got, step.want)
		}
	}
	if !limiter.Allow("b") {
		t.Error("another key is not allowed")
	}
}

// reconciles is a queue that records the requests with the time of each.
type reconciles struct {
	workqueue.TypedRateLimitingInterface[reconcile.Request]
	clock *testingclock.FakePassiveClock
	at    map[string]time.Duration // the delay
}

func (r *reconciles) AddAfter(request reconcile.Request, delay time.Duration) {
	r.at[fmt.Sprint(request, r.clock.Now().Add(delay).UnixMilli())] = delay
}

// slowest returns the longest delay of the requests that were recorded.
func (r *reconciles) slowest() time.Duration {
	return slices.Max(append(slices.Collect(maps.Values(r.at)), 0))
}

// TestObjectsOfOneMember has an agent that changes many groups, or a cluster with many summaries, all the time.
func TestObjectsOfOneMember(t *testing.T) {
	t.Parallel()
	const objects = 300
	group := func(namespace string, i int) client.Object {
		return &libv1beta1.ConfigurationGroup{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprint(i)}}
	}
	requestOf := func(_ context.Context, obj client.Object) []reconcile.Request {
		return []reconcile.Request{{NamespacedName: client.ObjectKeyFromObject(obj)}}
	}
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "hostile", Name: "one"}, Spec: libv1beta1.SveltosClusterSpec{PullMode: true}}
	requestsOfCluster := func(context.Context, client.Object) []reconcile.Request {
		var all []reconcile.Request
		for i := range objects {
			all = append(all, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(group("hostile", i))})
		}
		return all
	}
	for name, change := range map[string]func(*ratelimit.Limiter, *reconciles){
		"groups": func(limiter *ratelimit.Limiter, queue *reconciles) {
			for i := range objects {
				e := event.UpdateEvent{ObjectOld: group("hostile", i), ObjectNew: group("hostile", i)}
				limiter.Handler(requestOf, ratelimit.ByAgentOfGroup).Update(t.Context(), e, queue)
			}
		},
		"cluster": func(limiter *ratelimit.Limiter, queue *reconciles) {
			e := event.UpdateEvent{ObjectOld: cluster, ObjectNew: cluster}
			limiter.Handler(requestsOfCluster, ratelimit.ByAgentOfCluster).Update(t.Context(), e, queue)
		},
	} {
		clock := testingclock.NewFakePassiveClock(time.Unix(1e9, 0))
		limiter := ratelimit.NewWithin(ratelimit.New(100*time.Millisecond, 1000, clock), 6*time.Second, 20)
		queue := &reconciles{clock: clock, at: map[string]time.Duration{}}
		for range 3 { // as if the content of all groups changed
			change(limiter, queue)
			clock.SetTime(clock.Now().Add(time.Second))
		}
		if got := queue.slowest(); got > 0 {
			t.Errorf("%s: a few changes of %d objects are delayed by %s", name, objects, got)
		}
		for range 600 {
			change(limiter, queue)
			clock.SetTime(clock.Now().Add(time.Second))
		}
		// 1000 at once, and ten in each second; and the last one of each object.
		if got := len(queue.at); got > 7400 || got < 6500 {
			t.Errorf("%s: %d reconciles in ten minutes, want about 7000", name, got)
		}
		if got := queue.slowest(); got > time.Minute {
			t.Errorf("%s: a reconcile is delayed by %s", name, got)
		}
		other := &reconciles{clock: clock, at: map[string]time.Duration{}}
		e := event.UpdateEvent{ObjectOld: group("other", 1), ObjectNew: group("other", 1)}
		limiter.Handler(requestOf, ratelimit.ByAgentOfGroup).Update(t.Context(), e, other)
		if got := other.slowest(); got > 0 || len(other.at) != 1 {
			t.Errorf("%s: another member is delayed by %s", name, got)
		}
	}
}
