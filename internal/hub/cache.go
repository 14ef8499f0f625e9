package hub

import (
	"reflect"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/utils/lru"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/approvals"
)

// cacheOptions returns the cache options for the hub of a shard. The cache has no objects that no controller reads. Of
// the objects that Towline creates for clusters it has only the objects with the shard label. The default shard has the
// summaries of all shards, because its hub matches profiles; stripStatus strips the summaries of other shards.
func cacheOptions(shard fleet.Shard) cache.Options {
	// Leases in these namespaces change often, and belong to nodes and control planes.
	leaseSelector := fields.AndSelectors(
		fields.OneTermNotEqualSelector("metadata.namespace", "kube-node-lease"),
		fields.OneTermNotEqualSelector("metadata.namespace", "kube-system"),
	)
	requests, requestOptions := approvals.CacheOptions()
	summaries := cache.ByObject{Transform: newSharedSpecs(shard).transform}
	if !shard.IsDefault() {
		summaries.Label = shard.Selector()
	}
	return cache.Options{
		DefaultTransform: prepareForCache,
		NewInformer:      newInformer,
		ByObject: map[client.Object]cache.ByObject{
			&coordinationv1.Lease{}:               {Field: leaseSelector},
			&configv1beta1.ClusterSummary{}:       summaries,
			&configv1beta1.ClusterConfiguration{}: {Label: shard.Selector(), Transform: newSharedResources().transform},
			&libv1beta1.ConfigurationGroup{}:      {Label: shard.Selector()},
			requests:                              requestOptions,
		},
	}
}

// prepareForCache removes fields that no controller reads, and compacts the object:
//
//   - the managed fields;
//   - in metadata-only caches, the annotation of kubectl apply, which has a copy of the content. Other objects keep it,
//     since an update of the cached object would delete it on the API server;
//   - the manifest statuses of a Work. Agents write them in any size, which would fill the memory of the hub. Package
//     works reads them from the API server.
func prepareForCache(obj any) (any, error) {
	switch object := obj.(type) {
	case *metav1.PartialObjectMetadata:
		delete(object.Annotations, corev1.LastAppliedConfigAnnotation)
	case *workv1alpha1.Work:
		object.Status.ManifestStatuses = nil
	}
	if object, ok := obj.(client.Object); ok && !isCompact(object) {
		object.SetManagedFields(compactMark)
		cachedStrings.compact(reflect.ValueOf(object))
	}
	return obj, nil
}

// cachedStrings has the strings that the objects in all caches share.
//
//nolint:gochecknoglobals // the caches of a process share it
var cachedStrings stringPool

const (
	// maxSharedSpecs and maxSharedLists are the maximum numbers of specs, and of lists of resources, that cached objects
	// share. A value stays in memory until newer values displace it.
	maxSharedSpecs, maxSharedLists = 4096, 2048
	// maxSharedResources is the maximum length of a shared list, since displaced values need memory, too.
	maxSharedResources = 50
)

// sharedValues makes equal values in cached objects share their memory, which nobody changes. Its methods may be called
// concurrently.
type sharedValues[T any] struct {
	// cache has the last value of each key.
	cache *lru.Cache
}

// share replaces value by the last one of the same key if both are equal.
func (s sharedValues[T]) share(key lru.Key, value *T) {
	if shared, found := s.cache.Get(key); found && equality.Semantic.DeepEqual(shared, value) {
		*value = *shared.(*T)
		return
	}
	shared := *value
	s.cache.Add(key, &shared)
}

// sharedSpecs makes the summaries of one profile share their specs, which are equal on most clusters.
type sharedSpecs struct {
	shard fleet.Shard
	// specs has a spec by the UID of its profile.
	specs sharedValues[configv1beta1.ProfileSpec]
}

func newSharedSpecs(shard fleet.Shard) *sharedSpecs {
	return &sharedSpecs{shard: shard, specs: sharedValues[configv1beta1.ProfileSpec]{lru.New(maxSharedSpecs)}}
}

// resourcesKey identifies the lists of resources that a profile deployed in the same second.
type resourcesKey struct {
	profile string
	feature libv1beta1.FeatureID
	applied time.Time
}

// sharedResources makes ClusterConfigurations share the lists of resources of a profile, which are equal on clusters
// that applied them in the same second.
type sharedResources struct {
	resources sharedValues[[]configv1beta1.DeployedResource]
}

func newSharedResources() sharedResources {
	return sharedResources{sharedValues[[]configv1beta1.DeployedResource]{lru.New(maxSharedLists)}}
}

// transform prepares a ClusterConfiguration for the cache, and makes its lists of resources share memory.
func (s sharedResources) transform(obj any) (any, error) {
	stripped, err := prepareForCache(obj)
	configuration, ok := obj.(*configv1beta1.ClusterConfiguration)
	if !ok || err != nil {
		return stripped, err
	}
	for _, profile := range configuration.Status.ClusterProfileResources {
		s.share(profile.ClusterProfileName, profile.Features)
	}
	for _, profile := range configuration.Status.ProfileResources {
		s.share(configuration.Namespace+"/"+profile.ProfileName, profile.Features)
	}
	return configuration, nil
}

func (s sharedResources) share(profile string, features []configv1beta1.DeployedFeature) {
	for i := range features {
		feature := &features[i]
		if n := len(feature.Resources); n > 0 && n <= maxSharedResources && feature.Resources[0].LastAppliedTime != nil {
			s.resources.share(resourcesKey{profile, feature.FeatureID, feature.Resources[0].LastAppliedTime.UTC()}, &feature.Resources)
		}
	}
}

// stripStatus keeps only the state of each feature in the status of a summary of another shard. Package profiles reads
// it, and metricsRecorder compares it with the next state after the cluster has moved to this shard.
func stripStatus(summary *configv1beta1.ClusterSummary) {
	features := make([]configv1beta1.FeatureSummary, 0, len(summary.Status.FeatureSummaries))
	for _, feature := range summary.Status.FeatureSummaries {
		features = append(features, configv1beta1.FeatureSummary{
			FeatureID: feature.FeatureID, Status: feature.Status, Hash: feature.Hash, ConsecutiveFailures: feature.ConsecutiveFailures,
		})
	}
	summary.Status = configv1beta1.ClusterSummaryStatus{FeatureSummaries: features}
}

// transform prepares a ClusterSummary for the cache, and makes the summaries of a profile share their spec. It strips
// the status of summaries of other shards.
func (s *sharedSpecs) transform(obj any) (any, error) {
	summary, ok := obj.(*configv1beta1.ClusterSummary)
	if !ok {
		return prepareForCache(obj)
	}
	if !s.shard.HasLabel(summary) {
		stripStatus(summary)
	}
	if _, err := prepareForCache(summary); err != nil {
		return nil, err
	}
	if owner := metav1.GetControllerOf(summary); owner != nil {
		s.specs.share(owner.UID, &summary.Spec.ClusterProfileSpec)
	}
	return summary, nil
}
