package kube

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
)

// pagedCluster has objects with names of 500 bytes, in pages of 500. Its last page waits for last, if there is one.
type pagedCluster struct {
	objects int
	last    chan struct{}
}

func (c pagedCluster) list(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
	first := 0
	_, _ = fmt.Sscan(options.Continue, &first)
	page := &corev1.ConfigMapList{}
	for i := first; i < min(c.objects, first+500); i++ {
		page.Items = append(page.Items, corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%0500d", i)}})
	}
	if first+500 < c.objects {
		page.Continue = fmt.Sprint(first + 500)
	} else if c.last != nil {
		select {
		case <-c.last:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return page, nil
}

// TestListsReserveMemory has lists of several clusters whose last page waits.
func TestListsReserveMemory(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const ofObject = listedMemory + 2*500
		memory, hostile := NewResponseMemory(64<<20), pagedCluster{objects: 15_000, last: make(chan struct{})}
		// list lists the objects of a cluster in a namespace. Its result waits for the end.
		list := func(ctx context.Context, namespace string, c pagedCluster) (*LimitedStore, chan error) {
			store := NewLimitedStore(cache.NewStore(cache.MetaNamespaceKeyFunc), NewObjectLimit(1_000_000, "objects"), memory.Reserve(namespace, 0).ForLists(),
				func(obj runtime.Object) (runtime.Object, int) { return obj, 0 })
			ended := make(chan error, 1)
			go func() {
				_, err := store.ListWatch(&cache.ListWatch{ListWithContextFunc: c.list}, 500).ListWithContext(ctx, metav1.ListOptions{})
				ended <- err
			}()
			return store, ended
		}
		wantReserved := func(step string, objects int) {
			t.Helper()
			synctest.Wait()
			want := int64(objects * ofObject)
			if objects > 0 {
				want -= uncountedOfLists
			}
			if memory.reserved != want {
				t.Errorf("%s: %d bytes are reserved, want %d", step, memory.reserved, want)
			}
		}
		want := func(step string, err error, text string) {
			t.Helper()
			if !strings.Contains(fmt.Sprint(err), text) {
				t.Errorf("%s: got error %v, want %q", step, err, text)
			}
		}
		store, ended := list(t.Context(), "eu", hostile)
		wantReserved("a list that waits for its last page", 14_500)
		_, second := list(t.Context(), "eu", hostile)
		want("another one in the namespace", <-second, "the hub has not enough memory for the responses of clusters in namespace eu")
		start := time.Now()
		_, ordinary := list(t.Context(), "eu", pagedCluster{objects: 2_500})
		want("the list of an ordinary cluster", <-ordinary, "<nil>")
		_, other := list(t.Context(), "af", pagedCluster{objects: 10_000})
		want("a list of another namespace", <-other, "<nil>")
		if waited := time.Since(start); waited > 0 {
			t.Errorf("they waited for %s", waited)
		}
		_, tooLarge := list(t.Context(), "us", pagedCluster{objects: 30_000})
		want("a large list of a third one", <-tooLarge, "the hub has not enough memory for the responses of clusters in namespace us")
		close(hostile.last)
		want("the list that waited", <-ended, "<nil>")
		if err := store.Replace(nil, "1"); err != nil {
			t.Fatal(err)
		}
		wantReserved("only the list of the other namespace is not passed", 10_000)
	})
}

// TestListsReleaseMemory ends lists and streams in the middle.
func TestListsReleaseMemory(t *testing.T) {
	t.Parallel()
	memory := NewResponseMemory(64 << 20)
	shared := memory.Reserve("eu", 0).ForLists()
	newStore := func() *LimitedStore {
		return NewLimitedStore(cache.NewStore(cache.MetaNamespaceKeyFunc), NewObjectLimit(20_000, "objects"), shared,
			func(obj runtime.Object) (runtime.Object, int) { return obj, 0 })
	}
	add := func(s *LimitedStore, objects int) {
		t.Helper()
		for i := range objects {
			_, _ = s.Transformer()(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%0500d", i)}})
		}
	}
	wantReleased := func(step string) {
		t.Helper()
		if memory.reserved != 0 || len(memory.byNamespace) != 0 || shared.size != 0 {
			t.Errorf("%s: %d bytes are reserved, %d of them by %v", step, shared.size, memory.reserved, memory.byNamespace)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	store := newStore()
	store.events = watch.NewFake()
	add(store, 5_000)
	if memory.reserved == 0 {
		t.Error("a stream reserves nothing")
	}
	_, err := store.ListWatch(&cache.ListWatch{ListWithContextFunc: func(context.Context, metav1.ListOptions) (runtime.Object, error) {
		cancel()
		return nil, ctx.Err()
	}}, 500).ListWithContext(ctx, metav1.ListOptions{})
	if err == nil {
		t.Error("the canceled list has no error")
	}
	wantReleased("after a list that failed")
	add(store, 25_000)
	if store.storeErr == nil {
		t.Error("a stream without end goes on")
	}
	store.Close()
	wantReleased("after the end of the reflector")
	add(store, 5_000)
	wantReleased("a stream that goes on after that")
	store = newStore()
	add(store, 5_000)
	shared.Close()
	store.Close()
	wantReleased("after the end of the watches of a cluster")
}

// refusingStore refuses lists.
type refusingStore struct{ cache.ReflectorStore }

var errRefused = errors.New("the list is refused")

func (refusingStore) Replace([]any, string) error { return errRefused }

// TestRefusedListEndsItsWatch streams a list that the store refuses. A reflector does not stop the watch then.
func TestRefusedListEndsItsWatch(t *testing.T) {
	t.Parallel()
	events := watch.NewFake()
	store := NewLimitedStore(refusingStore{}, NewObjectLimit(10, "objects"), nil, func(obj runtime.Object) (runtime.Object, int) { return obj, 0 })
	source := store.ListWatch(&cache.ListWatch{
		WatchFuncWithContext: func(context.Context, metav1.ListOptions) (watch.Interface, error) { return events, nil },
	}, 500)
	streamed := metav1.ListOptions{SendInitialEvents: ptr.To(true)}
	if _, err := source.WatchFuncWithContext(t.Context(), streamed); err != nil {
		t.Fatal(err)
	}
	if err := store.Replace(nil, "1"); !errors.Is(err, errRefused) || !events.IsStopped() {
		t.Errorf("error %v; the watch is stopped: %t", err, events.IsStopped())
	}
	// The next stream fails, and then the list with the same error.
	if _, err := source.WatchFuncWithContext(t.Context(), streamed); !errors.Is(err, errRefused) {
		t.Errorf("the next stream: error %v", err)
	}
	if _, err := source.ListWithContext(t.Context(), metav1.ListOptions{}); !errors.Is(err, errRefused) {
		t.Errorf("the next list: error %v", err)
	}
	if _, err := source.WatchFuncWithContext(t.Context(), streamed); err != nil {
		t.Errorf("the stream after that: error %v", err)
	}
}
