package fleet_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/cache"

	"github.com/towline/towline/internal/kube"
)

// TestLongEventsOfAListAreListed streams a list with an object that is longer than the buffer of a watch. The reflector
// then lists the objects, and watches from the version of the list.
func TestLongEventsOfAListAreListed(t *testing.T) {
	t.Parallel()
	object := func(name string, length int) string {
		return fmt.Sprintf(`{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":{"name":%q,"namespace":"a","resourceVersion":"5","annotations":{"a":%q}}}`,
			name, strings.Repeat("x", length))
	}
	small, long := object("small", 1), object("long", 200<<10)
	var streams, lists atomic.Int32
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		query := r.URL.Query()
		switch {
		case !query.Has("watch"):
			lists.Add(1)
			_, _ = fmt.Fprintf(w, `{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1","metadata":{"resourceVersion":"5"},"items":[%s,%s]}`, small, long)
		case query.Has("sendInitialEvents"):
			streams.Add(1)
			for _, event := range []string{small, long, small} {
				_, _ = fmt.Fprintf(w, `{"type":"ADDED","object":%s}`, event) // here and below, the client may have closed the connection
				_ = http.NewResponseController(w).Flush()
				<-time.After(20 * time.Millisecond)
			}
			<-r.Context().Done()
		default:
			_, _ = io.WriteString(w, "\n")
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}
	}))
	t.Cleanup(server.Close)
	objects, err := metadata.NewForConfig(limitedConfig(t, server))
	if err != nil {
		t.Fatal(err)
	}
	api := objects.Resource(schema.GroupVersionResource{Version: "v1", Resource: "secrets"})
	stored := cache.NewStore(cache.MetaNamespaceKeyFunc)
	store := kube.NewLimitedStore(stored, kube.NewObjectLimit(100, "objects"), nil, func(obj runtime.Object) (runtime.Object, int) { return obj, 0 })
	source := store.ListWatch(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			return api.List(ctx, options)
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			return api.Watch(ctx, options)
		},
	}, 100)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		cache.NewReflectorWithOptions(source, &metav1.PartialObjectMetadata{}, store, cache.ReflectorOptions{Name: "test"}).RunWithContext(ctx)
	}()
	defer func() { stop(); <-ended }()
	for deadline := time.Now().Add(time.Minute); len(stored.List()) < 2; <-time.After(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d objects after %d streams and %d lists", len(stored.List()), streams.Load(), lists.Load())
		}
	}
	if streams.Load() != 1 || lists.Load() != 1 {
		t.Errorf("got %d streams and %d lists", streams.Load(), lists.Load())
	}
}
