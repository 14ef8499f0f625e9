package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupName is the API group of every kind in this package.
const GroupName = "config.projectsveltos.io"

// Kinds of this package, as written in manifests.
const (
	ClusterProfileKind       = "ClusterProfile"
	ProfileKind              = "Profile"
	ClusterSummaryKind       = "ClusterSummary"
	ClusterConfigurationKind = "ClusterConfiguration"
)

// Finalizers that keep an object until its deployed objects are withdrawn.
const (
	ClusterProfileFinalizer = "clusterprofilefinalizer.projectsveltos.io"
	ProfileFinalizer        = "profilefinalizer.projectsveltos.io"
	ClusterSummaryFinalizer = "clustersummaryfinalizer.projectsveltos.io"
)

// Labels on a ClusterSummary that name the profile it was made for; exactly one of the two is set.
const (
	ClusterProfileNameLabel = "projectsveltos.io/cluster-profile-name"
	ProfileNameLabel        = "projectsveltos.io/profile-name"
)

// GroupVersion is the group and version every kind in this package is served under.
var GroupVersion = schema.GroupVersion{Group: GroupName, Version: "v1beta1"}

// AddToScheme registers the kinds of this package with s. It returns an error only if s holds a different type for one
// of them.
func AddToScheme(s *runtime.Scheme) error {
	builder := runtime.NewSchemeBuilder(func(s *runtime.Scheme) error {
		s.AddKnownTypes(GroupVersion,
			&ClusterProfile{}, &ClusterProfileList{},
			&Profile{}, &ProfileList{},
			&ClusterSummary{}, &ClusterSummaryList{},
			&ClusterConfiguration{}, &ClusterConfigurationList{},
		)
		metav1.AddToGroupVersion(s, GroupVersion)
		return nil
	})
	return builder.AddToScheme(s)
}
