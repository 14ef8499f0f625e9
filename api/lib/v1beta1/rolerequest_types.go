package v1beta1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// RoleRequestFinalizer stays on a RoleRequest until its Roles are withdrawn from all clusters.
const RoleRequestFinalizer = "rolerequestfinalizer.projectsveltos.io"

// RoleRef points at a ConfigMap, or a Secret of type addons.projectsveltos.io/cluster-profile, on the hub. Every data
// key is a YAML stream of Roles and ClusterRoles.
type RoleRef struct {
	// Namespace of the object.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Namespace string `json:"namespace"`

	// Name of the object.
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`
	Name string `json:"name"`

	// Kind of the object.
	// +kubebuilder:validation:Enum:=ConfigMap;Secret
	Kind string `json:"kind"`
}

// RoleRequestSpec gives a ServiceAccount rights on clusters.
type RoleRequestSpec struct {
	// ClusterSelector matches ready clusters by label. An empty selector matches none.
	// +optional
	ClusterSelector metav1.LabelSelector `json:"clusterSelector,omitzero"`

	// RoleRefs point at the Roles and ClusterRoles that the ServiceAccount gets on the matching clusters.
	// +listType=atomic
	// +optional
	RoleRefs []RoleRef `json:"roleRefs,omitempty"`

	// ExpirationSeconds has no effect: profiles are deployed as the ServiceAccount by impersonation, without a token.
	// +optional
	ExpirationSeconds *int64 `json:"expirationSeconds,omitempty"`

	// ServiceAccountName is the name of the ServiceAccount of the matching clusters that gets the rights, as in the label
	// projectsveltos.io/serviceaccount-name of profiles.
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`
	ServiceAccountName string `json:"serviceAccountName"`

	// ServiceAccountNamespace is its namespace, as in the label projectsveltos.io/serviceaccount-namespace of profiles.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	ServiceAccountNamespace string `json:"serviceAccountNamespace"`
}

// RoleRequestStatus is the observed state of a RoleRequest. The ClusterSummaries of its ClusterProfile have the state
// on each cluster.
type RoleRequestStatus struct {
	// MatchingClusterRefs are the clusters to which the Roles are deployed.
	// +optional
	MatchingClusterRefs []corev1.ObjectReference `json:"matchingClusters,omitempty"`

	// FailureMessage is the reason why a change of the RoleRequest or its roleRefs is not deployed.
	// +optional
	FailureMessage *string `json:"failureMessage,omitempty"`
}

// RoleRequest gives a ServiceAccount Roles and ClusterRoles on clusters of the fleet.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=rolerequests,scope=Cluster
// +kubebuilder:storageversion
// +kubebuilder:subresource:status
// +kubebuilder:validation:XValidation:rule="size(self.metadata.name) <= 200",message="the name must not be longer than 200 characters"
type RoleRequest struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// Spec describes the rights.
	Spec RoleRequestSpec `json:"spec"`
	// Status is the observed state of the RoleRequest.
	Status RoleRequestStatus `json:"status,omitzero"`
}

// RoleRequestList is a list of RoleRequests.
//
// +kubebuilder:object:root=true
type RoleRequestList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitzero"`

	// Items are the RoleRequests.
	Items []RoleRequest `json:"items"`
}
