package drift

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

const (
	// lowLimit is the maximum number of listed objects in these tests.
	lowLimit = 600
	// tooMany is the number of objects of a list without end, so that a test without a limit ends.
	tooMany = 10 * lowLimit
)

// largeServer is an API server that first lists too many objects, and then only the ones in names.
type largeServer struct {
	// streams is true if it can stream lists. pageItems is the number of objects per page.
	streams   bool
	pageItems int
	// attempts is the number of lists that have begun. isHonest is true after two of them.
	attempts atomic.Int32
	isHonest atomic.Bool
	names    []string
	// changed is the name of an object that a watch reports as changed after the last list.
	changed string
	end     <-chan struct{}
}

// ServeHTTP answers lists and watches of one resource.
func (s *largeServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	w.Header().Set("Content-Type", "application/json")
	isStream := query.Has("sendInitialEvents")
	if isStream && !s.streams {
		w.WriteHeader(http.StatusUnprocessableEntity)
		return
	}
	if (isStream || !query.Has("watch")) && query.Get("continue") == "" && s.attempts.Add(1) > 2 {
		s.isHonest.Store(true)
	}
	if query.Has("watch") {
		s.writeEvents(w, isStream)
		select {
		case <-r.Context().Done():
		case <-s.end:
		}
		return
	}
	s.writePage(w, query.Get("continue"))
}

// writeEvents streams a list, or the change of an object.
func (s *largeServer) writeEvents(w http.ResponseWriter, isStream bool) {
	defer func() { _ = http.NewResponseController(w).Flush() }()
	send := func(kind watch.EventType, obj metav1.PartialObjectMetadata) error {
		return json.NewEncoder(w).Encode(map[string]any{"type": kind, "object": obj})
	}
	if isStream {
		for _, name := range s.listed() {
			if send(watch.Added, objectMetadata(name, "1")) != nil {
				return
			}
		}
		bookmark := objectMetadata("", "1")
		bookmark.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
		_ = send(watch.Bookmark, bookmark)
	}
	if s.isHonest.Load() {
		_ = send(watch.Modified, objectMetadata(s.changed, "2"))
	}
}

// listed returns the names of the listed objects.
func (s *largeServer) listed() []string {
	if s.isHonest.Load() {
		return s.names
	}
	names := make([]string, 0, tooMany)
	for i := range tooMany {
		names = append(names, fmt.Sprint("other-", i))
	}
	return names
}

// writePage writes a page of a list. next is the number of its first object.
func (s *largeServer) writePage(w http.ResponseWriter, next string) {
	first := 0
	_, _ = fmt.Sscan(next, &first)
	names := s.listed()
	list := metav1.PartialObjectMetadataList{
		TypeMeta: metav1.TypeMeta{APIVersion: metav1.SchemeGroupVersion.String(), Kind: "PartialObjectMetadataList"}, ListMeta: metav1.ListMeta{ResourceVersion: "1"},
	}
	items := s.pageItems
	if s.isHonest.Load() {
		items = pageSize
	}
	last := min(len(names), first+items)
	for _, name := range names[first:last] {
		list.Items = append(list.Items, objectMetadata(name, "1"))
	}
	if last = max(last, first+1); last < len(names) {
		list.Continue = fmt.Sprint(last)
	}
	_ = json.NewEncoder(w).Encode(list)
}

func objectMetadata(name, version string) metav1.PartialObjectMetadata {
	return metav1.PartialObjectMetadata{
		TypeMeta:   metav1.TypeMeta{APIVersion: metav1.SchemeGroupVersion.String(), Kind: "PartialObjectMetadata"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: "uid", ResourceVersion: version},
	}
}

// newLimitedWatchSet returns a watchSet of a cluster with server, and the ID of the only bundle on it. Its ConfigMaps
// are called a and b.
func newLimitedWatchSet(t *testing.T, server *largeServer, engine Engine) (*watchSet, bundle.ID) {
	t.Helper()
	ctx, end := context.WithCancel(context.Background())
	server.end = ctx.Done()
	httpServer := httptest.NewServer(server)
	objects := metadata.NewForConfigOrDie(&rest.Config{Host: httpServer.URL, QPS: -1})
	store := inventory.NewStore(fake.NewClientset().CoreV1(), objects, "records", inventory.OwnerScope{})
	id := bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "eu/web", Feature: "Resources"}
	none := &inventory.Record{Head: inventory.Head{ID: id}}
	next := none.Edit()
	next.State, next.Options.CorrectDrift = bundle.StateApplied, true
	for _, name := range []string{"a", "b"} {
		ref := kube.Ref{Version: "v1", Kind: "ConfigMap", Namespace: "default", Name: name}
		next.Entries[ref.Key()] = inventory.Entry{Ref: ref, UID: types.UID("uid"), Fingerprint: "version 1"}
	}
	if _, err := store.Save(t.Context(), none, next, &bundle.Bundle{ID: id}); err != nil {
		t.Fatal(err)
	}
	w := newWatchSet(New(Options{
		Engine: engine, Store: store, Metadata: objects, Clock: clocktesting.NewFakeClock(time.Now()), OnCorrect: func(bundle.ID, bundle.ChangeSet) {},
	}))
	w.limit = kube.NewObjectLimit(lowLimit, "objects")
	t.Cleanup(func() {
		end()
		w.stop()
		w.corrector.queue.ShutDown()
		httpServer.Close()
	})
	return w, id
}

// TestObjectsWithoutEnd lists objects until there are too many, twice: the third list, which ends, is the first one
// that is compared with the records.
func TestObjectsWithoutEnd(t *testing.T) {
	t.Parallel()
	for name, server := range map[string]*largeServer{
		"a stream":    {streams: true},
		"pages":       {pageItems: pageSize},
		"one page":    {pageItems: tooMany},
		"empty pages": {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server.names, server.changed = []string{"a", "b"}, "b"
			engine := blockedEngine{started: make(chan map[kube.Ref]bool, 10), release: make(chan struct{})}
			w, _ := newLimitedWatchSet(t, server, engine)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			w.start(ctx, watchedKind{schema.GroupKind{Kind: "ConfigMap"}, kube.Resource{GVR: corev1.SchemeGroupVersion.WithResource("configmaps"), Namespaced: true}})
			go w.corrector.processNext(ctx)
			engine.wantRun(t, kube.Ref{Kind: "ConfigMap", Namespace: "default", Name: "b"})
			if attempts := server.attempts.Load(); attempts < 3 {
				t.Errorf("the objects of list %d are compared", attempts)
			}
		})
	}
}

// TestRecordsWithoutEnd is TestObjectsWithoutEnd for the Secrets of records. The list that ends lacks the only record.
func TestRecordsWithoutEnd(t *testing.T) {
	t.Parallel()
	for name, server := range map[string]*largeServer{"a stream": {streams: true}, "pages": {pageItems: pageSize}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, id := newLimitedWatchSet(t, server, nil)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			w.watchRecords(ctx)
			err := wait.PollUntilContextTimeout(ctx, 10*time.Millisecond, 30*time.Second, true, func(context.Context) (bool, error) {
				w.corrector.mu.Lock()
				defer w.corrector.mu.Unlock()
				task := w.corrector.tasks[id]
				return task != nil && task.checkRecord, nil
			})
			if attempts := server.attempts.Load(); err != nil || attempts < 3 {
				t.Errorf("the records of list %d are compared, error %v", attempts, err)
			}
		})
	}
}

// TestLargeObservationsAreCut has an object whose texts no API server stores.
func TestLargeObservationsAreCut(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 1<<20)
	meta := objectMetadata("a", long)
	meta.UID, meta.Annotations = types.UID(long), map[string]string{kube.AnnotationRequestor: long}
	if size := observationOf(&meta).size(); size > 2<<10 {
		t.Errorf("the observation has %d bytes", size)
	}
}
