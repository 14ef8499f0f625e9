package hub

import (
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
		DefaultTransform: stripUnread,
		NewInformer:      newInformer,
		ByObject: map[client.Object]cache.ByObject{
			&coordinationv1.Lease{}:               {Field: leaseSelector},
			&configv1beta1.ClusterSummary{}:       summaries,
			&configv1beta1.ClusterConfiguration{}: {Label: shard.Selector()},
			&libv1beta1.ConfigurationGroup{}:      {Label: shard.Selector()},
			requests:                              requestOptions,
		},
	}
}

// stripUnread removes fields that no controller reads from an object before it is cached. Of an object whose metadata
// is cached, this includes the copy of its content in the annotation of kubectl apply. Other objects keep that
// annotation: an update would delete it on the API server. Of a Work it includes the statuses of its objects: agents
// write them, in any size, and would fill the memory of the hub. Package works reads them from the API server.
func stripUnread(obj any) (any, error) {
	switch object := obj.(type) {
	case *metav1.PartialObjectMetadata:
		delete(object.Annotations, corev1.LastAppliedConfigAnnotation)
	case *workv1alpha1.Work:
		object.Status.ManifestStatuses = nil
	}
	return cache.TransformStripManagedFields()(obj)
}

// maxSharedSpecs is the maximum number of profiles whose specs are shared.
const maxSharedSpecs = 4096

// sharedSpecs makes cached summaries of one profile share the memory of their specs, which are equal on most clusters.
// Cached objects are not changed, so the memory can be shared.
type sharedSpecs struct {
	shard fleet.Shard
	// byProfile has the last spec that differed, by the UID of its profile.
	byProfile *lru.Cache
}

func newSharedSpecs(shard fleet.Shard) *sharedSpecs {
	return &sharedSpecs{shard: shard, byProfile: lru.New(maxSharedSpecs)}
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

// transform is stripUnread for ClusterSummaries. It also reduces those of other shards.
func (s *sharedSpecs) transform(obj any) (any, error) {
	summary, ok := obj.(*configv1beta1.ClusterSummary)
	if !ok {
		return stripUnread(obj)
	}
	if !s.shard.HasLabel(summary) {
		reduce(summary)
	}
	if owner := metav1.GetControllerOf(summary); owner != nil {
		spec := &summary.Spec.ClusterProfileSpec
		if shared, found := s.byProfile.Get(owner.UID); found && equality.Semantic.DeepEqual(shared, spec) {
			*spec = *shared.(*configv1beta1.ProfileSpec)
		} else {
			shared := *spec
			s.byProfile.Add(owner.UID, &shared)
		}
	}
	return stripUnread(obj)
}
