package v1beta1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// SourceKind is a kind that can hold content for a profile.
//
// +kubebuilder:validation:Enum:=GitRepository;OCIRepository;Bucket;ConfigMap;Secret
type SourceKind string

// The kinds that hold content.
const (
	// SourceConfigMap is a ConfigMap.
	SourceConfigMap SourceKind = "ConfigMap"
	// SourceSecret is a Secret of type ProfileSecretType.
	SourceSecret SourceKind = "Secret"
	// SourceGitRepository is a GitRepository of Flux.
	SourceGitRepository SourceKind = "GitRepository"
	// SourceOCIRepository is an OCIRepository of Flux.
	SourceOCIRepository SourceKind = "OCIRepository"
	// SourceBucket is a Bucket of Flux.
	SourceBucket SourceKind = "Bucket"
)

// DeploymentType is the cluster to which content is deployed.
//
// +kubebuilder:validation:Enum:=Local;Remote
type DeploymentType string

// The deployment types.
const (
	// DeploymentTypeLocal is the hub.
	DeploymentTypeLocal DeploymentType = "Local"
	// DeploymentTypeRemote is the matching cluster.
	DeploymentTypeRemote DeploymentType = "Remote"
)

// RemoteSource is content behind a URL, fetched by the hub.
type RemoteSource struct {
	// URL of a file or an archive (tar, tar.gz, zip), of an artifact (oci://host/path:tag or @digest), or of a Git
	// repository (git+https://host/path?ref=<branch, tag or commit>&path=<directory>, or git+ssh). May be a Go template. A
	// URL that cannot be fetched fails the feature and is tried again.
	// +kubebuilder:validation:Pattern=`^(https?|oci|git\+(https?|ssh))://`
	URL string `json:"url"`

	// Interval after which the URL is read again, at least 1s. Default 5m. With several users, the shortest one counts.
	// +kubebuilder:default:="5m"
	// +optional
	Interval *metav1.Duration `json:"interval,omitempty"`

	// SecretRef is a Secret on the hub with the key token, or username and password, and optionally caFile. For git+ssh,
	// identity and known_hosts. Namespace and name may be Go templates.
	// +optional
	SecretRef *corev1.SecretReference `json:"secretRef,omitempty"`

	// InsecureSkipTLSVerify accepts any certificate of the server. Default false.
	// +optional
	InsecureSkipTLSVerify bool `json:"insecureSkipTLSVerify,omitempty"`

	// PlainHTTP talks to an OCI registry without TLS. Default false. Only for oci.
	// +optional
	PlainHTTP bool `json:"plainHTTP,omitempty"`
}

// RemoteURL is a RemoteSource of plain objects.
type RemoteURL struct {
	RemoteSource `json:",inline"`

	// Template is true if the content is a Go template. Default false.
	// +optional
	Template bool `json:"template,omitempty"`
}

// PolicyRef points at Kubernetes objects to deploy: either an object on the hub that holds them, or a URL.
//
// +kubebuilder:validation:XValidation:rule="has(self.remoteURL) != has(self.kind)",message="either remoteURL or kind must be set, but not both"
type PolicyRef struct {
	// Namespace of the referenced object. May be a Go template. Default: the namespace of the matching cluster for a
	// ClusterProfile, of the profile for a Profile.
	// +optional
	Namespace string `json:"namespace,omitempty"`

	// Name of the referenced object. May be a Go template. Required with kind, or the profile is refused.
	// +optional
	Name string `json:"name,omitempty"`

	// Kind of the referenced object. Of a ConfigMap or Secret every data key is a YAML stream of objects, or an archive
	// (tar, tar.gz, zip) of such files.
	// +optional
	Kind SourceKind `json:"kind,omitempty"`

	// Path of the directory to use, for the Flux kinds and for the files of a remoteURL. It has no effect on a ConfigMap
	// or a Secret. May be a Go template. Default: the root.
	// +optional
	Path string `json:"path,omitempty"`

	// DeploymentType is the cluster to which the objects are deployed. Default Remote.
	// +kubebuilder:default:=Remote
	// +optional
	DeploymentType DeploymentType `json:"deploymentType,omitempty"`

	// Optional makes a missing object no error. Default false.
	// +optional
	Optional bool `json:"optional,omitempty"`

	// Tier decides between references of one profile that hold the same object: the lowest wins. Default 100.
	// +kubebuilder:default:=100
	// +kubebuilder:validation:Minimum=1
	// +optional
	Tier int32 `json:"tier,omitempty"`

	// SkipNamespaceCreation leaves it to others to create the namespaces of the objects; a missing one is then an error.
	// Default false.
	// +optional
	SkipNamespaceCreation bool `json:"skipNamespaceCreation,omitempty"`

	// Force deletes and creates an object whose immutable field changed. Default false: such a change is an error.
	// +optional
	Force bool `json:"force,omitempty"`

	// RemoteURL is where the content is, instead of kind.
	// +optional
	RemoteURL *RemoteURL `json:"remoteURL,omitempty"`
}
