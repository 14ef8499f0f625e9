package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// DeployedResource is one object that a profile has on a cluster.
type DeployedResource struct {
	// Name of the object.
	// +kubebuilder:validation:MinLength=1
	Name string `json:"name"`

	// Namespace of the object; empty if it has none.
	// +optional
	Namespace string `json:"namespace,omitempty"`

	// Group of its kind; empty for the core group.
	Group string `json:"group"`

	// Kind of the object.
	// +kubebuilder:validation:MinLength=1
	Kind string `json:"kind"`

	// Version of its kind.
	// +kubebuilder:validation:MinLength=1
	Version string `json:"version"`

	// LastAppliedTime is when the object was last applied.
	// +optional
	LastAppliedTime *metav1.Time `json:"lastAppliedTime,omitempty"`

	// DeploymentType is the cluster that has the object. Default Remote.
	// +kubebuilder:default:=Remote
	// +optional
	DeploymentType libv1beta1.DeploymentType `json:"deploymentType,omitempty"`
}

// DeployedChart is one release that a profile has on a cluster.
type DeployedChart struct {
	// RepoURL is the repository of the chart.
	// +kubebuilder:validation:MinLength=1
	RepoURL string `json:"repoURL"`

	// ReleaseName of the release.
	// +kubebuilder:validation:MinLength=1
	ReleaseName string `json:"releaseName"`

	// Namespace of the release.
	// +optional
	Namespace string `json:"namespace,omitempty"`

	// ChartVersion of the chart.
	ChartVersion string `json:"chartVersion"`

	// AppVersion of the chart.
	// +optional
	AppVersion string `json:"appVersion,omitempty"`

	// Icon is the URL of the chart's icon.
	// +optional
	Icon string `json:"icon,omitempty"`

	// LastAppliedTime is when the release was last deployed.
	// +optional
	LastAppliedTime *metav1.Time `json:"lastAppliedTime,omitempty"`
}

// DeployedFeature lists the objects or charts that one feature of a profile has deployed to a cluster.
type DeployedFeature struct {
	// FeatureID is the feature.
	FeatureID libv1beta1.FeatureID `json:"featureID"`

	// Resources are its objects.
	// +optional
	Resources []DeployedResource `json:"resources,omitempty"`

	// Charts are its releases.
	// +optional
	Charts []DeployedChart `json:"charts,omitempty"`

	// Hash is the hash of the feature in the status of the ClusterSummary when the resources of type Remote and the charts
	// were recorded.
	// +optional
	Hash []byte `json:"hash,omitempty"`
}

// ClusterProfileResource lists the deployed features of a ClusterProfile on a cluster.
type ClusterProfileResource struct {
	// ClusterProfileName is the name of the ClusterProfile.
	ClusterProfileName string `json:"clusterProfileName"`

	// Features in use. The key begins with a capital letter.
	// +optional
	Features []DeployedFeature `json:"Features,omitempty"`
}

// ProfileResource lists the deployed features of a Profile on a cluster.
type ProfileResource struct {
	// ProfileName is the name of the Profile.
	ProfileName string `json:"profileName"`

	// Features in use. The key begins with a capital letter.
	// +optional
	Features []DeployedFeature `json:"Features,omitempty"`
}

// ClusterConfigurationStatus lists the objects and charts that profiles have deployed to a cluster.
type ClusterConfigurationStatus struct {
	// ClusterProfileResources has one entry per ClusterProfile.
	// +optional
	ClusterProfileResources []ClusterProfileResource `json:"clusterProfileResources,omitempty"`

	// ProfileResources has one entry per Profile.
	// +optional
	ProfileResources []ProfileResource `json:"profileResources,omitempty"`
}

// ClusterConfiguration is the inventory of one cluster: everything that profiles have on it. It lives in the cluster's
// namespace and is named <cluster type in lower case>--<cluster>.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=clusterconfigurations,scope=Namespaced
// +kubebuilder:storageversion
// +kubebuilder:subresource:status
type ClusterConfiguration struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// Status is the inventory.
	Status ClusterConfigurationStatus `json:"status,omitzero"`
}

// ClusterConfigurationList is a list of cluster configurations.
//
// +kubebuilder:object:root=true
type ClusterConfigurationList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitzero"`

	// Items are the cluster configurations.
	Items []ClusterConfiguration `json:"items"`
}
