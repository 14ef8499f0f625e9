package hub

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/cache"
)

// storedObjects are the ConfigMaps of an API server, or those whose metadata is in a cache.
type storedObjects struct {
	client.Reader
	byKey map[client.ObjectKey]*corev1.ConfigMap
	// gets counts the requests. Each one waits for block, unless it is nil or ctx ends, and then fails with err, unless
	// that is nil.
	gets  atomic.Int32
	block chan struct{}
	err   error
}

func (o *storedObjects) Get(ctx context.Context, key client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	o.gets.Add(1)
	if o.block != nil {
		select {
		case <-o.block:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if o.err != nil {
		return o.err
	}
	stored, ok := o.byKey[key]
	if !ok {
		return apierrors.NewNotFound(corev1.Resource("configmaps"), key.Name)
	}
	switch obj := obj.(type) {
	case *corev1.ConfigMap:
		stored.DeepCopyInto(obj)
	case *corev1.Secret:
		obj.ObjectMeta, obj.StringData = *stored.ObjectMeta.DeepCopy(), stored.Data
	case *metav1.PartialObjectMetadata:
		stored.ObjectMeta.DeepCopyInto(&obj.ObjectMeta)
	}
	return nil
}

// cachedContents is a contentCache with the objects that it reads.
type cachedContents struct {
	testing.TB
	*contentCache
	metadata, live *storedObjects
}

func newCachedContents(t testing.TB) *cachedContents {
	c := &cachedContents{TB: t, metadata: &storedObjects{}, live: &storedObjects{}}
	c.metadata.byKey, c.live.byKey = map[client.ObjectKey]*corev1.ConfigMap{}, map[client.ObjectKey]*corev1.ConfigMap{}
	c.contentCache = newContentCache(c.metadata, c.live)
	return c
}

// put stores a version of an object in all of the stores.
func (c *cachedContents) put(name, version string, stores ...*storedObjects) {
	obj := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("uid of " + name), ResourceVersion: version},
		Data:       map[string]string{"content": name + " " + version},
	}
	for _, store := range stores {
		store.byKey[client.ObjectKeyFromObject(obj)] = obj
	}
}

func (c *cachedContents) read(ctx context.Context, name string) (string, error) {
	found := &corev1.ConfigMap{}
	err := c.Get(ctx, client.ObjectKey{Namespace: "ns", Name: name}, found)
	return found.Data["content"], err
}

func (c *cachedContents) wantContent(name, want string) {
	c.Helper()
	if got, err := c.read(c.Context(), name); err != nil || got != want {
		c.Errorf("got the content %q, %v, want %q", got, err, want)
	}
}

// wantRequests checks the number of requests to the API server since the last call.
func (c *cachedContents) wantRequests(want int) {
	c.Helper()
	if got := int(c.live.gets.Swap(0)); got != want {
		c.Errorf("got %d requests, want %d", got, want)
	}
}

func TestContentIsReadOncePerVersion(t *testing.T) {
	t.Parallel()
	const objects, readers = 200, 2
	c := newCachedContents(t)
	for i := range objects {
		c.put(fmt.Sprint(i), "1", c.metadata, c.live)
	}
	for range readers {
		for i := range objects {
			c.wantContent(fmt.Sprint(i), fmt.Sprint(i)+" 1")
		}
	}
	c.wantRequests(objects)
	c.put("7", "2", c.metadata, c.live)
	c.wantContent("7", "7 2")
	c.wantContent("7", "7 2")
	c.wantContent("8", "8 1")
	c.wantRequests(1)
	// A caller may change the returned object.
	changed := &corev1.ConfigMap{}
	if err := c.Get(t.Context(), client.ObjectKey{Namespace: "ns", Name: "7"}, changed); err != nil {
		t.Fatal(err)
	}
	changed.Data["content"] = "changed"
	c.wantContent("7", "7 2")
	// A Secret with the same name and version is another object.
	secret := &corev1.Secret{}
	if err := c.Get(t.Context(), client.ObjectKey{Namespace: "ns", Name: "7"}, secret); err != nil || secret.StringData["content"] != "7 2" {
		t.Errorf("got the Secret %v, %v", secret, err)
	}
	c.wantRequests(1)
}

func TestContentIsReadWhileTheMetadataIsStale(t *testing.T) {
	t.Parallel()
	c := newCachedContents(t)
	c.put("new", "1", c.live)
	for range 2 {
		c.wantContent("new", "new 1")
	}
	c.wantRequests(2)
	c.put("new", "1", c.metadata)
	c.wantContent("new", "new 1")
	c.wantRequests(0)

	c.put("old", "1", c.metadata)
	c.put("old", "2", c.live)
	for range 2 {
		c.wantContent("old", "old 2")
	}
	c.wantRequests(2)
	c.put("old", "2", c.metadata)
	c.wantContent("old", "old 2")
	c.wantRequests(0)

	clear(c.metadata.byKey)
	clear(c.live.byKey)
	if _, err := c.read(t.Context(), "old"); !apierrors.IsNotFound(err) {
		t.Errorf("got the error %v for a deleted object, want NotFound", err)
	}
}

func TestCachedContentsAreLimitedBySize(t *testing.T) {
	t.Parallel()
	c := newCachedContents(t)
	const size = 10 << 10
	c.byVersion = cache.New[client.Object](3 * size)
	for _, name := range []string{"a", "b", "c"} {
		c.put(name, "1", c.metadata, c.live)
		c.live.byKey[client.ObjectKey{Namespace: "ns", Name: name}].Data["other"] = strings.Repeat("x", size)
	}
	for _, name := range []string{"a", "b", "c", "c", "b"} {
		c.wantContent(name, name+" 1")
	}
	c.wantRequests(3)
	c.wantContent("a", "a 1")
	c.wantRequests(1)
}

// reading is a call of cachedContents.read in a goroutine.
type reading struct {
	content string
	err     error
	isDone  atomic.Bool
}

func (c *cachedContents) start(ctx context.Context, name string) *reading {
	r := &reading{}
	go func() {
		r.content, r.err = c.read(ctx, name)
		r.isDone.Store(true)
	}()
	return r
}

func TestConcurrentReadersShareARequest(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCachedContents(t)
		c.put("a", "1", c.metadata, c.live)
		c.live.block = make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		first := c.start(ctx, "a")
		synctest.Wait()
		var others []*reading
		for range 19 {
			others = append(others, c.start(t.Context(), "a"))
		}
		synctest.Wait()
		cancel()
		synctest.Wait()
		if !first.isDone.Load() || !errors.Is(first.err, context.Canceled) {
			t.Errorf("the reader whose context ended: done %t, %v", first.isDone.Load(), first.err)
		}
		close(c.live.block)
		synctest.Wait()
		for i, other := range others {
			if !other.isDone.Load() || other.err != nil || other.content != "a 1" {
				t.Errorf("reader %d: done %t, %q, %v", i, other.isDone.Load(), other.content, other.err)
			}
		}
		c.wantContent("a", "a 1")
		c.wantRequests(1)
	})
}

func TestFailedReadIsNotCached(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCachedContents(t)
		c.put("a", "1", c.metadata, c.live)
		c.live.block, c.live.err = make(chan struct{}), apierrors.NewInternalError(errors.New("no leader"))
		readers := []*reading{c.start(t.Context(), "a"), c.start(t.Context(), "a"), c.start(t.Context(), "a")}
		synctest.Wait()
		close(c.live.block)
		synctest.Wait()
		for i, reader := range readers {
			if !reader.isDone.Load() || !apierrors.IsInternalError(reader.err) {
				t.Errorf("reader %d: done %t, %v", i, reader.isDone.Load(), reader.err)
			}
		}
		c.wantRequests(1)
		c.live.err = nil
		c.wantContent("a", "a 1")
		c.wantRequests(1)
	})
}
