package clusterstatus

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
	// manyPods is the number of pods of the large cluster, manyNodes the number of its nodes.
	manyPods, manyNodes = 20_000, 200
	// maxPerPod limits the bytes that are kept for each pod: more than twice the actual size, and an eighth of a whole
	// object, see wholePod.
	maxPerPod = 512
	// wholePod is the minimal size of one of our pods in bytes, which makes the limit meaningful.
	wholePod = 4000
	// maxHeld limits how many Pod objects may be in memory at the end: the stream and its reader hold a few.
	maxHeld = 10
)

// It is not parallel, because it measures the memory of the whole process.
//
//nolint:paralleltest // see above
func TestPodObjectsAreNotKept(t *testing.T) {
	before := heap()
	sums := newCounters()
	nodes, pods := sums.newStores(nil)
	if err := nodes.Replace(nil, "1"); err != nil {
		t.Fatal(err)
	}
	source := &largeCluster{resend: make(chan struct{}), sent: make(chan struct{})}
	ctx, cancel := context.WithCancel(t.Context())
	var following sync.WaitGroup
	following.Go(func() {
		runReflector(ctx, &corev1.Pod{}, cache.ToListWatcherWithWatchListSemantics(pods.ListWatch(source.listWatch(), pageSize), nil), pods)
	})
	t.Cleanup(func() {
		cancel()
		following.Wait()
	})
	<-sums.synced
	source.wantLittle(t, "listed", sums, before)
	source.resend <- struct{}{}
	<-source.sent
	source.wantLittle(t, "changed", sums, before)
	runtime.KeepAlive(sums)
}

// largeCluster streams its pods. After a receive from resend it streams a change of each, and then sends to sent.
type largeCluster struct {
	resend, sent chan struct{}
	// mu guards made.
	mu sync.Mutex
	// made are all Pod objects that were streamed.
	made []weak.Pointer[corev1.Pod]
}

// wantLittle checks the memory in use since before, and that no Pod object is kept.
func (c *largeCluster) wantLittle(t *testing.T, when string, sums *counters, before int64) {
	t.Helper()
	perPod := (heap() - before) / manyPods
	t.Logf("%s: %d bytes are kept for each of %d pods", when, perPod, manyPods)
	if len(sums.pods) != manyPods || sums.scheduled.pods != manyPods {
		t.Errorf("%s: %d pods are known, and %d in the sums", when, len(sums.pods), sums.scheduled.pods)
	}
	if perPod > maxPerPod {
		t.Errorf("%s: %d bytes are kept for each pod, want %d at most", when, perPod, maxPerPod)
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

// heap returns the number of bytes in use.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return int64(stats.HeapAlloc)
}

// listWatch streams the pods, which have a realistic size.
func (c *largeCluster) listWatch() *cache.ListWatch {
	return &cache.ListWatch{
		ListWithContextFunc: func(context.Context, metav1.ListOptions) (apiruntime.Object, error) {
			panic("the list must be streamed")
		},
		WatchFuncWithContext: func(ctx context.Context, _ metav1.ListOptions) (watch.Interface, error) {
			out := make(chan watch.Event)
			go func() {
				sendAll := func(kind watch.EventType) {
					for i := range manyPods {
						c.send(ctx, out, watch.Event{Type: kind, Object: c.pod(i)})
					}
					end := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "9", Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}}
					c.send(ctx, out, watch.Event{Type: watch.Bookmark, Object: end})
				}
				sendAll(watch.Added)
				for ctx.Err() == nil {
					select {
					case <-c.resend:
						sendAll(watch.Modified)
						c.sent <- struct{}{}
					case <-ctx.Done():
					}
				}
			}()
			return watch.NewProxyWatcher(out), nil
		},
	}
}

func (*largeCluster) send(ctx context.Context, out chan<- watch.Event, event watch.Event) {
	select {
	case out <- event:
	case <-ctx.Done():
	}
}

// pod makes a Pod object, and adds it to made.
func (c *largeCluster) pod(i int) *corev1.Pod {
	pod := testPod(fmt.Sprintf("%08d-0000-4000-8000-000000000000", i), fmt.Sprint("node-", i%manyNodes), corev1.PodRunning, "cpu", "100m", "memory", "128Mi")
	pod.Namespace, pod.ResourceVersion, pod.UID = "default", fmt.Sprint(i+1), types.UID(strings.Clone(string(pod.UID)))
	pod.Annotations = map[string]string{"example.com/large": strings.Repeat("x", wholePod)}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.made = append(c.made, weak.Make(pod))
	return pod
}
