package survey

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"weak"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

const (
	// manyPods is how many pods the large cluster has, on manyNodes nodes.
	manyPods, manyNodes = 20_000, 200
	// maxPerPod is how many bytes may be kept of a pod: more than twice what it takes, and an eighth of a whole one at most, see wholePod.
	maxPerPod = 512
	// wholePod is how many bytes one of our pods takes at least, so that the bound means something.
	wholePod = 4000
	// maxHeld is how many Pod objects may be in memory when all was said: those that a stream and its reader have in their hands.
	maxHeld = 10
)

// It is not parallel: it looks at the memory of the whole process.
//
//nolint:paralleltest // see above
func TestPodsOfALargeClusterAreNotKept(t *testing.T) {
	before := heap()
	sums := newTally()
	nodes, pods := shelves(sums)
	if err := nodes.Replace(nil, "1"); err != nil {
		t.Fatal(err)
	}
	source := &largeCluster{again: make(chan struct{}), told: make(chan struct{})}
	ctx, cancel := context.WithCancel(t.Context())
	var following sync.WaitGroup
	following.Go(func() {
		follow(ctx, &corev1.Pod{}, cache.ToListWatcherWithWatchListSemantics(source.lists(), nil), pods)
	})
	t.Cleanup(func() {
		cancel()
		following.Wait()
	})
	<-sums.known
	source.wantLittle(t, "listed", sums, before)
	source.again <- struct{}{}
	<-source.told
	source.wantLittle(t, "changed", sums, before)
	runtime.KeepAlive(sums)
}

// largeCluster streams its pods, and a change of each when again is sent to, and then sends to told.
type largeCluster struct {
	again, told chan struct{}
	// mu guards made.
	mu sync.Mutex
	// made are all Pod objects that were ever streamed.
	made []weak.Pointer[corev1.Pod]
}

// wantLittle wants little more in memory than before, and none of the pods.
func (c *largeCluster) wantLittle(t *testing.T, when string, sums *tally, before int64) {
	t.Helper()
	perPod := (heap() - before) / manyPods
	t.Logf("%s: %d bytes are kept of each of %d pods", when, perPod, manyPods)
	if len(sums.pods) != manyPods || sums.bound.pods != manyPods {
		t.Errorf("%s: %d pods are known, and %d in the sums", when, len(sums.pods), sums.bound.pods)
	}
	if perPod > maxPerPod {
		t.Errorf("%s: %d bytes are kept of each pod, want %d at most", when, perPod, maxPerPod)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	held := 0
	for _, pod := range c.made {
		if pod.Value() != nil {
			held++
		}
	}
	if held > maxHeld {
		t.Errorf("%s: %d of %d Pod objects are in memory, want none", when, held, len(c.made))
	}
}

// heap returns how many bytes are in use.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return int64(stats.HeapAlloc)
}

// lists streams the pods, which are as large as pods are.
func (c *largeCluster) lists() *cache.ListWatch {
	return &cache.ListWatch{
		ListWithContextFunc: func(context.Context, metav1.ListOptions) (apiruntime.Object, error) { panic("it is to be streamed") },
		WatchFuncWithContext: func(ctx context.Context, _ metav1.ListOptions) (watch.Interface, error) {
			out := make(chan watch.Event)
			go func() {
				tell := func(kind watch.EventType) {
					for i := range manyPods {
						c.tell(ctx, out, watch.Event{Type: kind, Object: c.pod(i)})
					}
					end := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "9", Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}}
					c.tell(ctx, out, watch.Event{Type: watch.Bookmark, Object: end})
				}
				tell(watch.Added)
				for ctx.Err() == nil {
					select {
					case <-c.again:
						tell(watch.Modified)
						c.told <- struct{}{}
					case <-ctx.Done():
					}
				}
			}()
			return watch.NewProxyWatcher(out), nil
		},
	}
}

func (*largeCluster) tell(ctx context.Context, out chan<- watch.Event, event watch.Event) {
	select {
	case out <- event:
	case <-ctx.Done():
	}
}

// pod makes a Pod object, and remembers that it did.
func (c *largeCluster) pod(i int) *corev1.Pod {
	pod := testPod(fmt.Sprintf("%08d-0000-4000-8000-000000000000", i), fmt.Sprint("node-", i%manyNodes), corev1.PodRunning, "cpu", "100m", "memory", "128Mi")
	pod.Namespace, pod.ResourceVersion, pod.UID = "default", fmt.Sprint(i+1), types.UID(strings.Clone(string(pod.UID)))
	pod.Annotations = map[string]string{"example.com/large": strings.Repeat("x", wholePod)}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.made = append(c.made, weak.Make(pod))
	return pod
}
