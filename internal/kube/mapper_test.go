package kube_test

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/restmapper"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/test/fuzzing"
)

// heapBytes returns the number of bytes in use.
func heapBytes() int64 {
	runtime.GC()
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return int64(stats.HeapAlloc)
}

// keptBytes returns the bytes that a Mapper keeps for the APIs of a cluster: the average of mappers of equal clusters.
func keptBytes(t testing.TB, served *servedAPIs, mappers int) int64 {
	t.Helper()
	client := newDiscovery(t, served.serve(t).URL)
	all := make([]*kube.Mapper, mappers)
	before := heapBytes()
	for i := range all {
		all[i] = kube.NewMapper(client)
		if _, err := all[i].Resource(served.versions[0].WithKind("Sample0")); err != nil {
			t.Fatal(err)
		}
	}
	kept := heapBytes() - before
	runtime.KeepAlive(all)
	return kept / int64(mappers)
}

// memoryCases are the clusters whose mappers are measured.
func memoryCases() map[string]memoryCase {
	return map[string]memoryCase{
		"many mappers of an ordinary cluster": {ordinaryAPIs(), 200, 4 << 10},
		"a mapper of a cluster of many APIs":  {manyAPIs(400, 49), 1, 8 << 20},
	}
}

// memoryCase is a cluster, and a number of mappers that keep at most maxKept bytes each.
type memoryCase struct {
	served  *servedAPIs
	mappers int
	maxKept int64
}

// It is not parallel, because it measures the memory of the whole process.
//
//nolint:paralleltest // see above
func TestMemoryOfMapper(t *testing.T) {
	for name, test := range memoryCases() {
		if kept := keptBytes(t, test.served, test.mappers); kept > test.maxKept {
			t.Errorf("%s: each keeps %d bytes, want %d at most", name, kept, test.maxKept)
		}
	}
}

// BenchmarkMapper reports the bytes that a Mapper keeps.
func BenchmarkMapper(b *testing.B) {
	for name, test := range memoryCases() {
		b.Run(name, func(b *testing.B) {
			var kept int64
			for b.Loop() {
				kept = keptBytes(b, test.served, test.mappers)
			}
			b.ReportMetric(float64(kept), "bytes-kept/mapper")
		})
	}
}

// repeatingCluster is a discovery client for a cluster with 10,000 kinds in one version, which it names as often.
type repeatingCluster struct {
	discovery.ServerResourcesInterface
}

// ServerGroupsAndResources returns the group and the kinds.
func (repeatingCluster) ServerGroupsAndResources() ([]*metav1.APIGroup, []*metav1.APIResourceList, error) {
	group, list := &metav1.APIGroup{}, &metav1.APIResourceList{GroupVersion: "v1"}
	for i := range 10_000 {
		group.Versions = append(group.Versions, metav1.GroupVersionForDiscovery{GroupVersion: "v1", Version: fmt.Sprint("v", i)})
		list.APIResources = append(list.APIResources, metav1.APIResource{Name: fmt.Sprint("kinds", i), Kind: fmt.Sprint("Kind", i)})
	}
	return []*metav1.APIGroup{group}, []*metav1.APIResourceList{list}, nil
}

// TestMapperReadsEachVersionOnce: a hostile cluster must not multiply its APIs.
//
//nolint:paralleltest // it measures the memory of the whole process
func TestMapperReadsEachVersionOnce(t *testing.T) {
	fuzzing.Within(t, 64<<20, func() {
		if _, err := kube.NewMapper(repeatingCluster{}).Resource(schema.GroupVersionKind{Version: "v1", Kind: "Kind9999"}); err != nil {
			t.Error(err)
		}
	})
}

func resource(name, kind string, namespaced bool) metav1.APIResource {
	return metav1.APIResource{Name: name, Kind: kind, Namespaced: namespaced}
}

// sampleAPIs has the cases in which mappers differ.
func sampleAPIs() *servedAPIs {
	at := func(gv string, resources ...metav1.APIResource) servedVersion {
		parsed, err := schema.ParseGroupVersion(gv)
		if err != nil {
			panic(err)
		}
		return servedVersion{GroupVersion: parsed, resources: resources}
	}
	down := at("metrics.k8s.io/v1", resource("nodes", "NodeMetrics", false))
	down.isDown = true
	halfDown := at("half.example.com/v2", resource("halves", "Half", true))
	halfDown.isDown = true
	return &servedAPIs{
		preferred: map[string]string{"autoscaling": "v2", "half.example.com": "v2", "none.example.com": "v9"},
		versions: []servedVersion{
			at("v1", resource("pods", "Pod", true), resource("pods/status", "Pod", true), resource("pods/eviction", "Eviction", true),
				resource("events", "Event", true), resource("namespaces", "Namespace", false), resource("bindings", "Binding", true)),
			at("events.k8s.io/v1", resource("events", "Event", true)),
			// The preferred version is the last one, and lacks one kind.
			at("autoscaling/v1beta1", resource("oldscalers", "OldScaler", false)),
			at("autoscaling/v1", resource("scalers", "Scaler", true), resource("oldscalers", "OldScaler", true)),
			at("autoscaling/v2", resource("newscalers", "Scaler", false)),
			// Two resources have one kind.
			at("metrics.example.com/v1", resource("cpu", "Value", true), resource("memory", "Value", false)),
			at("half.example.com/v1", resource("halves", "Half", true)), halfDown,
			at("none.example.com/v1", resource("nones", "None", true)),
			at("empty.example.com/v1"),
			down,
		},
	}
}

// TestMapperIsLikeRESTMapper compares Mapper with the mapper of client-go, on the same discovery.
func TestMapperIsLikeRESTMapper(t *testing.T) {
	t.Parallel()
	served := sampleAPIs()
	kinds := map[schema.GroupVersionKind]bool{}
	for _, version := range served.versions {
		for _, other := range served.versions {
			for _, api := range other.resources {
				kinds[version.WithKind(api.Kind)] = true
				kinds[schema.GroupVersionKind{Group: version.Group, Version: "v7", Kind: api.Kind}] = true
				kinds[schema.GroupVersionKind{Group: version.Group, Kind: api.Kind}] = true
			}
		}
	}
	for _, isLegacy := range []bool{false, true} {
		served.isLegacy = isLegacy
		client := newDiscovery(t, served.serve(t).URL)
		want, got := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(client)), kube.NewMapper(client)
		for gvk := range kinds {
			mapping, err := want.RESTMapping(gvk.GroupKind(), gvk.Version)
			found, gotErr := got.Resource(gvk)
			compareMapping(t, fmt.Sprintf("legacy %t: Resource(%s)", isLegacy, gvk), mapped{found, gotErr}, mappedBy(mapping, err))
			if meta.IsNoMatchError(err) {
				mapping, err = want.RESTMapping(gvk.GroupKind())
			}
			found, gotErr = got.ResourceInAnyVersion(gvk)
			compareMapping(t, fmt.Sprintf("legacy %t: ResourceInAnyVersion(%s)", isLegacy, gvk), mapped{found, gotErr}, mappedBy(mapping, err))
		}
	}
}

// mapped is the result of a Mapper.
type mapped struct {
	kube.Resource

	err error
}

// mappedBy returns the result of a mapper of client-go.
func mappedBy(mapping *meta.RESTMapping, err error) mapped {
	if err != nil {
		return mapped{err: err}
	}
	return mapped{Resource: kube.Resource{GVR: mapping.Resource, Namespaced: mapping.Scope.Name() == meta.RESTScopeNameNamespace}}
}

func compareMapping(t *testing.T, name string, got, want mapped) {
	t.Helper()
	if diff := cmp.Diff(got.Resource, want.Resource); diff != "" || (got.err == nil) != (want.err == nil) || meta.IsNoMatchError(got.err) != meta.IsNoMatchError(want.err) {
		t.Errorf("%s: got error %v, want %v: got -, want +\n%s", name, got.err, want.err, diff)
	}
}

// TestMapperDoesNotGuess: client-go's mapper has a resource for the list of each kind, and for each kind in lower case.
// The API server serves none of them.
func TestMapperDoesNotGuess(t *testing.T) {
	t.Parallel()
	mapper := kube.NewMapper(newDiscovery(t, sampleAPIs().serve(t).URL))
	for _, kind := range []string{"PodList", "List", "pod"} {
		found, err := mapper.ResourceInAnyVersion(schema.GroupVersionKind{Version: "v1", Kind: kind})
		var noMatch *meta.NoKindMatchError
		if !errors.As(err, &noMatch) || noMatch.GroupKind.Kind != kind {
			t.Errorf("%s: got %v and error %v, want no match", kind, found, err)
		}
	}
}

// changingCluster is a server whose discovery can fail and change.
type changingCluster struct {
	*httptest.Server

	handler  atomic.Value // an http.HandlerFunc
	requests atomic.Int64
}

func newChangingCluster(t *testing.T) *changingCluster {
	t.Helper()
	c := &changingCluster{}
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c.requests.Add(1)
		c.handler.Load().(http.HandlerFunc)(w, r)
	}))
	t.Cleanup(c.Close)
	return c
}

// TestMapperLoadsOnce: a failed load is repeated by the next call, and one that succeeds is kept until Reset.
func TestMapperLoadsOnce(t *testing.T) {
	t.Parallel()
	cluster := newChangingCluster(t)
	mapper, pod := kube.NewMapper(newDiscovery(t, cluster.URL)), schema.GroupVersionKind{Version: "v1", Kind: "Pod"}
	for name, broken := range map[string]http.HandlerFunc{
		"does not answer": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) },
		"has no API": func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/apis" {
				w.WriteHeader(http.StatusNotFound)
			}
			_, _ = w.Write([]byte("{}")) // the client may have closed the connection
		},
		"has no API that answers": (&servedAPIs{versions: []servedVersion{{GroupVersion: schema.GroupVersion{Version: "v1"}, isDown: true}}}).handler(t),
	} {
		cluster.handler.Store(broken)
		for range 2 {
			before := cluster.requests.Load()
			if _, err := mapper.ResourceInAnyVersion(pod); err == nil || meta.IsNoMatchError(err) {
				t.Errorf("got error %v of a cluster that %s", err, name)
			}
			if cluster.requests.Load() == before {
				t.Errorf("the error of a cluster that %s was kept", name)
			}
		}
	}
	cluster.handler.Store(sampleAPIs().handler(t))
	before := cluster.requests.Load()
	var calls sync.WaitGroup
	for range 20 {
		calls.Go(func() {
			if _, err := mapper.Resource(pod); err != nil {
				t.Error(err)
			}
		})
	}
	calls.Wait()
	once := cluster.requests.Load() - before
	mapper.Reset()
	cluster.handler.Store((&servedAPIs{versions: []servedVersion{{GroupVersion: schema.GroupVersion{Version: "v2"}}}}).handler(t))
	if _, err := mapper.Resource(pod); !meta.IsNoMatchError(err) {
		t.Errorf("got error %v for a kind that is no longer served", err)
	}
	// The sample has APIs that fail, so it is read twice.
	if again := cluster.requests.Load() - before - once; once != 4 || again != 2 {
		t.Errorf("20 concurrent calls sent %d requests, and one call after Reset sent %d", once, again)
	}
}
