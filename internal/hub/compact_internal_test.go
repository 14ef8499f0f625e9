package hub

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
)

// cachedConfiguration returns a ClusterConfiguration as the cache stores it. Its objects were applied at a time.
func cachedConfiguration(t *testing.T, transform func(any) (any, error), cluster string, applied time.Time) *configv1beta1.ClusterConfiguration {
	t.Helper()
	example := exampleConfiguration("fleet", cluster, "")
	example.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "towline"}}
	feature := &example.Status.ClusterProfileResources[0].Features[0]
	for i := range feature.Resources {
		feature.Resources[i].LastAppliedTime = &metav1.Time{Time: applied}
	}
	raw, err := json.Marshal(example)
	if err != nil {
		t.Fatal(err)
	}
	cached := &configv1beta1.ClusterConfiguration{}
	if err := json.Unmarshal(raw, cached); err != nil {
		t.Fatal(err)
	}
	if _, err := transform(cached); err != nil {
		t.Fatal(err)
	}
	after := cached.DeepCopy()
	after.ManagedFields = example.ManagedFields
	if got, err := json.Marshal(after); err != nil || string(got) != string(raw) {
		t.Errorf("the cached object differs: %s, error %v", cmp.Diff(string(raw), string(got)), err)
	}
	return cached
}

func resourcesOf(configuration *configv1beta1.ClusterConfiguration) []configv1beta1.DeployedResource {
	return configuration.Status.ClusterProfileResources[0].Features[0].Resources
}

func TestCachedObjectsShareTheirStrings(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	a, b := cachedConfiguration(t, prepareForCache, "a", now), cachedConfiguration(t, prepareForCache, "b", now)
	if unsafe.StringData(resourcesOf(a)[0].Kind) != unsafe.StringData(resourcesOf(b)[0].Kind) {
		t.Error("two objects have copies of a kind")
	}
	if cap(resourcesOf(a)) > len(resourcesOf(a)) {
		t.Errorf("a slice of %d elements has room for %d", len(resourcesOf(a)), cap(resourcesOf(a)))
	}
}

func TestStringPoolKeepsUsedStrings(t *testing.T) {
	t.Parallel()
	var pool stringPool
	text := func() string { return strings.Clone("kind") }
	first := pool.share(text())
	for i := range 5 * maxPooledStrings {
		pool.share(fmt.Sprint("name-", i))
		if i%(maxPooledStrings/2) == 0 && unsafe.StringData(pool.share(text())) != unsafe.StringData(first) {
			t.Fatalf("after %d other strings the pool returns a copy", i)
		}
	}
	if n := len(pool.recent) + len(pool.older); n > 2*maxPooledStrings {
		t.Errorf("the pool has %d strings", n)
	}
	long := strings.Repeat("x", maxPooledString+1)
	if pool.share(long) != long || pool.recent[long] != "" {
		t.Error("a long string is kept")
	}
}

func TestCachedConfigurationsShareTheirResources(t *testing.T) {
	t.Parallel()
	transform := newSharedResources().transform
	now := time.Unix(1_700_000_000, 0)
	share := func(a, b *configv1beta1.ClusterConfiguration) bool { return &resourcesOf(a)[0] == &resourcesOf(b)[0] }
	first, later := cachedConfiguration(t, transform, "a", now), cachedConfiguration(t, transform, "b", now.Add(time.Second))
	second := cachedConfiguration(t, transform, "c", now)
	if !share(first, second) || share(first, later) {
		t.Errorf("resources of the same second share memory: %t; of two seconds: %t", share(first, second), share(first, later))
	}
}

// TestSharedMemoryIsNotWritten transforms an object twice, as a reflector does that streams a list. Meanwhile
// controllers read the objects with which it shares memory.
func TestSharedMemoryIsNotWritten(t *testing.T) {
	t.Parallel()
	transform := newSharedResources().transform
	now := time.Unix(1_700_000_000, 0)
	cached, next := cachedConfiguration(t, transform, "a", now), cachedConfiguration(t, transform, "b", now)
	before := unsafe.StringData(resourcesOf(cached)[0].Name)
	for i := range 2 * maxPooledStrings { // afterwards another copy of the string would be shared
		cachedStrings.share(fmt.Sprint("other-", i))
	}
	if _, err := transform(next); err != nil {
		t.Fatal(err)
	}
	if unsafe.StringData(resourcesOf(cached)[0].Name) != before {
		t.Error("a cached object was written")
	}
}
