package render_test

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/render"
)

// contentMemory is the memory for content of a hub with 2 GiB. One namespace can have a half of it.
const contentMemory = 256 << 20

// checkPeak calls run with the numbers up to n at the same time, and checks that it takes at most wantAtMost bytes.
func checkPeak(t *testing.T, n int, wantAtMost uint64, run func(i int)) {
	t.Helper()
	defer debug.SetGCPercent(debug.SetGCPercent(20)) // garbage counts little
	runtime.GC()
	before, peak := heap(), uint64(0)
	done := make(chan struct{})
	var sampler, runners sync.WaitGroup
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
	for i := range n {
		runners.Go(func() { run(i) })
	}
	runners.Wait()
	close(done)
	sampler.Wait()
	used := peak - min(peak, before)
	if t.Logf("%d MiB", used>>20); used > wantAtMost {
		t.Errorf("it took %d MiB, want at most %d", used>>20, wantAtMost>>20)
	}
}

// heap returns the bytes of all objects in memory.
func heap() uint64 {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}

// TestConcurrentContentsOfManyValues renders contents of a tenant, each of which has less than 1 MiB and takes 100 MiB
// while it is decoded, and holds them for a while, as a delivery does. Some have aliases, which are counted by parsing
// the text. It does not run in parallel with other tests, since it measures the memory.
func TestConcurrentContentsOfManyValues(t *testing.T) { //nolint:paralleltest // see above
	renderer, memory := render.NewManifestRenderer(), kube.NewContentMemory(contentMemory)
	checkPeak(t, 12, 400<<20, func(i int) {
		values := fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\nx: [%d,%s]\n", i, strings.Repeat("{},", 140_000))
		if i%4 == 0 {
			values += "a: &a b\nc: *a\n"
		}
		large := content("a", values)
		large.Digest = fmt.Sprint(i)
		err := kube.ErrMemoryInUse
		for deadline := time.Now().Add(2 * time.Minute); errors.Is(err, kube.ErrMemoryInUse) && time.Now().Before(deadline); {
			of := templateContext()
			of.Memory = memory.Reserve("tenant")
			if _, _, err = renderer.Render(large, of); err == nil {
				<-time.After(100 * time.Millisecond) // the delivery
			}
			of.Memory.Release()
		}
		if err != nil {
			t.Error(err)
		}
	})
}

// TestConcurrentValuesWithAliases parses values whose aliases are counted by parsing them, and patches.
func TestConcurrentValuesWithAliases(t *testing.T) { //nolint:paralleltest // it measures the memory
	memory := kube.NewContentMemory(contentMemory)
	text := "x: [" + strings.Repeat("0,", 250_000) + "]\na: &a b\nc: *a\n"
	checkPeak(t, 24, 500<<20, func(i int) {
		reserved := memory.Reserve("tenant")
		defer reserved.Release()
		of := templateContext()
		of.Memory = reserved
		var err error
		if i%2 == 0 {
			_, err = render.Values(text, nil, of)
		} else {
			_, err = render.DecodePatches("a", text, reserved)
		}
		if i%2 == 0 && err != nil && !kube.IsMemoryError(err) || i%2 > 0 && err == nil {
			t.Errorf("got %v", err)
		}
	})
}

// TestConcurrentLargeCharts renders a chart whose archive has 9 MiB with several values at the same time.
func TestConcurrentLargeCharts(t *testing.T) { //nolint:paralleltest // it measures the memory
	files := map[string]string{"templates/added.yaml": "{{ range 10000000 }}{{ end }}# {{ .Values.n }}"}
	random := rand.NewChaCha8([32]byte{})
	for i := range 3 {
		raw := make([]byte, 3<<20)
		_, _ = random.Read(raw) // it returns no error
		files[fmt.Sprintf("files/%d.txt", i)] = base64.RawStdEncoding.EncodeToString(bytes.Clone(raw))
	}
	chart, charts, memory := request(t, examples.Chart{Files: files}), render.NewCharts(pool), kube.NewContentMemory(contentMemory)
	checkPeak(t, 24, 400<<20, func(i int) {
		chartRequest := chart
		chartRequest.Scope, chartRequest.Values, chartRequest.Memory = "tenant", map[string]any{"n": i}, memory.Reserve("tenant")
		defer chartRequest.Memory.Release()
		if _, err := charts.Render(t.Context(), chartRequest); err != nil && !kube.IsMemoryError(err) {
			t.Errorf("%.200s", err.Error())
		}
	})
}

func TestChartChecksTooManyAPIs(t *testing.T) {
	t.Parallel()
	chartRequest := request(t, withTemplate(`{{ range $i := until 2000 }}{{ if $.Capabilities.APIVersions.Has (print $i) }}{{ end }}{{ end }}`))
	if _, err := render.NewCharts(pool).Render(t.Context(), chartRequest); err == nil || !strings.Contains(err.Error(), "checks more than 1000 API versions") {
		t.Errorf("got %v", err)
	}
	chartRequest = request(t, withTemplate(`{{ if .Capabilities.APIVersions.Has (repeat 1000 "x") }}{{ fail "it is served" }}{{ end }}`))
	if _, err := render.NewCharts(pool).Render(t.Context(), chartRequest); err != nil {
		t.Error(err)
	}
	chartRequest = request(t, withTemplate(`{{ if .Capabilities.APIVersions.Has (repeat 70000 "x") }}{{ end }}`))
	if _, err := render.NewCharts(pool).Render(t.Context(), chartRequest); err == nil || !strings.Contains(err.Error(), "64 KiB of their names") {
		t.Errorf("got %v", err)
	}
}
