package v1beta1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Action says what an agent shall do with a group.
//
// +kubebuilder:validation:Enum:=Deploy;Remove
type Action string

// The actions of a group.
const (
	// ActionDeploy makes the member equal the items.
	ActionDeploy Action = "Deploy"
	// ActionRemove withdraws what the group put on the member. Nothing else does.
	ActionRemove Action = "Remove"
)

// SourceStatus says whether the object behind a group is there to stay.
//
// +kubebuilder:validation:Enum:=Active;Deleted
type SourceStatus string

// The states of a group's source.
const (
	// SourceActive: the source stays.
	SourceActive SourceStatus = "Active"
	// SourceDeleted: the source is going away.
	SourceDeleted SourceStatus = "Deleted"
)

// UpdatePhase says whether a group may be read.
//
// +kubebuilder:validation:Enum:=Ready;Preparing
type UpdatePhase string

// The phases of a group.
const (
	// UpdatePhaseReady: every item is in place.
	UpdatePhaseReady UpdatePhase = "Ready"
	// UpdatePhasePreparing: bundles are being rewritten; agents must leave the group alone.
	UpdatePhasePreparing UpdatePhase = "Preparing"
)

// ConfigurationItem points at one ConfigurationBundle.
type ConfigurationItem struct {
	// ContentRef is the bundle.
	// +optional
	ContentRef *corev1.ObjectReference `json:"contentRef,omitempty"`

	// Hash of the bundle's content. An agent must not apply content with another hash.
	// +optional
	Hash []byte `json:"hash,omitempty"`
}

// ConfigurationGroupSpec is what one requestor wants of one member.
type ConfigurationGroupSpec struct {
	// Action to take. Default Deploy.
	// +kubebuilder:default:=Deploy
	// +optional
	Action Action `json:"action,omitempty"`

	// SourceRef is the object the group was made for, for instance a ClusterSummary.
	// +optional
	SourceRef *corev1.ObjectReference `json:"sourceRef,omitempty"`

	// SourceStatus says whether that object is going away. Default Active.
	// +kubebuilder:default:=Active
	// +optional
	SourceStatus SourceStatus `json:"sourceStatus,omitempty"`

	// ConfigurationItems are the bundles, in the order to apply them.
	// +listType=atomic
	// +optional
	ConfigurationItems []ConfigurationItem `json:"configurationItem,omitempty"`

	// Tier of the profile: where two profiles hold the same object, the lowest wins. Default 100.
	// +kubebuilder:default:=100
	// +kubebuilder:validation:Minimum=1
	// +optional
	Tier int32 `json:"tier,omitempty"`

	// DryRun asks for a report of what would change and for no change. Default false.
	// +kubebuilder:default:=false
	// +optional
	DryRun bool `json:"dryRun,omitempty"`

	// Reloader restarts workloads whose mounted ConfigMaps and Secrets change. Default false.
	// +kubebuilder:default:=false
	// +optional
	Reloader bool `json:"reloader,omitempty"`

	// DriftDetection reverts what others change in deployed objects. Default false.
	// +kubebuilder:default:=false
	// +optional
	DriftDetection bool `json:"driftDetection,omitempty"`

	// DriftExclusions are parts of objects that others may change.
	// +listType=atomic
	// +optional
	DriftExclusions []DriftExclusion `json:"driftExclusions,omitempty"`

	// ContinueOnConflict goes on with other objects after one belongs to someone else. Default false.
	// +kubebuilder:default:=false
	// +optional
	ContinueOnConflict bool `json:"continueOnConflict,omitempty"`

	// ContinueOnError goes on with other objects after one failed. Default false.
	// +kubebuilder:default:=false
	// +optional
	ContinueOnError bool `json:"continueOnError,omitempty"`

	// MaxConsecutiveFailures is the number of failed attempts in a row after which the agent stops trying. Default: it
	// never does.
	// +kubebuilder:validation:Minimum=0
	// +optional
	MaxConsecutiveFailures *int64 `json:"maxConsecutiveFailures,omitempty"`

	// LeavePolicies keeps deployed objects, without marks of ownership, when the source is Deleted. Default false.
	// +kubebuilder:default:=false
	// +optional
	LeavePolicies bool `json:"leavePolicies,omitempty"`

	// PreDeployChecks must pass before anything is applied.
	// +listType=atomic
	// +optional
	PreDeployChecks []ValidateHealth `json:"preDeployChecks,omitempty"`

	// ValidateHealths must pass before the group counts as Provisioned.
	// +listType=atomic
	// +optional
	ValidateHealths []ValidateHealth `json:"validateHealths,omitempty"`

	// PreDeleteChecks must pass before anything is withdrawn.
	// +listType=atomic
	// +optional
	PreDeleteChecks []ValidateHealth `json:"preDeleteChecks,omitempty"`

	// PostDeleteChecks must pass before the group counts as Removed.
	// +listType=atomic
	// +optional
	PostDeleteChecks []ValidateHealth `json:"postDeleteChecks,omitempty"`

	// PreDeployCheckJobs maps <namespace>/<name> to the manifest of a Job that a check in preDeployChecks runs.
	// +optional
	PreDeployCheckJobs map[string]string `json:"preDeployCheckJobs,omitempty"`

	// ValidateHealthJobs is the same for validateHealths.
	// +optional
	ValidateHealthJobs map[string]string `json:"validateHealthJobs,omitempty"`

	// PreDeleteCheckJobs is the same for preDeleteChecks.
	// +optional
	PreDeleteCheckJobs map[string]string `json:"preDeleteCheckJobs,omitempty"`

	// PostDeleteCheckJobs is the same for postDeleteChecks.
	// +optional
	PostDeleteCheckJobs map[string]string `json:"postDeleteCheckJobs,omitempty"`

	// DeployedGroupVersionKind lists the kinds deployed earlier, as Kind.version.group, in which to look for what is
	// obsolete.
	// +optional
	DeployedGroupVersionKind []string `json:"deployedGroupVersionKind,omitempty"`

	// UpdatePhase says whether the group may be read. Default Ready.
	// +kubebuilder:default:=Ready
	// +optional
	UpdatePhase UpdatePhase `json:"updatePhase,omitempty"`

	// RequestorHash identifies what the requestor wants: content and options. An agent echoes it as observedRequestorHash.
	// +optional
	RequestorHash []byte `json:"requestorHash,omitempty"`

	// ServiceAccountName in the member to apply as. Default: the agent's own.
	// +optional
	ServiceAccountName string `json:"serviceAccountName,omitempty"`

	// ServiceAccountNamespace is the namespace of that ServiceAccount.
	// +optional
	ServiceAccountNamespace string `json:"serviceAccountNamespace,omitempty"`
}

// ConfigurationGroupStatus is what the agent has to say about a group.
type ConfigurationGroupStatus struct {
	// DeploymentStatus says how far the agent has come. Empty: it has not looked yet.
	// +optional
	DeploymentStatus FeatureStatus `json:"status,omitempty"`

	// FailureMessage says why it has not come further; absent otherwise.
	// +kubebuilder:validation:MaxLength=32768
	// +optional
	FailureMessage string `json:"failureMessage,omitempty"`

	// LastAppliedTime is when the agent last applied the group.
	// +optional
	LastAppliedTime *metav1.Time `json:"lastAppliedTime,omitempty"`

	// DeployedGroupVersionKind lists the kinds deployed now, as Kind.version.group.
	// +kubebuilder:validation:MaxItems=20000
	// +kubebuilder:validation:items:MaxLength=512
	// +optional
	DeployedGroupVersionKind []string `json:"deployedGroupVersionKind,omitempty"`

	// ObservedGeneration is the generation of the group the status belongs to.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// ObservedRequestorHash is spec.requestorHash at that time.
	// +kubebuilder:validation:MaxLength=256
	// +optional
	ObservedRequestorHash []byte `json:"observedRequestorHash,omitempty"`

	// ContentMissing says that the agent has neither the bundles nor its own record of them, so that the hub must stage
	// the bundles again. Towline's own field.
	// +optional
	ContentMissing bool `json:"contentMissing,omitempty"`

	// OutdatedReleases are the Helm releases whose revision the agent has not begun, if the hub must render one of them
	// again. The agent begins none of them before the group changes. Towline's own field.
	// +kubebuilder:validation:MaxItems=1000
	// +listType=atomic
	// +optional
	OutdatedReleases []OutdatedRelease `json:"outdatedReleases,omitempty"`
}

// OutdatedRelease is a Helm release whose revision has not begun. The hub renders it again if its templates have read
// another revision or operation than the one that comes after the release records of the member.
type OutdatedRelease struct {
	// Namespace of the release.
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace"`

	// Name of the release.
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`

	// Revision is the number that the templates must read as .Release.Revision, 0 if the agent has not compared it yet.
	// +kubebuilder:validation:Minimum=0
	Revision int64 `json:"revision"`

	// IsUpgrade is the value that the templates must read as .Release.IsUpgrade.
	// +optional
	IsUpgrade bool `json:"isUpgrade,omitempty"`
}

// ConfigurationGroup is the order of one requestor to the agent of one member: an ordered list of bundles and what to
// do with them.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=configurationgroups,scope=Namespaced
// +kubebuilder:storageversion
// +kubebuilder:subresource:status
type ConfigurationGroup struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// Spec is the order; the hub writes it.
	Spec ConfigurationGroupSpec `json:"spec,omitzero"`
	// Status is the answer; the agent writes it.
	Status ConfigurationGroupStatus `json:"status,omitzero"`
}

// ConfigurationGroupList is a list of groups.
//
// +kubebuilder:object:root=true
type ConfigurationGroupList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitzero"`

	// Items are the groups.
	Items []ConfigurationGroup `json:"items"`
}
