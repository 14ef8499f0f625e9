package v1beta1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// ClusterSummarySpec is the desired state of one cluster for one profile.
type ClusterSummarySpec struct {
	// ClusterNamespace is the namespace of the cluster.
	ClusterNamespace string `json:"clusterNamespace"`

	// ClusterName is the name of the cluster.
	ClusterName string `json:"clusterName"`

	// ClusterType is the kind of the cluster.
	ClusterType libv1beta1.ClusterType `json:"clusterType"`

	// ClusterProfileSpec is a copy of the profile's spec.
	// +optional
	ClusterProfileSpec ProfileSpec `json:"clusterProfileSpec,omitzero"`
}

// FeatureSummary is the state of one feature on the cluster.
type FeatureSummary struct {
	// FeatureID is the feature.
	FeatureID libv1beta1.FeatureID `json:"featureID"`

	// Hash of the last deployed content and options.
	// +optional
	Hash []byte `json:"hash,omitempty"`

	// ConsecutiveFailures counts failures in a row. A retry that fails in the same way does not count.
	// +optional
	ConsecutiveFailures int64 `json:"consecutiveFailures,omitempty"`

	// Status of the feature.
	// +optional
	Status libv1beta1.FeatureStatus `json:"status,omitempty"`

	// FailureReason is one CamelCase word for the kind of failure.
	// +optional
	FailureReason string `json:"failureReason,omitempty"`

	// FailureMessage is the reason of the failure and its place; absent after a success.
	// +optional
	FailureMessage string `json:"failureMessage,omitempty"`

	// DeployedGroupVersionKind is superseded by deployedGVKs of the ClusterSummary.
	// +optional
	DeployedGroupVersionKind []string `json:"deployedGroupVersionKind,omitempty"`

	// LastAppliedTime is when the feature was last deployed.
	// +optional
	LastAppliedTime *metav1.Time `json:"lastAppliedTime,omitempty"`

	// ResourceSummaryDeployed is true while drift is detected. Default false.
	// +optional
	ResourceSummaryDeployed bool `json:"resourceSummaryDeployed,omitempty"`
}

// HelmChartStatus is the ownership of a release.
//
// +kubebuilder:validation:Enum:=Managing;Conflict
type HelmChartStatus string

// The states of a release.
const (
	// HelmChartStatusManaging: this ClusterSummary's.
	HelmChartStatusManaging HelmChartStatus = "Managing"
	// HelmChartStatusConflict: another one's.
	HelmChartStatusConflict HelmChartStatus = "Conflict"
)

// HelmChartSummary is the state of one release on the cluster.
type HelmChartSummary struct {
	// ReleaseName of the release.
	// +kubebuilder:validation:MinLength=1
	ReleaseName string `json:"releaseName"`

	// ReleaseNamespace of the release.
	// +kubebuilder:validation:MinLength=1
	ReleaseNamespace string `json:"releaseNamespace"`

	// Status is the ownership of the release.
	// +optional
	Status HelmChartStatus `json:"status,omitempty"`

	// ValuesHash of the merged values last deployed.
	// +optional
	ValuesHash []byte `json:"valuesHash,omitempty"`

	// PatchesHash of the patches last applied.
	// +optional
	PatchesHash []byte `json:"patchesHash,omitempty"`

	// ConflictMessage names the owner of the release if it is another ClusterSummary. Of a release to uninstall it
	// reports, without a status, that nothing of it is this ClusterSummary's, or is no longer.
	// +optional
	ConflictMessage string `json:"conflictMessage,omitempty"`

	// FailureMessage is the reason why the release is not deployed; absent after a success.
	// +optional
	FailureMessage string `json:"failureMessage,omitempty"`

	// ChartName of the chart last deployed.
	// +optional
	ChartName string `json:"chartName,omitempty"`

	// RepositoryName of that chart.
	// +optional
	RepositoryName string `json:"repositoryName,omitempty"`

	// RepoURL of that chart.
	// +optional
	RepoURL string `json:"repoURL,omitempty"`

	// ChartVersion of that chart.
	// +optional
	ChartVersion string `json:"chartVersion,omitempty"`

	// CredentialsSecretRef is the login its repository was read with.
	// +optional
	CredentialsSecretRef *corev1.SecretReference `json:"credentialsSecretRef,omitempty"`

	// LatestVersion of the chart in the repository.
	// +optional
	LatestVersion string `json:"latestVersion,omitempty"`

	// LatestPatchVersion of the chart's minor version in the repository.
	// +optional
	LatestPatchVersion string `json:"latestPatchVersion,omitempty"`

	// LastCheckedTime is when the repository was last asked for those.
	// +optional
	LastCheckedTime *metav1.Time `json:"lastCheckedTime,omitempty"`

	// NeedsRedeploy is true if the release must be deployed again although nothing changed. Default false.
	// +optional
	NeedsRedeploy bool `json:"needsRedeploy,omitempty"`
}

// ClusterSummaryStatus is the state of one profile on one cluster.
type ClusterSummaryStatus struct {
	// Dependencies names the profiles that are waited for, or is "no dependencies".
	// +optional
	Dependencies *string `json:"dependencies,omitempty"`

	// FeatureSummaries has one entry per feature in use.
	// +listType=map
	// +listMapKey=featureID
	// +optional
	FeatureSummaries []FeatureSummary `json:"featureSummaries,omitempty"`

	// DeployedGVKs lists the kinds of objects the profile has on the cluster.
	// +listType=map
	// +listMapKey=featureID
	// +optional
	DeployedGVKs []libv1beta1.FeatureDeploymentInfo `json:"deployedGVKs,omitempty"`

	// HelmReleaseSummaries has one entry per release.
	// +listType=map
	// +listMapKey=releaseName
	// +listMapKey=releaseNamespace
	// +optional
	HelmReleaseSummaries []HelmChartSummary `json:"helmReleaseSummaries,omitempty"`

	// NextReconcileTime is the earliest time of the next attempt. Default: any time.
	// +optional
	NextReconcileTime *metav1.Time `json:"nextReconcileTime,omitempty"`

	// FailureMessage is the reason why no feature of the profile is deployed; absent otherwise.
	// +optional
	FailureMessage string `json:"failureMessage,omitempty"`

	// ReconciliationSuspended is true while changes are not deployed. Default false.
	// +optional
	ReconciliationSuspended bool `json:"reconciliationSuspended,omitempty"`

	// SuspensionReason is the reason for that.
	// +optional
	SuspensionReason string `json:"suspensionReason,omitempty"`
}

// ClusterSummary is one profile on one cluster. It lives in the cluster's namespace.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=clustersummaries,scope=Namespaced
// +kubebuilder:storageversion
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=`.metadata.creationTimestamp`,description="Time since the cluster began to match"
// +kubebuilder:printcolumn:name="HelmCharts",type="string",JSONPath=`.status.featureSummaries[?(@.featureID=="Helm")].status`,description="How far the charts have come",priority=2
// +kubebuilder:printcolumn:name="KustomizeRefs",type="string",JSONPath=`.status.featureSummaries[?(@.featureID=="Kustomize")].status`,description="How far the kustomizations have come",priority=2
// +kubebuilder:printcolumn:name="PolicyRefs",type="string",JSONPath=`.status.featureSummaries[?(@.featureID=="Resources")].status`,description="How far the plain objects have come",priority=2
type ClusterSummary struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// Spec is the desired state of the cluster for the profile.
	Spec ClusterSummarySpec `json:"spec,omitzero"`
	// Status is the state of the profile on the cluster.
	Status ClusterSummaryStatus `json:"status,omitzero"`
}

// ClusterSummaryList is a list of cluster summaries.
//
// +kubebuilder:object:root=true
type ClusterSummaryList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitzero"`

	// Items are the cluster summaries.
	Items []ClusterSummary `json:"items"`
}
