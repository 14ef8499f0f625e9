package engine_test

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"runtime"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/engine"
)

// TestDeliveredContentIsReleased checks that an engine does not keep the objects of an applied bundle in memory.
func TestDeliveredContentIsReleased(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	released := make(chan struct{})
	func() {
		obj := c.configMap("a", "1")
		runtime.AddCleanup(obj, func(int) { close(released) }, 0)
		converge(t, e, c.bundle("released", obj))
	}()
	eventually(t, "released", func() bool {
		runtime.GC()
		select {
		case <-released:
			return true
		default:
			return false
		}
	})
	runtime.KeepAlive(e)
}

// BenchmarkMemberMemory measures the memory of a hub for one push member with 100 objects of 1 KiB: the memory of an
// engine that has delivered them and corrects their drift. The metric of the content is its size in the objects.
func BenchmarkMemberMemory(b *testing.B) {
	const members, objects, size = 20, 100, 1 << 10
	c := newCluster(b)
	runs, stop := context.WithCancel(b.Context())
	ended := make(chan error, members)
	before := heapSize()
	engines := make([]*engine.Engine, members)
	for i := range engines {
		var all []*unstructured.Unstructured
		for k := range objects {
			text := make([]byte, size/2)
			_, _ = rand.Read(text) // Read never fails
			all = append(all, c.configMap(fmt.Sprintf("member-%d-%d", i, k), hex.EncodeToString(text)))
		}
		e := c.engine(nil, func(o *engine.Options) { o.Namespace = fmt.Sprintf("%s-%d", c.records, i) })
		engines[i] = e
		go func() { ended <- e.Run(runs) }()
		converge(b, e, c.bundle(fmt.Sprintf("member-%d", i), all...))
	}
	used := heapSize() - before
	runtime.KeepAlive(engines)
	stop()
	for range members {
		<-ended
	}
	for b.Loop() { // one measurement for all rounds
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(used)/members/1024, "KiB/member")
	b.ReportMetric(objects*size/1024, "KiB-content")
}

// heapSize returns the bytes of all objects in the heap that are in use.
func heapSize() int64 {
	runtime.GC()
	runtime.GC() // the first run keeps the content of each sync.Pool
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return int64(stats.HeapAlloc) //nolint:gosec // the heap is far smaller
}
