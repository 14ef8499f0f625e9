package clusters_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/hub/clusters"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// unanswered is the number of push members that do not answer in a test.
const unanswered = 600

// runHub runs a controller of a separate shard until the test ends. It returns a client, and the number of requests of
// the controller without watches.
func runHub(t *testing.T, shard string, dial func(context.Context, fleet.Member) (*rest.Config, error)) (client.Client, *atomic.Int32) {
	t.Helper()
	plane := localkube.Shared(t)
	hub, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	installCRD(t, hub)
	requests := &atomic.Int32{}
	counted := rest.CopyConfig(plane.Config)
	counted.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTrip(func(r *http.Request) (*http.Response, error) {
			if !r.URL.Query().Has("watch") {
				requests.Add(1)
			}
			return next.RoundTrip(r)
		})
	})
	mgr, err := ctrl.NewManager(counted, ctrl.Options{
		Scheme: kube.Scheme(), Metrics: server.Options{BindAddress: "0"}, Controller: config.Controller{
			SkipNameValidation: ptr.To(true),
			// The priority queue of controller-runtime 0.24.1 can deadlock if it shuts down while items are ready.
			UsePriorityQueue: ptr.To(false),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	controller := &clusters.Controller{
		Hub: mgr.GetClient(), Shard: fleet.Shard(shard), MemberConfig: dial, Events: events.NewFakeRecorder(10 * unanswered), Clock: clock.RealClock{},
		Heartbeats: &heartbeats.Monitor{Hub: mgr.GetClient(), Live: mgr.GetAPIReader(), Clock: clock.RealClock{}},
	}
	if err := controller.Setup(t.Context(), mgr); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if err := hub.DeleteAllOf(context.WithoutCancel(ctx), &clusterv1alpha1.Cluster{}, client.MatchingLabels{"shard": shard}); err != nil {
			t.Error(err)
		}
	})
	return hub, requests
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// member creates a Cluster of a shard.
func member(t *testing.T, hub client.Client, shard string, name string, mode clusterv1alpha1.ClusterSyncMode) *clusterv1alpha1.Cluster {
	t.Helper()
	cluster := &clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{
		Name: name, Labels: map[string]string{"shard": shard}, Annotations: map[string]string{libv1beta1.ShardAnnotation: shard},
	}}
	cluster.Spec.SyncMode = mode
	if err := hub.Create(t.Context(), cluster); err != nil {
		t.Fatal(err)
	}
	return cluster
}

// visits records the times at which each member was contacted.
type visits struct {
	mu    sync.Mutex
	times []time.Time
}

func (v *visits) add() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.times = append(v.times, time.Now())
}

// longest returns the longest time between two visits, and the number of visits.
func (v *visits) longest() (gap time.Duration, count int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for i := 1; i < len(v.times); i++ {
		gap = max(gap, v.times[i].Sub(v.times[i-1]))
	}
	return gap, len(v.times)
}

func TestMembersThatDoNotAnswerDoNotDelayTheOthers(t *testing.T) {
	t.Parallel()
	asked := &visits{}
	api := httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/readyz" {
			asked.add()
			return
		}
		http.NotFound(out, r)
	}))
	t.Cleanup(api.Close)
	alive := &rest.Config{Host: api.URL}
	var dead sync.Map
	hub, _ := runHub(t, "crowd", func(_ context.Context, m fleet.Member) (*rest.Config, error) {
		if m.Name == "crowd-alive" {
			return alive, nil
		}
		config, _ := dead.LoadOrStore(m.Name, &rest.Config{Host: "https://192.0.2.1", Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}})
		return config.(*rest.Config), nil
	})
	member(t, hub, "crowd", "crowd-alive", clusterv1alpha1.Push)
	for i := range unanswered {
		member(t, hub, "crowd", fmt.Sprint("crowd-", i), clusterv1alpha1.Push)
	}
	err := wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) {
		_, count := asked.longest()
		return count >= 3, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	// It is 10 s and jitter on an idle machine, and half a minute if a hundred members wait for unresponsive ones.
	if gap, _ := asked.longest(); gap > 20*time.Second {
		t.Errorf("a member that answers was not asked for %s", gap)
	}
	var waiting string
	err = wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		var all clusterv1alpha1.ClusterList
		if err := hub.List(ctx, &all, client.MatchingLabels{"shard": "crowd"}); err != nil {
			return false, err
		}
		for i := range all.Items {
			w := &world{cluster: &all.Items[i]}
			waiting = w.cluster.Name + ": " + w.ready()
			if w.cluster.Name != "crowd-alive" && w.ready() != "False/ClusterNotReachable: cluster is not reachable: it does not answer within 5s" {
				return false, nil
			}
		}
		return true, nil
	})
	if err != nil {
		t.Errorf("%v: Ready of %s", err, waiting)
	}
}

// quiet waits until the hub has sent no request for a second, and returns the number of requests. A reconcile with a
// stale cache repeats the last write once.
func quiet(t *testing.T, requests *atomic.Int32) int32 {
	t.Helper()
	last := requests.Load()
	err := wait.PollUntilContextTimeout(t.Context(), time.Second, 30*time.Second, false, func(context.Context) (bool, error) {
		before := last
		last = requests.Load()
		return last == before, nil
	})
	if err != nil {
		t.Fatalf("%v: the hub does not stop making requests", err)
	}
	return last
}

func TestHeartbeatsCauseNoHubRequests(t *testing.T) {
	t.Parallel()
	hub, requests := runHub(t, "beats", nil)
	w := &world{TB: t, Client: hub, cluster: member(t, hub, "beats", "beats", clusterv1alpha1.Pull)}
	lease := w.space()
	w.beat(lease, time.Now())
	tainted := func(want int) {
		t.Helper()
		err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, 30*time.Second, true, func(context.Context) (bool, error) {
			w.read()
			return len(w.cluster.Spec.Taints) == want, nil
		})
		if err != nil {
			t.Fatalf("%v: %+v", err, w.cluster)
		}
	}
	tainted(1)
	ready := `{"status":{"conditions":[{"type":"Ready","status":"True","reason":"ClusterReady","message":"","lastTransitionTime":"2026-01-02T12:00:00Z"}]}}`
	w.must(hub.Status().Patch(t.Context(), w.cluster, client.RawPatch("application/merge-patch+json", []byte(ready))))
	tainted(0)
	before := quiet(t, requests)
	for range 50 {
		w.beat(lease, time.Now())
	}
	w.read()
	version := w.cluster.ResourceVersion
	if made := quiet(t, requests) - before; made != 0 {
		t.Errorf("50 heartbeats cost %d requests", made)
	}
	if w.read(); w.cluster.ResourceVersion != version {
		t.Error("something was written")
	}
}

// An agent continuously changes between ready and not ready. Each change causes a write of the taints, and an event.
func TestChangesOfAnAgentAreLimited(t *testing.T) {
	t.Parallel()
	hub, requests := runHub(t, "flips", nil)
	w := &world{TB: t, Client: hub, cluster: member(t, hub, "flips", "flips", clusterv1alpha1.Pull)}
	w.beat(w.space(), time.Now())
	before := quiet(t, requests)
	const changes = 150
	began := time.Now()
	for i := range changes {
		status := []metav1.ConditionStatus{metav1.ConditionFalse, metav1.ConditionTrue}[i%2]
		patch := fmt.Sprintf(`{"status":{"conditions":[{"type":"Ready","status":%q,"reason":"Reason%d","message":"","lastTransitionTime":"2026-01-02T12:00:00Z"}]}}`, status, i)
		w.must(hub.Status().Patch(t.Context(), w.cluster.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(patch))))
		select {
		case <-time.After(20 * time.Millisecond):
		case <-t.Context().Done():
		}
	}
	// The burst of 20, and one in each second, are handled. Each costs at most two requests: for the taints and an event.
	if made, allowed := quiet(t, requests)-before, 2*(20+int(time.Since(began).Seconds())); int(made) < 2 || int(made) > allowed {
		t.Errorf("%d changes caused %d requests, at most %d are allowed", changes, made, allowed)
	}
	err := wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, 30*time.Second, true, func(context.Context) (bool, error) {
		w.read()
		return len(w.cluster.Spec.Taints) == 0, nil // the last change can be delayed
	})
	if err != nil {
		t.Errorf("a member that is ready has the taints %+v", w.cluster.Spec.Taints)
	}
}
