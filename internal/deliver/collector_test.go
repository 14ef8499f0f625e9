package deliver

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	testclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

func collect(t *testing.T, h *hub) {
	t.Helper()
	collector := &GarbageCollector{Transport: h.pull}
	if err := collector.Collect(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func wantBundles(t *testing.T, h *hub, namespace string, want int) {
	t.Helper()
	list := &libv1beta1.ConfigurationBundleList{}
	if err := h.admin.List(t.Context(), list, client.InNamespace(namespace)); err != nil {
		t.Fatal(err)
	}
	if len(list.Items) != want {
		t.Errorf("bundles in %s: got %d, want %d", namespace, len(list.Items), want)
	}
}

// The collector deletes objects on the whole hub, so its tests have their own hub and run in sequence.
func TestGarbageCollector(t *testing.T) {
	t.Parallel()
	h := newHub(t, localkube.ForTest(t))
	t.Run("keeps content until it is provisioned", func(t *testing.T) {
		h := newHub(t, h.plane)
		m := h.createMember("keep")
		b := testBundle(objects("a", "1"), objects("b", "1"))
		mustDeliver(t, h.pull, m, b)
		collect(t, h)
		wantBundles(t, h, m.DeliveryNamespace, 2)
		h.restart()
		collect(t, h)
		wantBundles(t, h, m.DeliveryNamespace, 2)
		h.startAgent(m, newMemberEngine())
		deliverUntil(t, h.pull, m, b, bundle.StateApplied)
		collect(t, h)
		wantBundles(t, h, m.DeliveryNamespace, 0)
		if h.getGroup(m, b.ID).Spec.Action != libv1beta1.ActionDeploy {
			t.Error("the action of the group has changed")
		}
	})
	t.Run("deletes replaced content", func(t *testing.T) {
		h := newHub(t, h.plane)
		m := h.createMember("replace")
		for i := range 4 {
			mustDeliver(t, h.pull, m, testBundle(objects("a", fmt.Sprint(i))))
		}
		wantBundles(t, h, m.DeliveryNamespace, 4)
		collect(t, h)
		wantBundles(t, h, m.DeliveryNamespace, 1)
	})
	t.Run("keeps foreign bundles", func(t *testing.T) {
		h := newHub(t, h.plane)
		m := h.createMember("foreign")
		h.create(&libv1beta1.ConfigurationBundle{ObjectMeta: metav1.ObjectMeta{Namespace: m.DeliveryNamespace, Name: "config-0gdr5cqfqeb2ch6vnd9i"}})
		collect(t, h)
		wantBundles(t, h, m.DeliveryNamespace, 1)
	})
	t.Run("keeps bundles of another shard", func(t *testing.T) {
		h := newHub(t, h.plane)
		m := h.createMember("sharded")
		other, err := NewShardPullTransport(clientFor(t, h.plane.Config), clientFor(t, h.plane.Config), testKey, "k")
		if err != nil {
			t.Fatal(err)
		}
		mustDeliver(t, other, m, testBundle(objects("a", "1")))
		// The state before the group that refers to the bundle is written.
		group := h.getGroup(m, testBundle().ID)
		if err := h.admin.Delete(t.Context(), group); err != nil {
			t.Fatal(err)
		}
		collect(t, h)
		wantBundles(t, h, m.DeliveryNamespace, 1)
		if err := (&GarbageCollector{Transport: other}).Collect(t.Context()); err != nil {
			t.Fatal(err)
		}
		wantBundles(t, h, m.DeliveryNamespace, 0)
	})
	t.Run("deletes content of a former shard", func(t *testing.T) {
		h := newHub(t, h.plane)
		m := h.createMember("stray")
		other, err := NewShardPullTransport(clientFor(t, h.plane.Config), clientFor(t, h.plane.Config), testKey, "k")
		if err != nil {
			t.Fatal(err)
		}
		for _, version := range []string{"1", "2"} {
			mustDeliver(t, other, m, testBundle(objects("a", version)))
		}
		h.pull.tracker.clock = testclock.NewFakeClock(time.Now().Add(2 * otherShardAge))
		if err := (&GarbageCollector{Transport: h.pull}).Collect(t.Context()); err != nil {
			t.Fatal(err)
		}
		wantBundles(t, h, m.DeliveryNamespace, 1)
	})
	t.Run("keeps content of a group of another shard that is not in the cache", func(t *testing.T) {
		h := newHub(t, h.plane)
		m := h.createMember("elsewhere")
		other, err := NewShardPullTransport(clientFor(t, h.plane.Config), clientFor(t, h.plane.Config), testKey, "k")
		if err != nil {
			t.Fatal(err)
		}
		mustDeliver(t, other, m, testBundle(objects("a", "1")))
		h.pull.hub = cacheOfShard{h.pull.hub, h.pull.shard}
		h.pull.tracker.clock = testclock.NewFakeClock(time.Now().Add(2 * otherShardAge))
		if err := (&GarbageCollector{Transport: h.pull}).Collect(t.Context()); err != nil {
			t.Fatal(err)
		}
		wantBundles(t, h, m.DeliveryNamespace, 1)
	})
	t.Run("keeps shared content until the last member has it", func(t *testing.T) {
		h := newHub(t, h.plane)
		b := testBundle(objects("late-marker", "1"))
		b.SharedBy = 2
		first, late := h.createMember("first"), h.createMember("late")
		mustDeliver(t, h.pull, late, b)
		h.startAgent(first, newMemberEngine())
		deliverUntil(t, h.pull, first, b, bundle.StateApplied)
		collect(t, h)
		if found := h.listBundles(kube.AgentNamespace, "late-marker"); len(found) != 1 {
			t.Errorf("shared bundles: got %v, want 1", found)
		}
		h.startAgent(late, newMemberEngine())
		deliverUntil(t, h.pull, late, b, bundle.StateApplied)
		collect(t, h)
		if found := h.listBundles(kube.AgentNamespace, "late-marker"); len(found) != 0 {
			t.Errorf("shared bundles: got %v, want none", found)
		}
	})
	t.Run("runs soon after the last group was provisioned", func(t *testing.T) {
		h := newHub(t, h.plane)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- (&GarbageCollector{Transport: h.pull}).Start(ctx) }()
		m := h.createMember("soon")
		h.startAgent(m, newMemberEngine())
		b := testBundle(objects("a", "1"))
		deliverUntil(t, h.pull, m, b, bundle.StateApplied)
		began := time.Now()
		wantBundles(t, h, m.DeliveryNamespace, 1)
		eventually(t, "deletion of the bundles", func(context.Context) error {
			if found := h.listBundles(m.DeliveryNamespace, ""); len(found) != 0 {
				return fmt.Errorf("remaining bundles: %v", found)
			}
			return nil
		})
		t.Logf("bundles were deleted %s after the report", time.Since(began).Round(time.Millisecond))
		h.requests.take()
		for range 20 {
			mustDeliver(t, h.pull, m, b)
		}
		if len(h.pull.trigger) != 0 {
			t.Error("a delivery of a provisioned group triggers a collection")
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Run("waits before it deletes bundles of a former leader", func(t *testing.T) {
		h := newHub(t, h.plane)
		m := h.createMember("former")
		for _, version := range []string{"1", "2"} {
			mustDeliver(t, h.pull, m, testBundle(objects("a", version)))
		}
		h.restart()
		ctx, cancel := context.WithCancel(t.Context())
		ended, clock := make(chan error, 1), testclock.NewFakeClock(time.Now())
		h.pull.tracker.clock = clock
		go func() { ended <- (&GarbageCollector{Transport: h.pull, Grace: CollectorGrace}).Start(ctx) }()
		waits := func(context.Context) error {
			if !clock.HasWaiters() {
				return errors.New("the collector does not wait")
			}
			return nil
		}
		eventually(t, "the collector waits", waits)
		wantBundles(t, h, m.DeliveryNamespace, 2)
		clock.Step(CollectorGrace)
		eventually(t, "the collector waits for a trigger", waits)
		wantBundles(t, h, m.DeliveryNamespace, 1)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Run("forgets bundles that were deleted with their namespace", func(t *testing.T) {
		h := newHub(t, h.plane)
		m := h.createMember("deregistered")
		mustDeliver(t, h.pull, m, testBundle(objects("a", "1")))
		h.deleteBundles(m.DeliveryNamespace)
		collect(t, h)
		if got := len(h.pull.tracker.contents); got != 0 {
			t.Errorf("%d entries in the tracker, want none", got)
		}
	})
	t.Run("collects again after a failure", func(t *testing.T) { collectAfterFailure(t, newHub(t, h.plane)) })
	t.Run("delays no delivery of other content", func(t *testing.T) { deliverDuringADeletion(t, newHub(t, h.plane)) })
	t.Run("does not race with deliveries", func(t *testing.T) { collectDuringDeliveries(t, newHub(t, h.plane)) })
}

// collectAfterFailure checks that the collector retries a failed collection without another delivery.
func collectAfterFailure(t *testing.T, h *hub) {
	m := h.createMember("outage")
	for _, version := range []string{"1", "2"} {
		mustDeliver(t, h.pull, m, testBundle(objects("a", version)))
	}
	var hasFailed atomic.Bool
	config := rest.CopyConfig(h.plane.Config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(request *http.Request) (*http.Response, error) {
			if strings.HasSuffix(request.URL.Path, "/configurationbundles") && !hasFailed.Swap(true) {
				return nil, errors.New("outage")
			}
			return next.RoundTrip(request)
		})
	})
	transport, err := NewShardPullTransport(clientFor(t, config), clientFor(t, config), testKey, h.shard)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- (&GarbageCollector{Transport: transport}).Start(ctx) }()
	eventually(t, "the replaced content is deleted", func(context.Context) error {
		if found := h.listBundles(m.DeliveryNamespace, ""); len(found) != 1 {
			return fmt.Errorf("remaining bundles: %v", found)
		}
		return nil
	})
	if !hasFailed.Load() {
		t.Error("no collection has failed")
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// deliverDuringADeletion delivers while the deletions of the collector wait for their responses.
func deliverDuringADeletion(t *testing.T, h *hub) {
	deleting, release := make(chan struct{}), make(chan struct{})
	begin, end := sync.OnceFunc(func() { close(deleting) }), sync.OnceFunc(func() { close(release) })
	defer end()
	config := rest.CopyConfig(h.plane.Config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(request *http.Request) (*http.Response, error) {
			if request.Method == http.MethodDelete {
				begin()
				<-release
			}
			return next.RoundTrip(request)
		})
	})
	transport, err := NewShardPullTransport(clientFor(t, config), clientFor(t, config), testKey, h.shard)
	if err != nil {
		t.Fatal(err)
	}
	m := h.createMember("hanging")
	for _, version := range []string{"1", "2"} {
		mustDeliver(t, transport, m, testBundle(objects("a", version)))
	}
	collected, delivered := make(chan error, 1), make(chan error, 1)
	go func() { collected <- (&GarbageCollector{Transport: transport}).Collect(t.Context()) }()
	<-deleting
	go func() {
		_, err := transport.Deliver(t.Context(), m, testBundle(objects("a", "3")))
		delivered <- err
	}()
	select {
	case err := <-delivered:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("a delivery of other content waits for the deletion")
	}
	end()
	if err := <-collected; err != nil {
		t.Error(err)
	}
	wantBundles(t, h, m.DeliveryNamespace, 2) // the versions 2 and 3
}

// collectDuringDeliveries collects without a pause while deliveries alternate between two bundles, so that content is
// needed again when the collector may delete it.
func collectDuringDeliveries(t *testing.T, h *hub) {
	ctx, stop := context.WithCancel(t.Context())
	collected := make(chan struct{})
	collections := 0
	go func() {
		defer close(collected)
		for ctx.Err() == nil {
			if err := (&GarbageCollector{Transport: h.pull}).Collect(ctx); err != nil && ctx.Err() == nil {
				t.Error(err)
			}
			collections++
		}
	}()
	var running sync.WaitGroup
	for n := range 4 {
		m := h.createMember(fmt.Sprintf("race-%d", n))
		running.Go(func() { deliverAlternately(t, h, m) })
	}
	running.Wait()
	stop()
	<-collected
	t.Logf("%d collections", collections)
}

func deliverAlternately(t *testing.T, h *hub, m fleet.Member) {
	for i := range 60 {
		b := testBundle(objects("race-marker", fmt.Sprint(i%2)))
		b.SharedBy = i % 3
		if _, err := h.pull.Deliver(t.Context(), m, b); err != nil {
			t.Error(err)
			return
		}
		group := &libv1beta1.ConfigurationGroup{}
		if err := h.admin.Get(t.Context(), client.ObjectKey{Namespace: m.DeliveryNamespace, Name: GroupName(m, b.ID)}, group); err != nil {
			t.Error(err)
			return
		}
		ref := group.Spec.ConfigurationItems[0].ContentRef
		if err := h.admin.Get(t.Context(), client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, &libv1beta1.ConfigurationBundle{}); err != nil {
			t.Errorf("round %d: the group refers to missing content: %v", i, err)
			return
		}
	}
}
