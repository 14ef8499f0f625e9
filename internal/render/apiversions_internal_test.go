package render

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/towline/towline/internal/cache"
)

// TestMemoryOfAPIVariants adds many renderings for members that serve different APIs. The cache must count their
// memory, and keep none of the lists of the members.
func TestMemoryOfAPIVariants(t *testing.T) { //nolint:paralleltest // it measures the heap
	const names, apis = 100, 2000
	c := &Charts{sharedReleases: cache.New[Release](maxSharedSize)}
	heap := func() int64 {
		runtime.GC()
		var stats runtime.MemStats
		runtime.ReadMemStats(&stats)
		return int64(stats.HeapAlloc)
	}
	before := heap()
	for i := range 2 * maxVariants {
		checked, versions := checkedAPIs{}, make([]string, apis)
		for n := range names {
			checked[fmt.Sprintf("%d.%s/v1", n, strings.Repeat("x", 400))] = true
		}
		for n := range versions {
			versions[n] = fmt.Sprintf("%d.%d.%s/v1", i, n, strings.Repeat("x", 400))
		}
		for n := range 10 {
			if i>>n&1 == 1 {
				versions[n] = fmt.Sprintf("%d.%s/v1", n, strings.Repeat("x", 400))
			}
		}
		c.addVariant("key", apiVariant{key: fmt.Sprint(i), checked: checked}, versions)
		cached, _ := c.sharedReleases.Get("key")
		if key, ok := cached.apiVariants.find(versions); !ok || key != fmt.Sprint(i) {
			t.Fatalf("got %q, want the rendering %d", key, i)
		}
	}
	cached, _ := c.sharedReleases.Get("key")
	if got := len(cached.apiVariants); got != maxVariants {
		t.Errorf("got %d variants, want %d", got, maxVariants)
	}
	if used, counted := heap()-before, int64(cached.apiVariants.size()); used > 2*counted {
		t.Errorf("%d variants take %d bytes, and %d are counted", len(cached.apiVariants), used, counted)
	}
	runtime.KeepAlive(c)
}
