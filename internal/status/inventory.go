package status

import (
	"cmp"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
)

// Deployed returns an entry for a ClusterConfiguration: the objects and the Helm releases of an applied bundle.
func Deployed(b bundle.Bundle, at *metav1.Time) configv1beta1.DeployedFeature {
	feature := configv1beta1.DeployedFeature{FeatureID: libv1beta1.FeatureID(b.ID.Feature)}
	for _, item := range b.Items {
		if item.Release != nil {
			feature.Charts = addChart(feature.Charts, *item.Release, at)
			continue
		}
		for _, obj := range item.Objects {
			gvk := obj.GroupVersionKind()
			feature.Resources = append(feature.Resources, configv1beta1.DeployedResource{
				Name: obj.GetName(), Namespace: obj.GetNamespace(), Group: gvk.Group, Kind: gvk.Kind, Version: gvk.Version,
				LastAppliedTime: at, DeploymentType: libv1beta1.DeploymentTypeRemote,
			})
		}
	}
	return feature
}

// addChart adds a release, unless charts has it already.
func addChart(charts []configv1beta1.DeployedChart, r bundle.Release, at *metav1.Time) []configv1beta1.DeployedChart {
	if slices.ContainsFunc(charts, func(c configv1beta1.DeployedChart) bool { return c.ReleaseName == r.Name && c.Namespace == r.Namespace }) {
		return charts
	}
	return append(charts, configv1beta1.DeployedChart{
		RepoURL: r.RepoURL, ReleaseName: r.Name, Namespace: r.Namespace, ChartVersion: r.ChartVersion,
		AppVersion: r.AppVersion, Icon: r.Icon, LastAppliedTime: at,
	})
}

const (
	// maxInventory limits the size in bytes of all resources that a ClusterConfiguration lists. The API server limits an
	// object, with its metadata, to 1.5 MiB.
	maxInventory = 1 << 20
	// entryOverhead is the size of one entry without the values of its fields.
	entryOverhead = 170
)

func sizeOf(r configv1beta1.DeployedResource) int {
	return entryOverhead + len(r.Name) + len(r.Namespace) + len(r.Group) + len(r.Kind) + len(r.Version)
}

// truncateResources removes resources from the end of feature until they fit into maxInventory together with others.
func truncateResources(feature configv1beta1.DeployedFeature, others configv1beta1.ClusterConfigurationStatus) configv1beta1.DeployedFeature {
	left := maxInventory
	for _, profile := range others.ClusterProfileResources {
		left -= sizeOfFeatures(profile.Features)
	}
	for _, profile := range others.ProfileResources {
		left -= sizeOfFeatures(profile.Features)
	}
	for i, resource := range feature.Resources {
		if left -= sizeOf(resource); left < 0 {
			feature.Resources = feature.Resources[:i:i]
			break
		}
	}
	return feature
}

func sizeOfFeatures(features []configv1beta1.DeployedFeature) int {
	size := 0
	for _, feature := range features {
		for _, resource := range feature.Resources {
			size += sizeOf(resource)
		}
	}
	return size
}

// Inventory returns a copy of old in which feature replaces the profile's former entry for the same feature. A feature
// without resources and charts is removed, and so is a profile without features. Resources beyond maxInventory are not
// listed.
func Inventory(old configv1beta1.ClusterConfigurationStatus, kind, profile string, feature configv1beta1.DeployedFeature) configv1beta1.ClusterConfigurationStatus {
	without := set(old, kind, profile, configv1beta1.DeployedFeature{FeatureID: feature.FeatureID})
	if len(feature.Resources) == 0 && len(feature.Charts) == 0 {
		return without
	}
	return set(without, kind, profile, truncateResources(feature, without))
}

func set(old configv1beta1.ClusterConfigurationStatus, kind, profile string, feature configv1beta1.DeployedFeature) configv1beta1.ClusterConfigurationStatus {
	now := *old.DeepCopy()
	if kind == configv1beta1.ProfileKind {
		now.ProfileResources = replace(now.ProfileResources, feature, access[configv1beta1.ProfileResource]{
			make: func() configv1beta1.ProfileResource { return configv1beta1.ProfileResource{ProfileName: profile} },
			read: func(r *configv1beta1.ProfileResource) (string, *[]configv1beta1.DeployedFeature) {
				return r.ProfileName, &r.Features
			},
		})
		return now
	}
	now.ClusterProfileResources = replace(now.ClusterProfileResources, feature, access[configv1beta1.ClusterProfileResource]{
		make: func() configv1beta1.ClusterProfileResource {
			return configv1beta1.ClusterProfileResource{ClusterProfileName: profile}
		},
		read: func(r *configv1beta1.ClusterProfileResource) (string, *[]configv1beta1.DeployedFeature) {
			return r.ClusterProfileName, &r.Features
		},
	})
	return now
}

// Empty returns whether an inventory has no entries.
func Empty(s configv1beta1.ClusterConfigurationStatus) bool {
	return len(s.ClusterProfileResources) == 0 && len(s.ProfileResources) == 0
}

// access has functions for the entries of one profile kind. The two kinds differ in the name of one field.
type access[T any] struct {
	make func() T
	read func(*T) (name string, features *[]configv1beta1.DeployedFeature)
}

func replace[T any](entries []T, feature configv1beta1.DeployedFeature, a access[T]) []T {
	fresh := a.make()
	name, _ := a.read(&fresh)
	at := slices.IndexFunc(entries, func(e T) bool { n, _ := a.read(&e); return n == name })
	if at < 0 {
		entries = append(entries, fresh)
		at = len(entries) - 1
	}
	_, features := a.read(&entries[at])
	*features = slices.DeleteFunc(*features, func(f configv1beta1.DeployedFeature) bool { return f.FeatureID == feature.FeatureID })
	if len(feature.Resources) > 0 || len(feature.Charts) > 0 {
		*features = append(*features, feature)
		slices.SortFunc(*features, func(x, y configv1beta1.DeployedFeature) int { return cmp.Compare(rank(x.FeatureID), rank(y.FeatureID)) })
	}
	if len(*features) == 0 {
		entries = slices.Delete(entries, at, at+1)
	}
	slices.SortFunc(entries, func(x, y T) int {
		xName, _ := a.read(&x)
		yName, _ := a.read(&y)
		return cmp.Compare(xName, yName)
	})
	return entries
}
