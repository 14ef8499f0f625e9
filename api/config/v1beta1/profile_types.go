package v1beta1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// SyncMode determines when a profile is deployed to a cluster.
//
// +kubebuilder:validation:Enum:=OneTime;Continuous;ContinuousWithDriftDetection;DryRun
type SyncMode string

// The sync modes.
const (
	// SyncModeOneTime deploys once; later changes of the profile do not reach clusters that have it.
	SyncModeOneTime SyncMode = "OneTime"
	// SyncModeContinuous deploys every change.
	SyncModeContinuous SyncMode = "Continuous"
	// SyncModeContinuousWithDriftDetection also reverts changes by others on the cluster.
	SyncModeContinuousWithDriftDetection SyncMode = "ContinuousWithDriftDetection"
	// SyncModeDryRun changes nothing and reports the changes that would be made.
	SyncModeDryRun SyncMode = "DryRun"
)

// StopMatchingBehavior determines whether deployed objects stay on a cluster that no longer matches, or whose profile
// is deleted.
//
// +kubebuilder:validation:Enum:=WithdrawPolicies;LeavePolicies
type StopMatchingBehavior string

// The ways to stop matching.
const (
	// WithdrawPolicies removes everything the profile deployed.
	WithdrawPolicies StopMatchingBehavior = "WithdrawPolicies"
	// LeavePolicies keeps it, without marks of ownership.
	LeavePolicies StopMatchingBehavior = "LeavePolicies"
)

// ProfileSpec has the charts and objects to deploy, and the clusters. It is part of ClusterProfile, Profile and
// ClusterSummary.
type ProfileSpec struct {
	// ClusterSelector matches ready clusters by label. An empty selector matches none.
	// +optional
	ClusterSelector metav1.LabelSelector `json:"clusterSelector,omitzero"`

	// ClusterRefs name clusters, ready or not.
	// +optional
	ClusterRefs []corev1.ObjectReference `json:"clusterRefs,omitempty"`

	// SetRefs name ClusterSets (of a ClusterProfile) or Sets (of a Profile) whose chosen clusters match.
	// +optional
	SetRefs []string `json:"setRefs,omitempty"`

	// SyncMode determines when a change is deployed. Default Continuous.
	// +kubebuilder:default:=Continuous
	// +optional
	SyncMode SyncMode `json:"syncMode,omitempty"`

	// Tier decides between profiles that hold the same object or release: the lowest wins; of equals, the first. Default
	// 100.
	// +kubebuilder:default:=100
	// +kubebuilder:validation:Minimum=1
	// +optional
	Tier int32 `json:"tier,omitempty"`

	// ContinueOnConflict deploys the other objects if one belongs to another profile. Default false.
	// +kubebuilder:default:=false
	// +optional
	ContinueOnConflict bool `json:"continueOnConflict,omitempty"`

	// ContinueOnError deploys the other objects and charts if one fails. Default false.
	// +kubebuilder:default:=false
	// +optional
	ContinueOnError bool `json:"continueOnError,omitempty"`

	// MaxUpdate is how many clusters may be updated at once: a number or a percentage of those that match, rounded up.
	// Default: all.
	// +kubebuilder:validation:XIntOrString
	// +kubebuilder:validation:Pattern=`^((100|[0-9]{1,2})%|[0-9]+)$`
	// +optional
	MaxUpdate *intstr.IntOrString `json:"maxUpdate,omitempty"`

	// StopMatchingBehavior determines whether deployed objects stay on clusters that no longer match. Default
	// WithdrawPolicies.
	// +kubebuilder:default:=WithdrawPolicies
	// +optional
	StopMatchingBehavior StopMatchingBehavior `json:"stopMatchingBehavior,omitempty"`

	// Reloader restarts deployed workloads whose mounted ConfigMaps and Secrets change. Default false.
	// +kubebuilder:default:=false
	// +optional
	Reloader bool `json:"reloader,omitempty"`

	// TemplateResourceRefs are objects of the hub that templates may use.
	// +listType=map
	// +listMapKey=identifier
	// +optional
	TemplateResourceRefs []TemplateResourceRef `json:"templateResourceRefs,omitempty"`

	// DependsOn names profiles of the same kind that must be provisioned on a cluster before this one is deployed to it.
	// +optional
	DependsOn []string `json:"dependsOn,omitempty"`

	// TransitionFrom names profiles of the same kind that this one replaces: it takes their objects over, whatever the
	// tiers, and they are withdrawn only once this one is provisioned.
	// +optional
	TransitionFrom []string `json:"transitionFrom,omitempty"`

	// PolicyRefs are plain objects and templates to deploy: by tier, then in list order.
	// +optional
	PolicyRefs []libv1beta1.PolicyRef `json:"policyRefs,omitempty"`

	// HelmCharts are charts to deploy, in list order.
	// +optional
	HelmCharts []HelmChart `json:"helmCharts,omitempty"`

	// KustomizationRefs are kustomizations to deploy: by tier, then in list order.
	// +optional
	KustomizationRefs []KustomizationRef `json:"kustomizationRefs,omitempty"`

	// PreDeployChecks must pass before a feature is deployed.
	// +optional
	PreDeployChecks []libv1beta1.ValidateHealth `json:"preDeployChecks,omitempty"`

	// ValidateHealths must pass before a deployed feature counts as provisioned.
	// +optional
	ValidateHealths []libv1beta1.ValidateHealth `json:"validateHealths,omitempty"`

	// PreDeleteChecks must pass before a feature is withdrawn.
	// +optional
	PreDeleteChecks []libv1beta1.ValidateHealth `json:"preDeleteChecks,omitempty"`

	// PostDeleteChecks must pass before a feature counts as removed.
	// +optional
	PostDeleteChecks []libv1beta1.ValidateHealth `json:"postDeleteChecks,omitempty"`

	// Patches change rendered objects, in list order.
	// +optional
	Patches []libv1beta1.Patch `json:"patches,omitempty"`

	// PatchesFrom hold further patches, applied after patches.
	// +optional
	PatchesFrom []ValueFrom `json:"patchesFrom,omitempty"`

	// DriftExclusions are parts of deployed objects that others may change.
	// +optional
	DriftExclusions []libv1beta1.DriftExclusion `json:"driftExclusions,omitempty"`

	// MaxConsecutiveFailures is the number of failed attempts in a row after which a feature is FailedNonRetriable.
	// Default: it is tried for ever.
	// +kubebuilder:validation:Minimum=0
	// +optional
	MaxConsecutiveFailures *int64 `json:"maxConsecutiveFailures,omitempty"`

	// ExtraLabels are set on every deployed object after the patches, and replace its own values.
	// +optional
	ExtraLabels map[string]string `json:"extraLabels,omitempty"`

	// ExtraAnnotations are set on every deployed object after the patches, and replace its own values.
	// +optional
	ExtraAnnotations map[string]string `json:"extraAnnotations,omitempty"`
}

// ClusterUpdates lists the clusters that are at one version of a profile.
type ClusterUpdates struct {
	// Hash of the profile's spec and content.
	// +optional
	Hash []byte `json:"hash,omitempty"`

	// Clusters at that version.
	// +optional
	Clusters []corev1.ObjectReference `json:"clusters,omitempty"`
}

// FailedCluster is a cluster a profile could not be deployed to.
type FailedCluster struct {
	// ClusterRef is the cluster.
	ClusterRef corev1.ObjectReference `json:"clusterRef"`

	// FailureMessage is the reason.
	// +optional
	FailureMessage string `json:"failureMessage,omitempty"`

	// LastFailureTime is when it last failed.
	// +optional
	LastFailureTime *metav1.Time `json:"lastFailureTime,omitempty"`
}

// ProfileStatus lists the matching clusters and the progress of the rollout.
type ProfileStatus struct {
	// MatchingClusters are the clusters the profile is for, now.
	// +optional
	MatchingClusters []corev1.ObjectReference `json:"matchingClusters,omitempty"`

	// UpdatingClusters are being brought to the current version.
	// +optional
	UpdatingClusters ClusterUpdates `json:"updatingClusters,omitzero"`

	// UpdatedClusters have the current version.
	// +optional
	UpdatedClusters ClusterUpdates `json:"updatedClusters,omitzero"`

	// FailedClusters could not be brought to it.
	// +optional
	FailedClusters []FailedCluster `json:"failedClusters,omitempty"`

	// DependenciesHash identifies the state of the profiles this one depends on.
	// +optional
	DependenciesHash []byte `json:"dependenciesHash,omitempty"`

	// ReconciliationSuspended is true while changes are not deployed. Default false.
	// +optional
	ReconciliationSuspended bool `json:"reconciliationSuspended,omitempty"`

	// SuspensionReason is the reason for that.
	// +optional
	SuspensionReason string `json:"suspensionReason,omitempty"`
}

// ClusterProfile declares the charts and objects for the matching clusters of all namespaces.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=clusterprofiles,scope=Cluster
// +kubebuilder:storageversion
// +kubebuilder:subresource:status
type ClusterProfile struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// Spec has the charts, the objects and the clusters.
	Spec ProfileSpec `json:"spec,omitzero"`
	// Status lists the matching clusters and the progress of the rollout.
	Status ProfileStatus `json:"status,omitzero"`
}

// ClusterProfileList is a list of cluster profiles.
//
// +kubebuilder:object:root=true
type ClusterProfileList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitzero"`

	// Items are the cluster profiles.
	Items []ClusterProfile `json:"items"`
}

// Profile declares the charts and objects for the matching clusters of its own namespace.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=profiles,scope=Namespaced
// +kubebuilder:storageversion
// +kubebuilder:subresource:status
type Profile struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// Spec has the charts, the objects and the clusters.
	Spec ProfileSpec `json:"spec,omitzero"`
	// Status lists the matching clusters and the progress of the rollout.
	Status ProfileStatus `json:"status,omitzero"`
}

// ProfileList is a list of profiles.
//
// +kubebuilder:object:root=true
type ProfileList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitzero"`

	// Items are the profiles.
	Items []Profile `json:"items"`
}
