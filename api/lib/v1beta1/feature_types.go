package v1beta1

// FeatureID names one of the three kinds of content a profile can carry.
//
// +kubebuilder:validation:Enum:=Resources;Helm;Kustomize
type FeatureID string

// The features, in the order they are deployed.
const (
	// FeatureResources is plain YAML and templates, from policyRefs.
	FeatureResources FeatureID = "Resources"
	// FeatureHelm is charts, from helmCharts.
	FeatureHelm FeatureID = "Helm"
	// FeatureKustomize is kustomizations, from kustomizationRefs.
	FeatureKustomize FeatureID = "Kustomize"
)

// FeatureStatus is the state of a feature on one cluster. Empty means that nothing was tried yet.
//
// +kubebuilder:validation:Enum:=Provisioning;Provisioned;Failed;FailedNonRetriable;Removing;Removed;AgentRemoving
type FeatureStatus string

// The states of a feature.
const (
	// FeatureStatusProvisioning: on its way, or waiting for something.
	FeatureStatusProvisioning FeatureStatus = "Provisioning"
	// FeatureStatusProvisioned: the feature is deployed.
	FeatureStatusProvisioned FeatureStatus = "Provisioned"
	// FeatureStatusFailed: the last attempt failed and will be repeated.
	FeatureStatusFailed FeatureStatus = "Failed"
	// FeatureStatusFailedNonRetriable: only a change by the user can help.
	FeatureStatusFailedNonRetriable FeatureStatus = "FailedNonRetriable"
	// FeatureStatusRemoving: being withdrawn.
	FeatureStatusRemoving FeatureStatus = "Removing"
	// FeatureStatusRemoved: nothing is left on the cluster.
	FeatureStatusRemoved FeatureStatus = "Removed"
	// FeatureStatusAgentRemoving: the agent of a pull-mode cluster has not finished the withdrawal.
	FeatureStatusAgentRemoving FeatureStatus = "AgentRemoving"
)

// FeatureDeploymentInfo lists which kinds of objects a feature has put on a cluster.
type FeatureDeploymentInfo struct {
	// FeatureID is the feature.
	FeatureID FeatureID `json:"featureID"`

	// DeployedGroupVersionKind lists kinds as Kind.version.group, for instance "Deployment.v1.apps"; the core group is
	// empty, as in "ConfigMap.v1.".
	// +optional
	DeployedGroupVersionKind []string `json:"deployedGroupVersionKind,omitempty"`
}

// ClusterType is the kind of a cluster object.
//
// +kubebuilder:validation:Enum:=Capi;Sveltos;Karmada
type ClusterType string

// The cluster types.
const (
	// ClusterTypeCapi is a Cluster of Cluster API.
	ClusterTypeCapi ClusterType = "Capi"
	// ClusterTypeSveltos is a SveltosCluster.
	ClusterTypeSveltos ClusterType = "Sveltos"
	// ClusterTypeKarmada is a Cluster of cluster.karmada.io. Towline's own value.
	ClusterTypeKarmada ClusterType = "Karmada"
)
