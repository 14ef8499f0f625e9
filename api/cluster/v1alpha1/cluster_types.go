package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ClusterSyncMode is the direction in which connections are made.
//
// +kubebuilder:validation:Enum=Push;Pull
type ClusterSyncMode string

// The two modes.
const (
	// Push: the hub dials the cluster.
	Push ClusterSyncMode = "Push"
	// Pull: an agent in the cluster dials the hub.
	Pull ClusterSyncMode = "Pull"
)

// LocalSecretReference names a Secret of the hub.
type LocalSecretReference struct {
	// Namespace of the Secret.
	// +kubebuilder:validation:MinLength=1
	Namespace string `json:"namespace"`

	// Name of the Secret.
	// +kubebuilder:validation:MinLength=1
	Name string `json:"name"`
}

// ClusterSpec describes a cluster and how it is reached.
//
// +kubebuilder:validation:XValidation:rule="!has(self.zone) || !has(self.zones) || size(self.zones) == 0",message="zone and zones exclude each other"
type ClusterSpec struct {
	// ID identifies the cluster: the uid of its kube-system namespace.
	// +kubebuilder:validation:MaxLength=128000
	// +optional
	ID string `json:"id,omitempty"`

	// SyncMode is Push if the hub dials the cluster, and Pull if an agent in the cluster dials the hub.
	SyncMode ClusterSyncMode `json:"syncMode"`

	// APIEndpoint is the URL of the cluster's API server. Without it the cluster cannot be dialled.
	// +kubebuilder:validation:XValidation:rule="self == '' || (isURL(self) && url(self).getHost() != '' && !self.contains('?') && !self.contains('#') && !self.contains('@'))",message="must be a URL with a host and without user information, query and fragment"
	// +kubebuilder:validation:MaxLength=2048
	// +optional
	APIEndpoint string `json:"apiEndpoint,omitempty"`

	// SecretRef is the Secret with the keys token and caBundle that the hub dials the cluster with.
	// +optional
	SecretRef *LocalSecretReference `json:"secretRef,omitempty"`

	// ImpersonatorSecretRef is the Secret with the key token by which the hub acts as its own users in the cluster.
	// +optional
	ImpersonatorSecretRef *LocalSecretReference `json:"impersonatorSecretRef,omitempty"`

	// InsecureSkipTLSVerification turns the check of the server's certificate off. Default false.
	// +optional
	InsecureSkipTLSVerification bool `json:"insecureSkipTLSVerification,omitempty"`

	// ProxyURL is the proxy on the way to the cluster: http, https or socks5.
	// +kubebuilder:validation:XValidation:rule="self == '' || (isURL(self) && url(self).getScheme() in ['http', 'https', 'socks5'])",message="must be a URL of the scheme http, https or socks5"
	// +kubebuilder:validation:MaxLength=2048
	// +optional
	ProxyURL string `json:"proxyURL,omitempty"`

	// ProxyHeader are headers for that proxy. A comma separates several values of one.
	// +optional
	ProxyHeader map[string]string `json:"proxyHeader,omitempty"`

	// Provider of the cluster, such as a cloud. A valid label value.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$`
	// +optional
	Provider string `json:"provider,omitempty"`

	// Region of the cluster. A valid label value.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$`
	// +optional
	Region string `json:"region,omitempty"`

	// Zone of the cluster. Deprecated: use zones.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$`
	// +optional
	Zone string `json:"zone,omitempty"`

	// Zones of the cluster. Valid label values.
	// +kubebuilder:validation:MaxItems=1000
	// +kubebuilder:validation:items:MaxLength=63
	// +kubebuilder:validation:items:Pattern=`^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$`
	// +listType=atomic
	// +optional
	Zones []string `json:"zones,omitempty"`

	// Taints prevent scheduling to the cluster. The hub sets the taints of the domain cluster.karmada.io itself.
	// +listType=atomic
	// +optional
	Taints []corev1.Taint `json:"taints,omitempty"`

	// ResourceModels grade the nodes of the cluster by their resources.
	// +listType=atomic
	// +optional
	ResourceModels []ResourceModel `json:"resourceModels,omitempty"`
}

// ResourceModel is one grade of nodes.
type ResourceModel struct {
	// Grade is the number of the grade, from 0.
	Grade uint `json:"grade"`

	// Ranges are the resources of a node of the grade.
	// +listType=atomic
	Ranges []ResourceModelRange `json:"ranges"`
}

// ResourceModelRange is the range of one resource: from Min, included, to Max, excluded.
type ResourceModelRange struct {
	// Name of the resource.
	Name corev1.ResourceName `json:"name"`

	// Min is the least quantity.
	Min resource.Quantity `json:"min"`

	// Max is the first quantity that is too much.
	Max resource.Quantity `json:"max"`
}

// ClusterStatus is the observed state of a cluster. The hub writes it for a push-mode cluster, the agent for a
// pull-mode cluster.
type ClusterStatus struct {
	// KubernetesVersion is the gitVersion of the cluster.
	// +kubebuilder:validation:MaxLength=256
	// +optional
	KubernetesVersion string `json:"kubernetesVersion,omitempty"`

	// APIEnablements lists the resources that the cluster serves, sorted, without subresources.
	// +kubebuilder:validation:MaxItems=5000
	// +listType=atomic
	// +optional
	APIEnablements []APIEnablement `json:"apiEnablements,omitempty"`

	// Conditions of the cluster: Ready and CompleteAPIEnablements.
	// +kubebuilder:validation:MaxItems=32
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// NodeSummary counts the nodes.
	// +optional
	NodeSummary *NodeSummary `json:"nodeSummary,omitempty"`

	// ResourceSummary has the sums of the resources of the nodes and of the requests of pods.
	// +optional
	ResourceSummary *ResourceSummary `json:"resourceSummary,omitempty"`

	// RemedyActions lists the actions that were asked for to remedy the cluster. Nothing in Towline asks for any.
	// +kubebuilder:validation:MaxItems=1000
	// +kubebuilder:validation:items:MaxLength=256
	// +listType=atomic
	// +optional
	RemedyActions []string `json:"remedyActions,omitempty"`
}

// APIEnablement is one version of one API group that a cluster serves.
type APIEnablement struct {
	// GroupVersion is the group and version, such as "apps/v1".
	// +kubebuilder:validation:MaxLength=512
	GroupVersion string `json:"groupVersion"`

	// Resources of that version, sorted by name.
	// +kubebuilder:validation:MaxItems=5000
	// +listType=atomic
	// +optional
	Resources []APIResource `json:"resources,omitempty"`
}

// APIResource is one resource that a cluster serves.
type APIResource struct {
	// Name is the plural name, as in URLs.
	// +kubebuilder:validation:MaxLength=256
	Name string `json:"name"`

	// Kind is the kind, as in manifests.
	// +kubebuilder:validation:MaxLength=256
	Kind string `json:"kind"`
}

// NodeSummary counts the nodes of a cluster.
type NodeSummary struct {
	// TotalNum is how many nodes there are.
	// +optional
	TotalNum int32 `json:"totalNum,omitempty"`

	// ReadyNum is how many of them are ready.
	// +optional
	ReadyNum int32 `json:"readyNum,omitempty"`
}

// ResourceSummary adds up the resources of a cluster.
type ResourceSummary struct {
	// Allocatable is the sum of the resources that the nodes offer to pods.
	// +kubebuilder:validation:MaxProperties=1000
	// +kubebuilder:validation:XValidation:rule="self.all(name, size(name) <= 512 && (type(self[name]) == int || size(self[name]) <= 128))",message="a name may have no more than 512 characters, and a quantity no more than 128"
	// +optional
	Allocatable map[corev1.ResourceName]resource.Quantity `json:"allocatable,omitempty"`

	// Allocating is the sum of the requests of pods without a node.
	// +kubebuilder:validation:MaxProperties=1000
	// +kubebuilder:validation:XValidation:rule="self.all(name, size(name) <= 512 && (type(self[name]) == int || size(self[name]) <= 128))",message="a name may have no more than 512 characters, and a quantity no more than 128"
	// +optional
	Allocating map[corev1.ResourceName]resource.Quantity `json:"allocating,omitempty"`

	// Allocated is the sum of the requests of pods that have a node and are not finished.
	// +kubebuilder:validation:MaxProperties=1000
	// +kubebuilder:validation:XValidation:rule="self.all(name, size(name) <= 512 && (type(self[name]) == int || size(self[name]) <= 128))",message="a name may have no more than 512 characters, and a quantity no more than 128"
	// +optional
	Allocated map[corev1.ResourceName]resource.Quantity `json:"allocated,omitempty"`

	// AllocatableModelings counts the nodes of each grade of spec.resourceModels.
	// +kubebuilder:validation:MaxItems=1000
	// +listType=atomic
	// +optional
	AllocatableModelings []AllocatableModeling `json:"allocatableModelings,omitempty"`
}

// AllocatableModeling counts the nodes of one grade.
type AllocatableModeling struct {
	// Grade is the number of the grade.
	Grade uint `json:"grade"`

	// Count is how many nodes are of it.
	Count int `json:"count"`
}

// Cluster is one cluster of the fleet. Its name may have 48 characters at most.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=clusters,scope=Cluster
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Version",type=string,JSONPath=`.status.kubernetesVersion`
// +kubebuilder:printcolumn:name="Mode",type=string,JSONPath=`.spec.syncMode`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Zones",type=string,JSONPath=`.spec.zones`,priority=1
// +kubebuilder:printcolumn:name="Region",type=string,JSONPath=`.spec.region`,priority=1
// +kubebuilder:printcolumn:name="Provider",type=string,JSONPath=`.spec.provider`,priority=1
// +kubebuilder:printcolumn:name="API-Endpoint",type=string,JSONPath=`.spec.apiEndpoint`,priority=1
// +kubebuilder:printcolumn:name="Proxy-URL",type=string,JSONPath=`.spec.proxyURL`,priority=1
// +kubebuilder:validation:XValidation:rule="size(self.metadata.name) <= 48 && !self.metadata.name.contains('.')",message="metadata.name must be a label of DNS with no more than 48 characters"
type Cluster struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitzero"`

	Spec ClusterSpec `json:"spec"`

	// Status of the cluster. Before the first report the condition Ready is Unknown.
	// +kubebuilder:default={conditions: {{type: "Ready", status: "Unknown", reason: "ClusterStatusNeverUpdated", message: "the status of the cluster is not reported yet", lastTransitionTime: "1970-01-01T00:00:00Z"}}}
	// +optional
	Status ClusterStatus `json:"status,omitzero"`
}

// ClusterList is a list of Clusters.
//
// +kubebuilder:object:root=true
type ClusterList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitzero"`
	Items           []Cluster `json:"items"`
}
