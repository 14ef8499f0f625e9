package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupName is the API group of every kind in this package.
const GroupName = "lib.projectsveltos.io"

// Kinds of this package, as written in manifests.
const (
	SveltosClusterKind      = "SveltosCluster"
	ConfigurationGroupKind  = "ConfigurationGroup"
	ConfigurationBundleKind = "ConfigurationBundle"
	RoleRequestKind         = "RoleRequest"
)

// GroupVersion is the group and version every kind in this package is served under.
var GroupVersion = schema.GroupVersion{Group: GroupName, Version: "v1beta1"}

// AddToScheme registers the kinds of this package with s. It returns an error only if s holds a different type for one
// of them.
func AddToScheme(s *runtime.Scheme) error {
	builder := runtime.NewSchemeBuilder(func(s *runtime.Scheme) error {
		s.AddKnownTypes(GroupVersion,
			&SveltosCluster{}, &SveltosClusterList{},
			&ConfigurationGroup{}, &ConfigurationGroupList{},
			&ConfigurationBundle{}, &ConfigurationBundleList{},
			&RoleRequest{}, &RoleRequestList{},
		)
		metav1.AddToGroupVersion(s, GroupVersion)
		return nil
	})
	return builder.AddToScheme(s)
}
