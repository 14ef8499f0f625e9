package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ActiveWindow is the recurring time in which a cluster takes changes. Outside it the cluster is paused.
type ActiveWindow struct {
	// From is when the window opens, in cron format (five fields, UTC; or a name like @daily).
	// +kubebuilder:validation:MinLength=1
	From string `json:"from"`

	// To is when the window closes, in cron format (five fields, UTC; or a name like @daily).
	// +kubebuilder:validation:MinLength=1
	To string `json:"to"`
}

// TokenRequestRenewalOption makes the hub renew the token of a push-mode cluster's kubeconfig.
type TokenRequestRenewalOption struct {
	// RenewTokenRequestInterval is the time between two renewals.
	RenewTokenRequestInterval metav1.Duration `json:"renewTokenRequestInterval"`

	// TokenDuration is the life to ask for. Default: the interval and 30 minutes.
	// +optional
	TokenDuration *metav1.Duration `json:"tokenDuration,omitempty"`

	// SANamespace is the namespace of the ServiceAccount in the member. Default: the one the kubeconfig's token belongs
	// to.
	// +optional
	SANamespace string `json:"saNamespace,omitempty"`

	// SAName is the name of the ServiceAccount in the member. Default: the one the kubeconfig's token belongs to.
	// +optional
	SAName string `json:"saName,omitempty"`

	// KubeconfigKeyName is the key of the Secret the renewed kubeconfig is kept under. Default re-kubeconfig.
	// +optional
	KubeconfigKeyName string `json:"kubeconfigKeyName,omitempty"`
}

// SveltosClusterSpec describes how a cluster is reached and when it may be changed.
//
// +kubebuilder:validation:XValidation:rule="!has(self.workloadIdentity) || !has(self.kubeconfigName) || self.kubeconfigName == \"\"",message="workloadIdentity and kubeconfigName exclude each other"
type SveltosClusterSpec struct {
	// KubeconfigName is the Secret in the cluster's namespace that holds the kubeconfig. Default
	// <cluster>-sveltos-kubeconfig.
	// +optional
	KubeconfigName string `json:"kubeconfigName,omitempty"`

	// KubeconfigKeyName is the key of that Secret. Default: its first key.
	// +optional
	KubeconfigKeyName string `json:"kubeconfigKeyName,omitempty"`

	// Paused stops every change to the cluster; its health is still watched. Default false.
	// +optional
	Paused bool `json:"paused,omitempty"`

	// TokenRequestRenewalOption renews the kubeconfig's token. While that fails, failureMessage has the reason and the
	// connection stays Healthy, since the present token works. Default: it is not renewed. Push mode only.
	// +optional
	TokenRequestRenewalOption *TokenRequestRenewalOption `json:"tokenRequestRenewalOption,omitempty"`

	// Data is free-form; templates read it as .Cluster.spec.data.
	// +optional
	Data map[string]string `json:"data,omitempty"`

	// ActiveWindow pauses the cluster whenever the window closes and unpauses it whenever the window opens; a window that
	// is new or changed does so at once. A value that a user sets in between stays until then. Removing a window that is
	// closed unpauses the cluster; removing an open one leaves paused as it is. Default: paused is left to people.
	// +optional
	ActiveWindow *ActiveWindow `json:"activeWindow,omitempty"`

	// ConsecutiveFailureThreshold is the number of failed contacts in a row that make the connection Down. Default 3.
	// +kubebuilder:default:=3
	// +optional
	ConsecutiveFailureThreshold int32 `json:"consecutiveFailureThreshold,omitempty"`

	// ReadinessChecks must pass before the cluster becomes ready, which it then stays. In pull mode the agent runs them.
	// +optional
	ReadinessChecks []ClusterCheck `json:"readinessChecks,omitempty"`

	// LivenessChecks must pass for a ready cluster to count as healthy; each round in which one fails counts as a failed
	// contact. In pull mode the agent runs them.
	// +optional
	LivenessChecks []ClusterCheck `json:"livenessChecks,omitempty"`

	// PullMode is true if an agent in the cluster dials the hub, and false if the hub dials the cluster. Default false. It
	// cannot be changed.
	// +kubebuilder:default:=false
	// +optional
	PullMode bool `json:"pullMode,omitempty"`

	// WorkloadIdentity reaches the cluster with the hub's own identity instead of a kubeconfig. Push mode only.
	// +optional
	WorkloadIdentity *WorkloadIdentity `json:"workloadIdentity,omitempty"`

	// CleanupGracePeriod is the time for which a deleted SveltosCluster is kept. Default: it is not kept.
	// +optional
	CleanupGracePeriod *metav1.Duration `json:"cleanupGracePeriod,omitempty"`
}

// ConnectionStatus is the state of the connection between hub and cluster. Empty means not known yet.
//
// +kubebuilder:validation:Enum:=Healthy;Down
type ConnectionStatus string

// The connection states.
const (
	// ConnectionHealthy: the last contact succeeded.
	ConnectionHealthy ConnectionStatus = "Healthy"
	// ConnectionDown: the last consecutiveFailureThreshold contacts failed.
	ConnectionDown ConnectionStatus = "Down"
)

// AgentReportTooOld is the failureMessage of a pull-mode cluster whose agent has fallen silent. Other tools compare it
// literally.
const AgentReportTooOld = "AgentLastReportTime is older than max allowed age."

// SveltosClusterStatus is the observed state of a cluster.
type SveltosClusterStatus struct {
	// Version of Kubernetes in the cluster: as the cluster reports it in push mode, without build metadata in pull mode.
	// +kubebuilder:validation:MaxLength=256
	// +optional
	Version string `json:"version,omitempty"`

	// APIVersions lists the served APIs, as group/version and group/version/Kind ("v1" and "v1/ConfigMap" for the core
	// group), sorted. Charts for a pull-mode cluster are rendered with it. Towline's own field.
	// +kubebuilder:validation:MaxItems=20000
	// +kubebuilder:validation:items:MaxLength=512
	// +listType=atomic
	// +optional
	APIVersions []string `json:"apiVersions,omitempty"`

	// Ready turns true at the first successful contact.
	// +optional
	Ready bool `json:"ready,omitempty"`

	// ConnectionStatus is the state of the connection between hub and cluster.
	// +optional
	ConnectionStatus ConnectionStatus `json:"connectionStatus,omitempty"`

	// FailureMessage is the reason why the last contact failed; absent after a success.
	// +kubebuilder:validation:MaxLength=32768
	// +optional
	FailureMessage string `json:"failureMessage,omitempty"`

	// LastReconciledTokenRequestAt is when the token was last renewed, in RFC 3339.
	// +kubebuilder:validation:MaxLength=256
	// +optional
	LastReconciledTokenRequestAt string `json:"lastReconciledTokenRequestAt,omitempty"`

	// AgentLastReportTime is when the agent of a pull-mode cluster was last heard of.
	// +optional
	AgentLastReportTime *metav1.Time `json:"agentLastReportTime,omitempty"`

	// NextUnpause is when the active window opens next.
	// +optional
	NextUnpause *metav1.Time `json:"nextUnpause,omitempty"`

	// NextPause is when the active window closes next.
	// +optional
	NextPause *metav1.Time `json:"nextPause,omitempty"`

	// ActiveWindowHash is the SHA-256 of the window the two times were computed from.
	// +kubebuilder:validation:MaxLength=256
	// +optional
	ActiveWindowHash []byte `json:"activeWindowHash,omitempty"`

	// AgentCheckFailures counts how often in a row the agent of a pull-mode cluster found a check failing: a readiness
	// check before the cluster is ready, a liveness check after. 0 when they pass. Towline's own field.
	// +optional
	AgentCheckFailures int32 `json:"agentCheckFailures,omitempty"`

	// AgentCheckMessage names the failing check and the reason; absent if all pass. Towline's own field.
	// +kubebuilder:validation:MaxLength=32768
	// +optional
	AgentCheckMessage string `json:"agentCheckMessage,omitempty"`

	// AgentRemovedAt is when the agent of a pull-mode cluster that is being deregistered committed itself to removing
	// itself from the cluster. Towline's own field.
	// +optional
	AgentRemovedAt *metav1.Time `json:"agentRemovedAt,omitempty"`

	// Conditions of the cluster; ConditionUnclaimedBundles is the only type. Towline's own field.
	// +kubebuilder:validation:MaxItems=32
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// ConnectionFailures counts failed contacts in a row. Default 0.
	// +kubebuilder:default:=0
	// +optional
	ConnectionFailures int32 `json:"connectionFailures,omitempty"`
}

// SveltosCluster is a cluster of the fleet.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=sveltosclusters,scope=Namespaced
// +kubebuilder:storageversion
// +kubebuilder:subresource:status
// +kubebuilder:validation:XValidation:rule="(has(self.spec) && has(self.spec.pullMode) && self.spec.pullMode) == (has(oldSelf.spec) && has(oldSelf.spec.pullMode) && oldSelf.spec.pullMode)",fieldPath=".spec.pullMode",message="Value is immutable"
// +kubebuilder:printcolumn:name="Ready",type="boolean",JSONPath=`.status.ready`,description="Whether the cluster has been reached"
// +kubebuilder:printcolumn:name="ConnectionStatus",type="string",JSONPath=`.status.connectionStatus`,description="Whether hub and cluster are in touch",priority=1
// +kubebuilder:printcolumn:name="Version",type="string",JSONPath=`.status.version`,description="Kubernetes version of the cluster"
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=`.metadata.creationTimestamp`,description="Time since the cluster was registered"
// +kubebuilder:printcolumn:name="Shard",type="string",JSONPath=`.metadata.annotations.sharding\.projectsveltos\.io/key`,description="Shard that looks after the cluster",priority=1
type SveltosCluster struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// Spec describes how the cluster is reached.
	Spec SveltosClusterSpec `json:"spec,omitzero"`
	// Status is the observed state of the cluster.
	Status SveltosClusterStatus `json:"status,omitzero"`
}

// SveltosClusterList is a list of clusters.
//
// +kubebuilder:object:root=true
type SveltosClusterList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitzero"`

	// Items are the clusters.
	Items []SveltosCluster `json:"items"`
}
