package survey

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// manyPods is how many pods the large cluster of the benchmark has: 200 nodes with 100 pods each.
const manyPods, manyNodes = 20_000, 200

// BenchmarkTallyOfALargeCluster streams the pods of a large cluster through a reflector, and says what is left in memory of each.
func BenchmarkTallyOfALargeCluster(b *testing.B) {
	for b.Loop() {
		before := heap()
		sums := newTally()
		nodes, pods := shelves(sums)
		if err := nodes.Replace(nil, "1"); err != nil {
			b.Fatal(err)
		}
		ctx, cancel := context.WithCancel(b.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			follow(ctx, &corev1.Pod{}, cache.ToListWatcherWithWatchListSemantics(streamed(manyPods), nil), pods)
		}()
		<-sums.known
		if len(sums.pods) != manyPods {
			b.Fatalf("%d pods are known", len(sums.pods))
		}
		b.ReportMetric(float64(heap()-before)/manyPods, "B/pod")
		cancel()
		<-ended
		runtime.KeepAlive(sums)
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

// streamed streams so many pods, which are as large as pods are, and then nothing more.
func streamed(pods int) *cache.ListWatch {
	return &cache.ListWatch{
		ListWithContextFunc: func(context.Context, metav1.ListOptions) (apiruntime.Object, error) { panic("it is to be streamed") },
		WatchFuncWithContext: func(ctx context.Context, _ metav1.ListOptions) (watch.Interface, error) {
			out := make(chan watch.Event)
			go func() {
				for i := range pods {
					select {
					case out <- watch.Event{Type: watch.Added, Object: largePod(i)}:
					case <-ctx.Done():
						return
					}
				}
				end := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "9", Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}}
				select {
				case out <- watch.Event{Type: watch.Bookmark, Object: end}:
				case <-ctx.Done():
				}
			}()
			return watch.NewProxyWatcher(out), nil
		},
	}
}

func largePod(i int) *corev1.Pod {
	pod := testPod(fmt.Sprintf("%08d-0000-4000-8000-000000000000", i), fmt.Sprint("node-", i%manyNodes), corev1.PodRunning, "cpu", "100m", "memory", "128Mi")
	pod.Namespace, pod.ResourceVersion, pod.UID = "default", fmt.Sprint(i+1), types.UID(strings.Clone(string(pod.UID)))
	pod.Annotations = map[string]string{"example.com/large": strings.Repeat("x", 4000)}
	return pod
}
