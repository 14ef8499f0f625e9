package hub

import (
	"context"
	"fmt"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/lru"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/hub/approvals"
)

// maxContents is the maximum number of cached ConfigMaps and Secrets: the ones that profiles refer to, of which few are
// in use at a time.
const maxContents = 128

// cacheOptions returns the options of the hub's cache, which excludes objects that no controller reads.
func cacheOptions() cache.Options {
	// Nodes and control planes often renew Leases in these namespaces.
	others := fields.AndSelectors(
		fields.OneTermNotEqualSelector("metadata.namespace", "kube-node-lease"),
		fields.OneTermNotEqualSelector("metadata.namespace", "kube-system"),
	)
	requests, requestOptions := approvals.CacheOptions()
	return cache.Options{
		DefaultTransform: cache.TransformStripManagedFields(),
		NewInformer:      newInformer,
		ByObject:         map[client.Object]cache.ByObject{&coordinationv1.Lease{}: {Field: others}, requests: requestOptions},
	}
}

// contents reads ConfigMaps and Secrets. It has the metadata of all of them in a cache. It reads the content of a
// version from the API server once, and caches it for all members.
type contents struct {
	metadata client.Reader
	live     client.Reader
	recent   *lru.Cache
}

// version identifies one version of one object.
type version struct {
	kind            string
	name            types.NamespacedName
	uid             types.UID
	resourceVersion string
}

func newContents(metadata, live client.Reader) *contents {
	return &contents{metadata: metadata, live: live, recent: lru.New(maxContents)}
}

// Get reads obj, which must be a ConfigMap or a Secret.
func (c *contents) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	var kind string
	switch obj.(type) {
	case *corev1.ConfigMap:
		kind = "ConfigMap"
	case *corev1.Secret:
		kind = "Secret"
	default:
		return fmt.Errorf("read %T %s: only ConfigMaps and Secrets are supported", obj, key)
	}
	known := &metav1.PartialObjectMetadata{}
	known.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind(kind))
	if err := c.metadata.Get(ctx, key, known); err == nil {
		if hit, ok := c.recent.Get(version{kind, key, known.UID, known.ResourceVersion}); ok {
			copyInto(hit, obj)
			return nil
		}
	}
	// The cache may be stale: a missing object may exist.
	if err := c.live.Get(ctx, key, obj, opts...); err != nil {
		return err
	}
	c.recent.Add(version{kind, key, obj.GetUID(), obj.GetResourceVersion()}, obj.DeepCopyObject())
	return nil
}

// List reads from the API server.
func (c *contents) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	return c.live.List(ctx, list, opts...)
}

func copyInto(from any, to client.Object) {
	switch from := from.(type) {
	case *corev1.ConfigMap:
		from.DeepCopyInto(to.(*corev1.ConfigMap))
	case *corev1.Secret:
		from.DeepCopyInto(to.(*corev1.Secret))
	}
}
