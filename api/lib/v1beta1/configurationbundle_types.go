package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ConfigurationBundleSpec is a piece of content on its way to a member. Its documents are in resources or, compressed,
// in payload.
type ConfigurationBundleSpec struct {
	// Resources are Kubernetes objects to apply, each one document of YAML or JSON. Not read if payload is set.
	// +listType=atomic
	// +optional
	Resources []string `json:"resources,omitempty"`

	// Payload holds the same documents as one zstd frame around a YAML stream: the documents in order, separated by lines
	// of three dashes. One that does not decompress or does not parse is an error and changes nothing. Towline's own
	// field.
	// +optional
	Payload []byte `json:"payload,omitempty"`

	// NotTracked applies the objects without ownership: they raise no conflict and are never pruned. Default false.
	// +optional
	NotTracked bool `json:"notTracked,omitempty"`

	// Timeout of waits for the objects. Default: the agent's.
	// +optional
	Timeout *metav1.Duration `json:"timeout,omitempty"`

	// HelmReleaseNamespace is the namespace of the Helm release the objects belong to, if any.
	// +optional
	HelmReleaseNamespace string `json:"helmReleaseNamespace,omitempty"`

	// HelmReleaseName is the name of that release.
	// +optional
	HelmReleaseName string `json:"helmReleaseName,omitempty"`

	// HelmChartVersion is the version of that release's chart.
	// +optional
	HelmChartVersion string `json:"helmChartVersion,omitempty"`

	// HelmIcon is the URL of that chart's icon.
	// +optional
	HelmIcon string `json:"helmIcon,omitempty"`

	// HelmRepoURL is the repository of that chart.
	// +optional
	HelmRepoURL string `json:"helmRepoURL,omitempty"`

	// HelmReleaseUninstall is true if the objects are part of the uninstallation of the release. Default false.
	// +kubebuilder:default:=false
	// +optional
	HelmReleaseUninstall bool `json:"helmReleaseUninstall,omitempty"`

	// IsLastHelmReleaseBundle is true for the last bundle of a release. Obsolete objects may be pruned after it. Default
	// false.
	// +kubebuilder:default:=false
	// +optional
	IsLastHelmReleaseBundle bool `json:"isLastHelmReleaseBundle,omitempty"`

	// ReferencedObjectKind is the kind of the object on the hub that held the content, for instance ConfigMap.
	// +optional
	ReferencedObjectKind string `json:"referencedObjectKind,omitempty"`

	// ReferencedObjectNamespace is the namespace of that object.
	// +optional
	ReferencedObjectNamespace string `json:"referencedObjectNamespace,omitempty"`

	// ReferencedObjectName is the name of that object.
	// +optional
	ReferencedObjectName string `json:"referencedObjectName,omitempty"`

	// ReferenceTier is the tier of the reference within its profile; 0 means not known.
	// +optional
	ReferenceTier int32 `json:"referenceTier,omitempty"`

	// SkipNamespaceCreation leaves it to others to create the namespaces of the objects. Default false.
	// +kubebuilder:default:=false
	// +optional
	SkipNamespaceCreation bool `json:"skipNamespaceCreation,omitempty"`

	// Force deletes and creates an object whose immutable field changed. Default false.
	// +kubebuilder:default:=false
	// +optional
	Force bool `json:"force,omitempty"`
}

// ConfigurationBundleStatus identifies the content of a bundle.
type ConfigurationBundleStatus struct {
	// Hash of the content, as in the group's item. May be absent.
	// +optional
	Hash []byte `json:"hash,omitempty"`
}

// ConfigurationBundle is content that a ConfigurationGroup points at.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=configurationbundles,scope=Namespaced
// +kubebuilder:storageversion
// +kubebuilder:subresource:status
type ConfigurationBundle struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// Spec is the content.
	Spec ConfigurationBundleSpec `json:"spec,omitzero"`
	// Status identifies the content.
	Status ConfigurationBundleStatus `json:"status,omitzero"`
}

// ConfigurationBundleList is a list of bundles.
//
// +kubebuilder:object:root=true
type ConfigurationBundleList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitzero"`

	// Items are the bundles.
	Items []ConfigurationBundle `json:"items"`
}
