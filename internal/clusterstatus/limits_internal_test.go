package clusterstatus

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	clocktesting "k8s.io/utils/clock/testing"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

const (
	// lowLimit is the maximum number of pods, and of nodes, in these tests.
	lowLimit = 100
	// tooMany is the number of objects of a cluster that returns too many, so that a test without a limit ends.
	tooMany = 100 * lowLimit
)

// largeServer is an API server with too many nodes or pods.
type largeServer struct {
	resource string
	// streams is true if it can stream lists.
	streams bool
	// pageItems is the number of objects per page.
	pageItems int
	// initial is the number of streamed objects before the bookmark. All others come after it.
	initial int
	// total is the number of objects. Default: tooMany.
	total int
	// isStreamed is true after the first stream. Later requests are not answered if initial is not tooMany.
	isStreamed atomic.Bool
	end        <-chan struct{}
	// memory is for the counters of the Observer.
	memory *kube.Reservation
}

// observeServer returns an Observer of s that runs until the test ends.
func observeServer(t *testing.T, s *largeServer) (*Observer, *clocktesting.FakePassiveClock) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	s.end = ctx.Done()
	server := httptest.NewServer(s)
	clock := clocktesting.NewFakePassiveClock(noon)
	o, err := NewObserver(&rest.Config{Host: server.URL}, Options{Clock: clock})
	if err != nil {
		t.Fatal(err)
	}
	o.counters = newLimitedCounters(lowLimit, lowLimit)
	o.counters.reservation = s.memory
	ended := make(chan error, 1)
	go func() { ended <- o.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-ended
		server.Close()
	})
	return o, clock
}

// ServeHTTP answers the requests for health and for the resource.
func (s *largeServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	w.Header().Set("Content-Type", "application/json")
	switch {
	case r.URL.Path == "/readyz":
	case r.URL.Path != "/api/v1/"+s.resource:
		w.WriteHeader(http.StatusNotFound)
	case query.Has("watch") && !s.streams:
		w.WriteHeader(http.StatusUnprocessableEntity)
	case s.isStreamed.Load() && s.initial != tooMany:
		s.waitForEnd(r)
	case query.Has("watch"):
		s.isStreamed.Store(true)
		s.stream(w)
		s.waitForEnd(r)
	default:
		s.writePage(w, query.Get("continue"))
	}
}

func (s *largeServer) waitForEnd(r *http.Request) {
	select {
	case <-r.Context().Done():
	case <-s.end:
	}
}

// object returns one of the objects.
func (s *largeServer) object(i int) apiruntime.Object {
	objectMeta := metav1.ObjectMeta{Name: fmt.Sprint("object-", i), UID: types.UID(fmt.Sprint(i)), ResourceVersion: "1"}
	if s.resource == "nodes" {
		return &corev1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: objectMeta}
	}
	objectMeta.Namespace = "default"
	return &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: objectMeta}
}

// stream writes all objects, with a bookmark after the initial ones.
func (s *largeServer) stream(w http.ResponseWriter) {
	send := func(kind watch.EventType, obj any) bool {
		return json.NewEncoder(w).Encode(map[string]any{"type": kind, "object": obj}) == nil
	}
	for i := range cmp.Or(s.total, tooMany) {
		if i == s.initial {
			bookmark := s.object(0)
			object, _ := meta.Accessor(bookmark)
			object.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
			send(watch.Bookmark, bookmark)
		}
		if !send(watch.Added, s.object(i)) {
			return
		}
	}
	_ = http.NewResponseController(w).Flush()
}

// writePage writes a page of objects. next is the number of the first one.
func (s *largeServer) writePage(w http.ResponseWriter, next string) {
	first := 0
	_, _ = fmt.Sscan(next, &first)
	var items []any
	for i := range s.pageItems {
		items = append(items, s.object(first+i))
	}
	listMeta := metav1.ListMeta{ResourceVersion: "1"}
	if first += max(1, s.pageItems); first < cmp.Or(s.total, tooMany) {
		listMeta.Continue = fmt.Sprint(first)
	}
	kind := strings.ToUpper(s.resource[:1]) + strings.TrimSuffix(s.resource[1:], "s") + "List"
	_ = json.NewEncoder(w).Encode(map[string]any{"apiVersion": "v1", "kind": kind, "metadata": listMeta, "items": items})
}

// wantTooMany observes until Ready has the message that the cluster has returned too many objects.
func wantTooMany(t *testing.T, o *Observer, clock *clocktesting.FakePassiveClock, resource string) {
	t.Helper()
	wantReadyMessage(t, o, clock, fmt.Sprintf("%s cannot be counted: the cluster returned more than %d %s", resource, lowLimit, resource))
}

// wantReadyMessage observes until the message of Ready contains want.
func wantReadyMessage(t *testing.T, o *Observer, clock *clocktesting.FakePassiveClock, want string) {
	t.Helper()
	status := clusterv1alpha1.ClusterStatus{}
	err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, 30*time.Second, true, func(ctx context.Context) (bool, error) {
		clock.SetTime(clock.Now().Add(5 * time.Second))
		status = o.Observe(ctx, status, nil)
		o.counters.mu.Lock()
		defer o.counters.mu.Unlock()
		if pods, nodes := len(o.counters.pods), len(o.counters.nodes); pods > lowLimit || nodes > lowLimit {
			return false, fmt.Errorf("%d pods and %d nodes are in memory", pods, nodes)
		}
		ready := meta.FindStatusCondition(status.Conditions, clusterv1alpha1.ClusterConditionReady)
		return ready != nil && strings.Contains(ready.Message, want), nil
	})
	if err != nil {
		t.Fatalf("%v: conditions are %+v", err, status.Conditions)
	}
}

func TestListsWithoutEnd(t *testing.T) {
	t.Parallel()
	for name, server := range map[string]*largeServer{
		"pages of pods":                 {resource: "pods", pageItems: pageSize},
		"one page of pods":              {resource: "pods", pageItems: tooMany},
		"empty pages":                   {resource: "pods"},
		"pages of nodes":                {resource: "nodes", pageItems: pageSize},
		"a stream of pods":              {resource: "pods", streams: true, initial: tooMany, pageItems: pageSize},
		"a stream of nodes":             {resource: "nodes", streams: true, initial: tooMany, pageItems: pageSize},
		"a watch of pods after a list":  {resource: "pods", streams: true, initial: lowLimit},
		"a watch of nodes after a list": {resource: "nodes", streams: true, initial: lowLimit},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o, clock := observeServer(t, server)
			wantTooMany(t, o, clock, server.resource)
		})
	}
}

func TestObjectsThatEndMakeRoomForOthers(t *testing.T) {
	t.Parallel()
	nodes, pods := newLimitedCounters(1, 1).newStores(nil)
	for range 3 {
		for _, err := range []error{
			nodes.ReflectorStore.Add(testNode("n", "True")), nodes.ReflectorStore.Update(testNode("n", "True")), nodes.Delete(testNode("n", "")),
			pods.ReflectorStore.Add(testPod("p", "", corev1.PodPending)), pods.ReflectorStore.Update(testPod("p", "n", corev1.PodRunning)), pods.Delete(testPod("p", "", "")),
		} {
			if err != nil {
				t.Error(err)
			}
		}
	}
	for range 2 {
		if err := pods.Replace([]any{testPod("p", "n", corev1.PodRunning)}, "1"); err != nil {
			t.Error(err)
		}
		if err := pods.ReflectorStore.Add(testPod("q", "n", corev1.PodRunning)); err == nil {
			t.Error("a second pod is counted")
		}
	}
}

// TestLargeObjectsAreNotKept has names that no API server stores, and a pod with very many resources.
func TestLargeObjectsAreNotKept(t *testing.T) {
	t.Parallel()
	sums := newLimitedCounters(lowLimit, lowLimit)
	nodes, pods := sums.newStores(nil)
	long := strings.Repeat("n", 1<<20)
	large := testPod("large", "n", corev1.PodRunning)
	large.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{}}}}
	for i := range tooMany {
		large.Spec.Containers[0].Resources.Requests[corev1.ResourceName(fmt.Sprint("example.com/", i))] = requests("cpu", "1")["cpu"]
	}
	if err := nodes.Replace([]any{testNode(long, "True"), testNode("n", "True")}, "1"); err != nil {
		t.Error(err)
	}
	if err := pods.Replace([]any{testPod("a", long, corev1.PodRunning), testPod("b", "n", corev1.PodRunning), large}, "1"); err != nil {
		t.Error(err)
	}
	if len(sums.nodes) != 1 || len(sums.pods) != 1 || len(sums.loadByNode) != 1 {
		t.Errorf("got %d nodes, %d pods and %d nodes with pods, want 1 of each", len(sums.nodes), len(sums.pods), len(sums.loadByNode))
	}
	if err := pods.ReflectorStore.Add(large); err == nil {
		t.Error("a pod of many resources is counted")
	}
}

// TestCountersWithoutMemory has clusters whose objects are within the limits, but need more memory than there is for
// the counters.
func TestCountersWithoutMemory(t *testing.T) {
	t.Parallel()
	for name, server := range map[string]*largeServer{
		"a page":               {resource: "pods", pageItems: lowLimit, total: lowLimit},
		"a stream":             {resource: "nodes", streams: true, initial: lowLimit - 1, total: lowLimit},
		"a watch after a list": {resource: "pods", streams: true, initial: 1, total: lowLimit},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server.memory = kube.NewResponseMemory(lowLimit*podEntryBytes).Reserve("team-a", 0)
			o, clock := observeServer(t, server)
			wantReadyMessage(t, o, clock, server.resource+" cannot be counted: the cluster returned data that needs too much memory")
		})
	}
}

// TestSizeOfCounters compares the memory that is reserved for counters with the memory that they need. It is not
// parallel, because it measures the memory of the whole process.
//
//nolint:paralleltest // see above
func TestSizeOfCounters(t *testing.T) {
	const number = 10_000
	for name, c := range map[string]struct {
		nodes, resources, nameSize int
	}{
		"ordinary":         {nodes: 100, nameSize: 20},
		"a pod per node":   {nodes: number, nameSize: maxName},
		"other resources":  {nodes: number, resources: 3, nameSize: 20},
		"many resources":   {nodes: 100, resources: 12, nameSize: 20},
		"without schedule": {resources: 3},
	} {
		t.Run(name, func(t *testing.T) {
			before := heap()
			sums := newCounters()
			for i := range number {
				p := testPod(fmt.Sprint("pod-", i), "", corev1.PodRunning, "cpu", "100m")
				for j := range c.resources {
					p.Spec.Containers[0].Resources.Requests[corev1.ResourceName(fmt.Sprintf("example.com/%060d", c.resources*i+j))] = requests("cpu", "1")["cpu"]
				}
				if c.nodes > 0 {
					p.Spec.NodeName = fmt.Sprintf("%0*d", c.nameSize, i%c.nodes)
				}
				if err := sums.setPod(newPodEntry(p)); err != nil {
					t.Fatal(err)
				}
				if i < c.nodes {
					n := testNode(p.Spec.NodeName, "True")
					n.UID = types.UID(fmt.Sprint("node-", i))
					if err := sums.setNode(newNodeEntry(n)); err != nil {
						t.Fatal(err)
					}
				}
			}
			needed := heap() - before
			t.Logf("%d bytes per pod, %d are counted", needed/number, sums.usedBytes/number)
			if needed > sums.usedBytes {
				t.Errorf("%d bytes are in memory, %d are counted", needed, sums.usedBytes)
			}
			if err := sums.replacePods(nil); err != nil {
				t.Fatal(err)
			}
			if err := sums.replaceNodes(nil); err != nil {
				t.Fatal(err)
			}
			if sums.usedBytes != 0 {
				t.Errorf("%d bytes are counted for nothing", sums.usedBytes)
			}
		})
	}
}

// TestListAgainNeedsNoMoreMemory lists the same pods and nodes twice, and then fewer, with little more memory than they
// need.
func TestListAgainNeedsNoMoreMemory(t *testing.T) {
	t.Parallel()
	const number, onNode = 1000, 20
	var pods []*entry[pod]
	var nodes []*entry[node]
	for i := range number {
		pods = append(pods, newPodEntry(testPod(fmt.Sprint("pod-", i), fmt.Sprint("node-", i/onNode), corev1.PodRunning, "cpu", "100m")))
		if i%onNode == 0 {
			nodes = append(nodes, newNodeEntry(testNode(fmt.Sprint("node-", i/onNode), "True")))
		}
	}
	needed := number*podEntryBytes + number/onNode*(loadEntryBytes+nodeEntryBytes+2*int64(len("node-10")))
	memory := kube.NewResponseMemory(2 * needed * 11 / 10)
	sums := newCounters()
	sums.reservation = memory.Reserve("team-a", 0)
	for i, part := range []int{1, 1, 2, 1} {
		if err := errors.Join(sums.replacePods(pods[:number/part]), sums.replaceNodes(nodes[:len(nodes)/part])); err != nil {
			t.Fatalf("list %d: %v", i, err)
		}
	}
	if sums.usedBytes > needed || sums.usedBytes < needed*9/10 {
		t.Errorf("%d bytes are counted, want %d", sums.usedBytes, needed)
	}
	sums.reservation.Close()
	if err := memory.Reserve("team-b", 0).Resize(t.Context(), needed); err != nil {
		t.Errorf("memory is not released: %v", err)
	}
}
