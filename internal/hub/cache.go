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

// cacheOptions returns the options of the cache of the hub of a shard. They exclude objects that no controller reads.
// Of the objects that Towline creates for clusters they select those with the label of the shard. Only the hub of the
// default shard has the summaries of all shards, because it alone matches profiles; those of other shards are
// reduced.
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

// prepareForCache removes the fields of an object that no controller reads, and compacts it. Of an object whose
// metadata is cached, these fields include the copy of its content in the annotation of kubectl apply. Other objects
// keep that annotation: an update would delete it on the API server. Of a Work they include the statuses of its
// objects: agents write them, in any size, and would fill the memory of the hub. Package works reads them from the API
// server.
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

// cachedStrings has strings of all caches.
//
//nolint:gochecknoglobals // the caches of a process share it
var cachedStrings stringPool

const (
	// maxSharedSpecs and maxSharedLists are the maximum numbers of specs, and of lists of resources, that cached objects
	// share. The last ones stay in memory when their objects have changed.
	maxSharedSpecs, maxSharedLists = 4096, 2048
	// maxSharedResources is the maximum length of a list that is shared: large ones would need much memory.
	maxSharedResources = 50
)

// sharedValues makes equal values of cached objects share their memory, since cached objects are never changed. Its
// methods may be called concurrently.
type sharedValues[T any] struct {
	// cache has, for each key, the value that was stored last.
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

// resourcesKey identifies the lists of resources that a profile has deployed at a time.
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

// reduce removes the fields of the status that no controller reads from the summary of another shard. Package profiles
// reads the state of each feature; the metrics compare it with the one after a move to this shard.
func reduce(summary *configv1beta1.ClusterSummary) {
	features := make([]configv1beta1.FeatureSummary, 0, len(summary.Status.FeatureSummaries))
	for _, feature := range summary.Status.FeatureSummaries {
		features = append(features, configv1beta1.FeatureSummary{
			FeatureID: feature.FeatureID, Status: feature.Status, Hash: feature.Hash, ConsecutiveFailures: feature.ConsecutiveFailures,
		})
	}
	summary.Status = configv1beta1.ClusterSummaryStatus{FeatureSummaries: features}
}

// transform prepares a ClusterSummary for the cache, and makes it share the spec of its profile. It also reduces those
// of other shards.
func (s *sharedSpecs) transform(obj any) (any, error) {
	summary, ok := obj.(*configv1beta1.ClusterSummary)
	if !ok {
		return prepareForCache(obj)
	}
	if !s.shard.HasLabel(summary) {
		reduce(summary)
	}
	if _, err := prepareForCache(summary); err != nil {
		return nil, err
	}
	if owner := metav1.GetControllerOf(summary); owner != nil {
		s.specs.share(owner.UID, &summary.Spec.ClusterProfileSpec)
	}
	return summary, nil
}
