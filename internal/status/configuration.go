package status

import (
	"cmp"
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
)

// DeployedFeatureOf returns the entry of an applied bundle in a ClusterConfiguration: its objects and Helm releases.
// deploymentType is Local for a bundle on the hub. Only an entry of the type Remote has the hash, since only that hash
// is read.
func DeployedFeatureOf(b bundle.Bundle, featureSummary configv1beta1.FeatureSummary, deploymentType libv1beta1.DeploymentType) configv1beta1.DeployedFeature {
	feature, lastApplied := configv1beta1.DeployedFeature{FeatureID: libv1beta1.FeatureID(b.ID.Feature)}, featureSummary.LastAppliedTime
	if deploymentType != libv1beta1.DeploymentTypeLocal {
		feature.Hash = featureSummary.Hash
	}
	for _, item := range b.Items {
		if item.Release != nil {
			feature.Charts = addChart(feature.Charts, *item.Release, lastApplied)
			continue
		}
		for _, obj := range item.Objects {
			gvk := obj.GroupVersionKind()
			feature.Resources = append(feature.Resources, configv1beta1.DeployedResource{
				Name: obj.GetName(), Namespace: obj.GetNamespace(), Group: gvk.Group, Kind: gvk.Kind, Version: gvk.Version,
				LastAppliedTime: lastApplied, DeploymentType: deploymentType,
			})
		}
	}
	return feature
}

// addChart adds a release unless charts contains it.
func addChart(charts []configv1beta1.DeployedChart, r bundle.Release, lastApplied *metav1.Time) []configv1beta1.DeployedChart {
	if slices.ContainsFunc(charts, func(c configv1beta1.DeployedChart) bool { return c.ReleaseName == r.Name && c.Namespace == r.Namespace }) {
		return charts
	}
	return append(charts, configv1beta1.DeployedChart{
		RepoURL: r.RepoURL, ReleaseName: r.Name, Namespace: r.Namespace, ChartVersion: r.ChartVersion,
		AppVersion: r.AppVersion, Icon: r.Icon, LastAppliedTime: lastApplied,
	})
}

const (
	// maxResourcesSize limits all resources in a ClusterConfiguration, in bytes. The API server limits an object, with its
	// metadata, to 1.5 MiB.
	maxResourcesSize = 1 << 20
	// resourceOverhead is the size in bytes of a resource without the values of its fields.
	resourceOverhead = 170
)

// sizeOf returns the approximate size of a resource in bytes.
func sizeOf(r configv1beta1.DeployedResource) int {
	return resourceOverhead + len(r.Name) + len(r.Namespace) + len(r.Group) + len(r.Kind) + len(r.Version)
}

// truncateResources removes resources from the end of feature until it has at most limit bytes.
func truncateResources(feature configv1beta1.DeployedFeature, limit int) configv1beta1.DeployedFeature {
	for i, resource := range feature.Resources {
		if limit -= sizeOf(resource); limit < 0 {
			feature.Resources = feature.Resources[:i:i]
			break
		}
	}
	return feature
}

func sizeOfStatus(s configv1beta1.ClusterConfigurationStatus) int {
	size := 0
	for _, profile := range s.ClusterProfileResources {
		size += sizeOfFeatures(profile.Features...)
	}
	for _, profile := range s.ProfileResources {
		size += sizeOfFeatures(profile.Features...)
	}
	return size
}

func sizeOfFeatures(features ...configv1beta1.DeployedFeature) int {
	size := 0
	for _, feature := range features {
		for _, resource := range feature.Resources {
			size += sizeOf(resource)
		}
	}
	return size
}

// FindDeployedFeature returns the entry of a profile for a feature; ok is false if there is none. kind is ProfileKind
// or ClusterProfileKind. The result shares memory with s.
func FindDeployedFeature(s configv1beta1.ClusterConfigurationStatus, kind, profile string, id libv1beta1.FeatureID) (feature configv1beta1.DeployedFeature, ok bool) {
	var features []configv1beta1.DeployedFeature
	if kind == configv1beta1.ProfileKind {
		if i := slices.IndexFunc(s.ProfileResources, func(r configv1beta1.ProfileResource) bool { return r.ProfileName == profile }); i >= 0 {
			features = s.ProfileResources[i].Features
		}
	} else if i := slices.IndexFunc(s.ClusterProfileResources, func(r configv1beta1.ClusterProfileResource) bool { return r.ClusterProfileName == profile }); i >= 0 {
		features = s.ClusterProfileResources[i].Features
	}
	i := slices.IndexFunc(features, func(f configv1beta1.DeployedFeature) bool { return f.FeatureID == id })
	if i < 0 {
		return configv1beta1.DeployedFeature{}, false
	}
	return features[i], true
}

// SetDeployedFeature returns old with feature as the entry of a profile. kind is ProfileKind or ClusterProfileKind.
// feature has the resources of one deployment type. The resources of the other type stay; for the type Local the charts
// stay, too. An entry without resources and charts is removed, and so is a profile without entries. Resources beyond
// maxResourcesSize are omitted. The result shares memory with old, which is not changed: if each change copied all
// entries, the changes of many profiles would take quadratic time.
func SetDeployedFeature(
	old configv1beta1.ClusterConfigurationStatus, kind, profile string, feature configv1beta1.DeployedFeature, deploymentType libv1beta1.DeploymentType,
) configv1beta1.ClusterConfigurationStatus {
	existing, exists := FindDeployedFeature(old, kind, profile, feature.FeatureID)
	if exists {
		feature = withOtherDeploymentType(feature, existing, deploymentType)
	}
	feature = truncateResources(feature, maxResourcesSize-sizeOfStatus(old)+sizeOfFeatures(existing))
	isEmpty := len(feature.Resources) == 0 && len(feature.Charts) == 0
	if !exists && isEmpty || equality.Semantic.DeepEqual(existing, feature) {
		return old
	}
	return replaceFeature(old, kind, profile, feature)
}

// withOtherDeploymentType returns feature with the resources of the other deployment type in existing, and with the
// charts and the hash of existing if feature is of the type Local. Resources of the type Remote are first.
func withOtherDeploymentType(feature, existing configv1beta1.DeployedFeature, deploymentType libv1beta1.DeploymentType) configv1beta1.DeployedFeature {
	others := ResourcesOf(existing, libv1beta1.DeploymentTypeLocal)
	if deploymentType != libv1beta1.DeploymentTypeLocal {
		feature.Resources = append(slices.Clip(feature.Resources), others...)
		return feature
	}
	feature.Resources = append(ResourcesOf(existing, libv1beta1.DeploymentTypeRemote), feature.Resources...)
	feature.Charts, feature.Hash = existing.Charts, existing.Hash
	return feature
}

// ResourcesOf returns the resources of a feature on the cluster of the given type.
func ResourcesOf(feature configv1beta1.DeployedFeature, deploymentType libv1beta1.DeploymentType) []configv1beta1.DeployedResource {
	isLocal := deploymentType == libv1beta1.DeploymentTypeLocal
	var all []configv1beta1.DeployedResource
	for _, resource := range feature.Resources {
		if (resource.DeploymentType == libv1beta1.DeploymentTypeLocal) == isLocal {
			all = append(all, resource)
		}
	}
	return all
}

// replaceFeature returns old with feature as the entry of the profile. An empty feature removes the entry. The result
// shares the other entries with old.
func replaceFeature(old configv1beta1.ClusterConfigurationStatus, kind, profile string, feature configv1beta1.DeployedFeature) configv1beta1.ClusterConfigurationStatus {
	updated := old
	if kind == configv1beta1.ProfileKind {
		updated.ProfileResources = replaceEntry(updated.ProfileResources, feature, entryAccess[configv1beta1.ProfileResource]{
			newEntry: func() configv1beta1.ProfileResource { return configv1beta1.ProfileResource{ProfileName: profile} },
			fields: func(r *configv1beta1.ProfileResource) (string, *[]configv1beta1.DeployedFeature) {
				return r.ProfileName, &r.Features
			},
		})
		return updated
	}
	updated.ClusterProfileResources = replaceEntry(updated.ClusterProfileResources, feature, entryAccess[configv1beta1.ClusterProfileResource]{
		newEntry: func() configv1beta1.ClusterProfileResource {
			return configv1beta1.ClusterProfileResource{ClusterProfileName: profile}
		},
		fields: func(r *configv1beta1.ClusterProfileResource) (string, *[]configv1beta1.DeployedFeature) {
			return r.ClusterProfileName, &r.Features
		},
	})
	return updated
}

// IsEmpty returns whether the status of a ClusterConfiguration has no entries.
func IsEmpty(s configv1beta1.ClusterConfigurationStatus) bool {
	return len(s.ClusterProfileResources) == 0 && len(s.ProfileResources) == 0
}

// entryAccess has functions for the entries of one profile kind. The Go types of the two kinds have different field
// names.
type entryAccess[T any] struct {
	newEntry func() T
	fields   func(*T) (name string, features *[]configv1beta1.DeployedFeature)
}

// replaceEntry returns a copy of entries with feature as an entry of the profile that access.newEntry names. It removes
// the entry if feature is empty.
func replaceEntry[T any](entries []T, feature configv1beta1.DeployedFeature, access entryAccess[T]) []T {
	entries = slices.Clone(entries)
	newEntry := access.newEntry()
	name, _ := access.fields(&newEntry)
	index := slices.IndexFunc(entries, func(e T) bool { n, _ := access.fields(&e); return n == name })
	if index < 0 {
		entries = append(entries, newEntry)
		index = len(entries) - 1
	}
	_, features := access.fields(&entries[index])
	*features = slices.DeleteFunc(slices.Clone(*features), func(f configv1beta1.DeployedFeature) bool { return f.FeatureID == feature.FeatureID })
	if len(feature.Resources) > 0 || len(feature.Charts) > 0 {
		*features = append(*features, feature)
		slices.SortFunc(*features, func(x, y configv1beta1.DeployedFeature) int {
			return cmp.Compare(deployOrder(x.FeatureID), deployOrder(y.FeatureID))
		})
	}
	if len(*features) == 0 {
		entries = slices.Delete(entries, index, index+1)
	}
	slices.SortFunc(entries, func(x, y T) int {
		xName, _ := access.fields(&x)
		yName, _ := access.fields(&y)
		return cmp.Compare(xName, yName)
	})
	return entries
}
