package hub

import (
	"context"
	"fmt"
	"strings"

	"golang.org/x/sync/singleflight"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/cache"
)

// maxContentsSize is the maximum size in bytes of the cached ConfigMaps and Secrets. Only objects that profiles refer
// to are read.
const maxContentsSize = 64 << 20

// contentCache reads ConfigMaps and Secrets. The metadata of all of them is in the hub's cache. The content of each
// version is read from the API server once and then cached for all members.
type contentCache struct {
	metadata  client.Reader
	live      client.Reader
	byVersion *cache.Cache[client.Object]
	// requests has one request per version that is not cached.
	requests singleflight.Group
}

// version identifies one version of one object.
type version struct {
	kind            string
	name            types.NamespacedName
	uid             types.UID
	resourceVersion string
}

func (v version) key() string {
	return strings.Join([]string{v.kind, v.name.String(), string(v.uid), v.resourceVersion}, "/")
}

func newContentCache(metadata, live client.Reader) *contentCache {
	return &contentCache{metadata: metadata, live: live, byVersion: cache.New[client.Object](maxContentsSize)}
}

// Get implements client.Reader. obj must be a ConfigMap or a Secret. The result is at least as new as the metadata in
// the hub's cache.
func (c *contentCache) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	var kind string
	switch obj.(type) {
	case *corev1.ConfigMap:
		kind = "ConfigMap"
	case *corev1.Secret:
		kind = "Secret"
	default:
		return fmt.Errorf("read %T %s: only ConfigMaps and Secrets are supported", obj, key)
	}
	cachedMetadata := &metav1.PartialObjectMetadata{}
	cachedMetadata.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind(kind))
	if err := c.metadata.Get(ctx, key, cachedMetadata, client.UnsafeDisableDeepCopy); err != nil || len(opts) > 0 {
		// The metadata can be stale: an object that it does not contain can exist. Without a version, or with options, the
		// request is not shared.
		return c.readLive(ctx, kind, key, obj, opts...)
	}
	content, err := c.getVersion(ctx, version{kind, key, cachedMetadata.UID, cachedMetadata.ResourceVersion})
	if err != nil {
		return err
	}
	copyInto(content, obj)
	return nil
}

// getVersion returns the object from the cache if it has this version, which is that of the metadata. Else it reads the
// object from the API server. Concurrent callers share one request: each of them has seen the version, and the request
// was sent after the first of them saw it, so its result is not older.
func (c *contentCache) getVersion(ctx context.Context, wanted version) (client.Object, error) {
	if hit, ok := c.byVersion.Get(wanted.key()); ok {
		return hit, nil
	}
	// The callers that wait for this request must not fail if the one that sends it ends. Its client limits the time.
	requestCtx := context.WithoutCancel(ctx)
	answer := c.requests.DoChan(wanted.key(), func() (any, error) {
		if hit, ok := c.byVersion.Get(wanted.key()); ok {
			return hit, nil // another request has ended meanwhile
		}
		content := newContentObject(wanted.kind)
		if err := c.readLive(requestCtx, wanted.kind, wanted.name, content); err != nil {
			return nil, err
		}
		return content, nil
	})
	select {
	case <-ctx.Done():
		return nil, fmt.Errorf("read %s %s: %w", wanted.kind, wanted.name, ctx.Err())
	case result := <-answer:
		content, _ := result.Val.(client.Object) // nil with an error
		return content, result.Err
	}
}

// readLive reads obj from the API server, and caches a copy under its own version, which can be newer than that of the
// metadata.
func (c *contentCache) readLive(ctx context.Context, kind string, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	if err := c.live.Get(ctx, key, obj, opts...); err != nil {
		return err
	}
	content := newContentObject(kind)
	copyInto(obj, content)
	read := version{kind, key, obj.GetUID(), obj.GetResourceVersion()}
	c.byVersion.GetOrPut(read.key(), content, contentSize(content))
	return nil
}

// List reads from the API server.
func (c *contentCache) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	return c.live.List(ctx, list, opts...)
}

func newContentObject(kind string) client.Object {
	if kind == "Secret" {
		return &corev1.Secret{}
	}
	return &corev1.ConfigMap{}
}

// contentSize returns the size of an object in bytes, for the limit of the cache.
func contentSize(obj client.Object) int {
	size := cache.MinSize
	if encoded, ok := obj.(interface{ Size() int }); ok {
		size += encoded.Size()
	}
	return size
}

func copyInto(from, to client.Object) {
	switch from := from.(type) {
	case *corev1.ConfigMap:
		from.DeepCopyInto(to.(*corev1.ConfigMap))
	case *corev1.Secret:
		from.DeepCopyInto(to.(*corev1.Secret))
	}
}
