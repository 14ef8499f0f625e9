package render_test

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/render"
)

// TestConcurrentContentsOfManyValues renders contents of a tenant, each of which has less than 1 MiB and takes 100 MiB
// while it is decoded, and holds them for a while, as a delivery does. Some have aliases, which are counted by parsing
// the text. It does not run in parallel with other tests, since it measures the memory.
func TestConcurrentContentsOfManyValues(t *testing.T) { //nolint:paralleltest // see above
	const contents, wantAtMost = 12, 400 << 20
	renderer, memory := render.NewManifestRenderer(), kube.NewContentMemory(256<<20)
	defer debug.SetGCPercent(debug.SetGCPercent(20)) // garbage counts little
	runtime.GC()
	before, peak := heap(), uint64(0)
	done := make(chan struct{})
	var sampler, renderers sync.WaitGroup
	sampler.Go(func() {
		for ticker := time.NewTicker(5 * time.Millisecond); ; {
			select {
			case <-done:
				ticker.Stop()
				return
			case <-ticker.C:
				peak = max(peak, heap())
			}
		}
	})
	for i := range contents {
		renderers.Go(func() {
			values := fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\nx: [%d,%s]\n", i, strings.Repeat("{},", 140_000))
			if i%4 == 0 {
				values += "a: &a b\nc: *a\n"
			}
			large := content("a", values)
			large.Digest = fmt.Sprint(i)
			err := kube.ErrMemoryInUse
			for deadline := time.Now().Add(2 * time.Minute); errors.Is(err, kube.ErrMemoryInUse) && time.Now().Before(deadline); {
				of := subject()
				of.Held = memory.Hold("tenant")
				if _, _, err = renderer.Render(large, of); err == nil {
					<-time.After(100 * time.Millisecond) // the delivery
				}
				of.Held.Release()
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	renderers.Wait()
	close(done)
	sampler.Wait()
	t.Logf("%d MiB", (peak-min(peak, before))>>20)
	if used := peak - min(peak, before); used > wantAtMost {
		t.Errorf("%d contents took %d MiB, want at most %d", contents, used>>20, wantAtMost>>20)
	}
}

// heap returns the bytes of all objects in memory.
func heap() uint64 {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}
