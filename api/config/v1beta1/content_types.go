package v1beta1

import (
	corev1 "k8s.io/api/core/v1"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// ValueFromKind is a kind that can hold values or patches.
//
// +kubebuilder:validation:Enum:=ConfigMap;Secret
type ValueFromKind string

// The kinds that hold values.
const (
	// ValueFromConfigMap is a ConfigMap.
	ValueFromConfigMap ValueFromKind = "ConfigMap"
	// ValueFromSecret is a Secret of type addons.projectsveltos.io/cluster-profile.
	ValueFromSecret ValueFromKind = "Secret"
)

// ValueFrom points at a ConfigMap or Secret on the hub. Its keys are used in sorted order.
type ValueFrom struct {
	// Namespace of the object. May be a Go template. Default: the namespace of the matching cluster for a ClusterProfile,
	// of the profile for a Profile.
	// +optional
	Namespace string `json:"namespace,omitempty"`

	// Name of the object. May be a Go template.
	// +kubebuilder:validation:MinLength=1
	Name string `json:"name"`

	// Kind of the object.
	Kind ValueFromKind `json:"kind"`

	// Optional makes a missing object no error. Default false.
	// +kubebuilder:default:=false
	// +optional
	Optional bool `json:"optional,omitempty"`
}

// KustomizationRef points at a kustomization to build and deploy.
//
// +kubebuilder:validation:XValidation:rule="has(self.remoteURL) != has(self.kind)",message="either remoteURL or kind must be set, but not both"
type KustomizationRef struct {
	// Namespace of the referenced object. May be a Go template. Default: the namespace of the matching cluster for a
	// ClusterProfile, of the profile for a Profile.
	// +optional
	Namespace string `json:"namespace,omitempty"`

	// Name of the referenced object. May be a Go template. Required with kind, or the profile is refused.
	// +optional
	Name string `json:"name,omitempty"`

	// Kind of the referenced object. A ConfigMap or Secret holds an archive (tar, tar.gz or zip) under the key
	// kustomize.tar.gz, or as its only key; otherwise its keys are the files of the kustomization.
	// +optional
	Kind libv1beta1.SourceKind `json:"kind,omitempty"`

	// Path of the directory that holds the kustomization. May be a Go template. Default: the root.
	// +optional
	Path string `json:"path,omitempty"`

	// Components are directories of further kustomize components, relative to path. May be Go templates.
	// +optional
	Components []string `json:"components,omitempty"`

	// Optional makes a missing object no error. Default false.
	// +kubebuilder:default:=false
	// +optional
	Optional bool `json:"optional,omitempty"`

	// TargetNamespace overrides the namespace of every object. Default: left as they are.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +optional
	TargetNamespace string `json:"targetNamespace,omitempty"`

	// DeploymentType is the cluster to which the objects are deployed. Default Remote.
	// +kubebuilder:default:=Remote
	// +optional
	DeploymentType libv1beta1.DeploymentType `json:"deploymentType,omitempty"`

	// Values are substituted in the built objects, which are Go templates: {{ .key }} is the value of a key. The
	// values may be Go templates too. Without values and valuesFrom, the objects are no templates.
	// +optional
	Values map[string]string `json:"values,omitempty"`

	// ValuesFrom are further values: each key of the object is a value. They override values, and later ones earlier ones.
	// +optional
	ValuesFrom []ValueFrom `json:"valuesFrom,omitempty"`

	// Tier decides between references of one profile that hold the same object: the lowest wins. Default 100.
	// +kubebuilder:default:=100
	// +kubebuilder:validation:Minimum=1
	// +optional
	Tier int32 `json:"tier,omitempty"`

	// SkipNamespaceCreation leaves it to others to create the namespaces of the objects; a missing one is then an error.
	// Default false.
	// +kubebuilder:default:=false
	// +optional
	SkipNamespaceCreation bool `json:"skipNamespaceCreation,omitempty"`

	// Force deletes and creates an object whose immutable field changed. Default false: such a change is an error.
	// +kubebuilder:default:=false
	// +optional
	Force bool `json:"force,omitempty"`

	// RemoteURL is where the kustomization is, instead of kind.
	// +optional
	RemoteURL *libv1beta1.RemoteSource `json:"remoteURL,omitempty"`
}

// TemplateResourceRef makes an object of the hub available to templates.
type TemplateResourceRef struct {
	// Resource is the object. Its namespace and name may be Go templates. The namespace defaults to the namespace of the
	// cluster. The fields uid, resourceVersion and fieldPath have no effect: the object with the name is read, as it is.
	Resource corev1.ObjectReference `json:"resource"`

	// Identifier under which templates find it, as .MgmtResources.<identifier>.
	Identifier string `json:"identifier"`

	// Optional makes a missing object no error. Default false.
	// +kubebuilder:default:=false
	// +optional
	Optional bool `json:"optional,omitempty"`

	// IgnoreStatusChanges does not render again after a change of the object's status only. Default false.
	// +kubebuilder:default:=false
	// +optional
	IgnoreStatusChanges bool `json:"ignoreStatusChanges,omitempty"`

	// WatchFields are the paths in the object whose changes count. Default: every change counts.
	// +optional
	WatchFields []string `json:"watchFields,omitempty"`
}
