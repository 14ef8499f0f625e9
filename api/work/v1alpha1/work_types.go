package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// WorkSpec has the objects to deploy to a cluster.
type WorkSpec struct {
	// Workload holds the manifests.
	// +optional
	Workload WorkloadTemplate `json:"workload,omitzero"`

	// SuspendDispatching stops the delivery of changes of the Work. Deployed objects stay, and their status is reported.
	// +optional
	SuspendDispatching *bool `json:"suspendDispatching,omitempty"`

	// PreserveResourcesOnDeletion leaves the objects on the cluster when the Work is deleted. Default false.
	// +optional
	PreserveResourcesOnDeletion *bool `json:"preserveResourcesOnDeletion,omitempty"`
}

// WorkloadTemplate holds manifests.
type WorkloadTemplate struct {
	// Manifests of the objects, in the order in which they are written.
	// +kubebuilder:validation:items:XEmbeddedResource
	// +listType=atomic
	// +optional
	Manifests []Manifest `json:"manifests,omitempty"`
}

// Manifest is one object of any kind.
//
// +kubebuilder:pruning:PreserveUnknownFields
// +kubebuilder:validation:Type=object
type Manifest struct {
	runtime.RawExtension `json:",inline"`
}

// WorkStatus is the state of a Work on its cluster.
type WorkStatus struct {
	// Conditions of the Work: Applied and Dispatching.
	// +kubebuilder:validation:MaxItems=32
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// ManifestStatuses has the status of each manifest's object on the cluster.
	// +kubebuilder:validation:MaxItems=10000
	// +listType=atomic
	// +optional
	ManifestStatuses []ManifestStatus `json:"manifestStatuses,omitempty"`
}

// ManifestStatus is the status of one object.
type ManifestStatus struct {
	// Identifier identifies the object.
	Identifier ResourceIdentifier `json:"identifier"`

	// Status is the object's own.
	// +kubebuilder:pruning:PreserveUnknownFields
	// +optional
	Status *runtime.RawExtension `json:"status,omitempty"`

	// Health of the object.
	// +optional
	Health ResourceHealth `json:"health,omitempty"`
}

// ResourceIdentifier names one object that comes from a manifest.
type ResourceIdentifier struct {
	// Ordinal is the place of the manifest in spec.workload.manifests, from 0.
	Ordinal int `json:"ordinal"`

	// Group of the object; empty for the core group.
	// +kubebuilder:validation:MaxLength=512
	// +optional
	Group string `json:"group,omitempty"`

	// Version of the object.
	// +kubebuilder:validation:MaxLength=512
	Version string `json:"version"`

	// Kind of the object.
	// +kubebuilder:validation:MaxLength=512
	Kind string `json:"kind"`

	// Resource is the plural name of the kind, as in URLs.
	// +kubebuilder:validation:MaxLength=512
	Resource string `json:"resource"`

	// Namespace of the object; empty for a kind without namespaces.
	// +kubebuilder:validation:MaxLength=512
	// +optional
	Namespace string `json:"namespace,omitempty"`

	// Name of the object.
	// +kubebuilder:validation:MaxLength=512
	Name string `json:"name"`
}

// ResourceHealth is the health of an object.
//
// +kubebuilder:validation:Enum=Healthy;Unhealthy;Unknown
type ResourceHealth string

// The healths of an object.
const (
	ResourceHealthy   ResourceHealth = "Healthy"
	ResourceUnhealthy ResourceHealth = "Unhealthy"
	ResourceUnknown   ResourceHealth = "Unknown"
)

// Work is a set of manifests for the cluster in whose execution space, the namespace karmada-es-<cluster>, it is.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=works,shortName=wk
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Workload-Kind",type=string,JSONPath=`.spec.workload.manifests[*].kind`
// +kubebuilder:printcolumn:name="Applied",type=string,JSONPath=`.status.conditions[?(@.type=="Applied")].status`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type Work struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitzero"`

	Spec WorkSpec `json:"spec"`

	// +optional
	Status WorkStatus `json:"status,omitzero"`
}

// WorkList is a list of Works.
//
// +kubebuilder:object:root=true
type WorkList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitzero"`
	Items           []Work `json:"items"`
}
