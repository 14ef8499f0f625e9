package drift

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// heap returns the bytes of the objects in use.
func heap() int64 {
	runtime.GC()
	runtime.GC() // a sync.Pool keeps its values for one more
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return int64(stats.HeapAlloc)
}

// decodedObject returns the metadata of an object as a client decodes it: its texts share no memory with others.
func decodedObject(t *testing.T, name, requestor string) *metav1.PartialObjectMetadata {
	t.Helper()
	object := objectMetadata(name, strings.Repeat("1", 9))
	object.UID = types.UID(strings.Repeat("u", 36))
	object.Annotations = map[string]string{kube.AnnotationRequestor: requestor, kube.AnnotationHub: "hub", kube.AnnotationScope: "scope"}
	raw, err := json.Marshal(object)
	decoded := &metav1.PartialObjectMetadata{}
	if err == nil {
		err = json.Unmarshal(raw, decoded)
	}
	if err != nil {
		t.Fatal(err)
	}
	return decoded
}

// TestMemoryOfListedObjects compares the memory of a list that waits for its last page with the memory that it can
// have. It does not run with other tests, because it measures.
func TestMemoryOfListedObjects(t *testing.T) { //nolint:paralleltest // see above
	const total, uncounted = 32 << 20, 4 << 20
	sink := &objectSink{gk: schema.GroupKind{Kind: "ConfigMap"}}
	for name, format := range map[string]string{"short names": "name-%d", "long names": "%0500d"} {
		memory := kube.NewResponseMemory(total).Reserve("eu", 0).ForLists()
		newStore := func() *kube.LimitedStore {
			return kube.NewLimitedStore(sink, kube.NewObjectLimit(1<<40, "objects"), memory, sink.trim)
		}
		// listPages lists up to maximum objects, and returns how many were passed.
		listPages := func(store *kube.LimitedStore, maximum int) (list kruntime.Object, listed int, err error) {
			list, err = store.ListWatch(&cache.ListWatch{ListWithContextFunc: func(context.Context, metav1.ListOptions) (kruntime.Object, error) {
				page := &metav1.PartialObjectMetadataList{ListMeta: metav1.ListMeta{Continue: "next"}}
				page.Items = append(page.Items, *decodedObject(t, fmt.Sprintf(format, listed), "ClusterSummary/eu/web/Resources"))
				if listed++; listed == maximum {
					page.Continue = ""
				}
				return page, nil
			}}, 1).ListWithContext(t.Context(), metav1.ListOptions{})
			return list, listed, err
		}
		_, maximum, err := listPages(newStore(), 1_000_000)
		if err == nil {
			t.Fatalf("%s: a list of %d objects has no limit", name, maximum)
		}
		maximum--
		store, before := newStore(), heap()
		list, _, err := listPages(store, maximum)
		if err != nil {
			t.Fatal(err)
		}
		kept := replaced(t, list)
		if used := heap() - before; used > total/2+uncounted || used < total/6 {
			t.Errorf("%s: %d objects in pages need %d KiB; %d KiB are reserved", name, maximum, used>>10, (total/2+uncounted)>>10)
		}
		runtime.KeepAlive(kept)
		store.Close()
		list, kept = nil, nil
		store, before = newStore(), heap()
		streamed := cache.NewStore(cache.MetaNamespaceKeyFunc, cache.WithTransformer(store.Transformer()))
		for i := range maximum {
			if err := streamed.Add(decodedObject(t, fmt.Sprintf(format, i), "ClusterSummary/eu/web/Resources")); err != nil {
				t.Fatal(err)
			}
		}
		kept = append(kept, streamed.List(), keysOf(streamed.List()))
		if used := heap() - before; used > total/2+uncounted || used < total/6 {
			t.Errorf("%s: %d streamed objects need %d KiB; %d KiB are reserved", name, maximum, used>>10, (total/2+uncounted)>>10)
		}
		runtime.KeepAlive(kept)
		runtime.KeepAlive(list)
		store.Close()
		memory.Close()
	}
}

// replaced returns what is in memory when a reflector passes a list to objectSink.Replace.
func replaced(t *testing.T, list kruntime.Object) []any {
	t.Helper()
	extracted, err := meta.ExtractList(list)
	if err != nil {
		t.Fatal(err)
	}
	objects := make([]any, 0, len(extracted))
	for _, object := range extracted {
		objects = append(objects, object)
	}
	return []any{list, extracted, objects, keysOf(objects)}
}

// keysOf returns the keys of objects, as objectSink.Replace needs them.
func keysOf(objects []any) map[kube.Ref]bool {
	keys := map[kube.Ref]bool{}
	for _, object := range objects {
		if listed, ok := object.(*listedObject); ok {
			keys[listed.key] = true
		}
	}
	return keys
}

// TestListsOfAMemberShareMemory has a member whose lists are many honest pages with a last one that waits. The memory
// is enough for one of two.
func TestListsOfAMemberShareMemory(t *testing.T) {
	t.Parallel()
	const pages, half = 20, 20 << 20
	var begun, atLastPage atomic.Int32
	ctx, end := context.WithCancel(t.Context())
	server := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		page := 0
		_, _ = fmt.Sscan(r.URL.Query().Get("continue"), &page)
		switch {
		case r.URL.Query().Has("watch"):
			rw.WriteHeader(http.StatusUnprocessableEntity)
			return
		case page == 0:
			begun.Add(1)
		case page == pages:
			atLastPage.Add(1)
			select {
			case <-ctx.Done():
			case <-r.Context().Done():
			}
			return
		}
		list := metav1.PartialObjectMetadataList{
			TypeMeta: metav1.TypeMeta{APIVersion: metav1.SchemeGroupVersion.String(), Kind: "PartialObjectMetadataList"},
			ListMeta: metav1.ListMeta{Continue: fmt.Sprint(page + 1)},
		}
		for i := range pageSize {
			list.Items = append(list.Items, objectMetadata(fmt.Sprintf("%0500d", page*pageSize+i), "1"))
		}
		rw.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(rw).Encode(list)
	}))
	t.Cleanup(server.Close)
	objects, memory := metadata.NewForConfigOrDie(&rest.Config{Host: server.URL, QPS: -1}), kube.NewResponseMemory(2*half)
	store := inventory.NewStore(fake.NewClientset().CoreV1(), objects, "records", inventory.OwnerScope{})
	store.LimitMemory(memory.Reserve("eu", 0))
	w := newWatchSet(New(Options{Store: store, Metadata: objects, Clock: clock.RealClock{}}))
	t.Cleanup(w.corrector.queue.ShutDown)
	w.watchRecords(ctx)
	w.start(ctx, watchedKind{schema.GroupKind{Kind: "ConfigMap"}, kube.Resource{GVR: corev1.SchemeGroupVersion.WithResource("configmaps"), Namespaced: true}})
	err := wait.PollUntilContextTimeout(ctx, 10*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) {
		return begun.Load() > 2 && atLastPage.Load() == 1, nil // one of them was refused, and has begun again
	})
	if err != nil {
		t.Errorf("%d lists have begun, %d wait for their last page", begun.Load(), atLastPage.Load())
	}
	end()
	w.stop()
	if err := memory.Reserve("eu", 0).Resize(t.Context(), half); err != nil {
		t.Errorf("the memory of the lists is still reserved: %v", err)
	}
}

// TestMemoryOfObservations observes the objects of a record, all drifted, with texts as long as a member can make them.
// The estimate for the record counts 1,200 bytes for each entry, of which the entry itself needs 450. The test does not
// run with others, because it measures.
func TestMemoryOfObservations(t *testing.T) { //nolint:paralleltest // see above
	const objects, perObject = 20_000, 750
	store := newFakeStore()
	id := bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "eu/web", Feature: "Resources"}
	none := &inventory.Record{Head: inventory.Head{ID: id}}
	next, uid := none.Edit(), strings.Repeat("u", 64)
	next.State, next.Options.CorrectDrift = bundle.StateApplied, true
	for i := range objects {
		ref := kube.Ref{Version: "v1", Kind: "ConfigMap", Namespace: "default", Name: fmt.Sprint(i)}
		next.Entries[ref.Key()] = inventory.Entry{Ref: ref, UID: types.UID(uid), Fingerprint: "same"}
	}
	if _, err := store.Save(t.Context(), none, next, &bundle.Bundle{ID: id}); err != nil {
		t.Fatal(err)
	}
	c := New(Options{Store: store, Clock: clock.RealClock{}})
	t.Cleanup(c.queue.ShutDown)
	sink, before := &objectSink{corrector: c, gk: schema.GroupKind{Kind: "ConfigMap"}}, heap()
	for i := range objects {
		object := decodedObject(t, fmt.Sprint(i), strings.Repeat("r", 2<<10))
		object.UID, object.ResourceVersion = types.UID(strings.Clone(uid)), strings.Repeat("1", 1<<10)
		if err := sink.Add(object); err != nil {
			t.Fatal(err)
		}
	}
	observed := c.tasks[id].observed
	c.updateBackoffs(id, selectedOf(observed), nil, context.Canceled)
	if len(observed) != objects || len(c.backoffs) != objects {
		t.Errorf("%d observations and %d backoffs are kept", len(observed), len(c.backoffs))
	}
	if used := (heap() - before) / objects; used > perObject {
		t.Errorf("an object needs %d bytes besides its entry", used)
	}
	runtime.KeepAlive(c)
}

// selectedOf returns the keys of observed.
func selectedOf(observed map[kube.Ref]observation) map[kube.Ref]bool {
	selected := make(map[kube.Ref]bool, len(observed))
	for key := range observed {
		selected[key] = true
	}
	return selected
}
