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

// contentCache reads ConfigMaps and Secrets. The hub's cache has only the metadata of all of them. The content of each
// version is read from the API server once, and then cached here for all members.
type contentCache struct {
	metadata  client.Reader
	live      client.Reader
	byVersion *cache.Cache[client.Object]
	// requests shares one running request among the readers of a version that is not cached.
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
		// The metadata cache can be stale: an object that it lacks can exist. Without a version, or with options, the request
		// is not shared.
		return c.readLive(ctx, kind, key, obj, opts...)
	}
	content, err := c.getVersion(ctx, version{kind, key, cachedMetadata.UID, cachedMetadata.ResourceVersion})
	if err != nil {
		return err
	}
	copyInto(content, obj)
	return nil
}

// getVersion returns the cached object of the wanted version. If there is none, it reads the object from the API
// server, which may have a newer version but no older one. Concurrent callers that want the same version share one
// request.
func (c *contentCache) getVersion(ctx context.Context, wanted version) (client.Object, error) {
	if hit, ok := c.byVersion.Get(wanted.key()); ok {
		return hit, nil
	}
	// If the context of the first caller ends, the request continues, since others wait for it. The client has a timeout.
	requestCtx := context.WithoutCancel(ctx)
	answer := c.requests.DoChan(wanted.key(), func() (any, error) {
		if hit, ok := c.byVersion.Get(wanted.key()); ok {
			return hit, nil // an earlier request has stored it meanwhile
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

// readLive reads obj from the API server, and caches a copy under the version that it has there.
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
