package v1beta1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// HelmChartAction is the operation on a chart.
//
// +kubebuilder:validation:Enum:=Install;Uninstall
type HelmChartAction string

// The actions on a chart.
const (
	// HelmChartActionInstall installs the release, or upgrades it.
	HelmChartActionInstall HelmChartAction = "Install"
	// HelmChartActionUninstall uninstalls the release.
	HelmChartActionUninstall HelmChartAction = "Uninstall"
)

// RegistryCredentialsConfig configures the login to a chart repository.
type RegistryCredentialsConfig struct {
	// Credentials is a Secret with the login: a Docker config JSON, or the keys username and password.
	// +optional
	Credentials *corev1.SecretReference `json:"credentials,omitempty"`

	// Key of that Secret that holds the login. Default: found by the Secret's type.
	// +optional
	Key string `json:"key,omitempty"`

	// CA is a Secret whose key ca.crt holds the authorities that sign the repository's certificate. Default: the
	// system's authorities.
	// +optional
	CA *corev1.SecretReference `json:"ca,omitempty"`

	// InsecureSkipTLSVerify accepts any certificate of the repository. Default false.
	// +optional
	InsecureSkipTLSVerify bool `json:"insecureSkipTLSVerify,omitempty"`

	// PlainHTTP connects to an OCI registry without TLS. Default false.
	// +optional
	PlainHTTP bool `json:"plainHTTP,omitempty"`
}

// SignatureProvider selects the key or the identity that a chart's signature is checked against.
//
// +kubebuilder:validation:Enum:=PublicKey;Keyless
type SignatureProvider string

// The signature providers.
const (
	// SignatureProviderPublicKey checks against a key in a Secret.
	SignatureProviderPublicKey SignatureProvider = "PublicKey"
	// SignatureProviderKeyless checks against an identity in a certificate of Sigstore.
	SignatureProviderKeyless SignatureProvider = "Keyless"
)

// OIDCIdentityMatch accepts signatures of certain identities. Both fields are regular expressions.
type OIDCIdentityMatch struct {
	// Issuer of the identity.
	// +kubebuilder:validation:MinLength=1
	Issuer string `json:"issuer"`

	// Subject of the identity.
	// +kubebuilder:validation:MinLength=1
	Subject string `json:"subject"`
}

// SignatureVerification requires a cosign signature of a chart in an OCI registry. A chart without a valid one is not
// deployed.
type SignatureVerification struct {
	// Provider of the signature.
	Provider SignatureProvider `json:"provider"`

	// SecretRef is a Secret with the key cosign.pub, the public key, for PublicKey. For Keyless its key
	// trusted_root.json is the trust root; default: Sigstore's public one. Default namespace: the cluster's.
	// +optional
	SecretRef *corev1.SecretReference `json:"secretRef,omitempty"`

	// MatchOIDCIdentity lists identities. A signature must match one of them. Keyless needs at least one.
	// +optional
	MatchOIDCIdentity []OIDCIdentityMatch `json:"matchOIDCIdentity,omitempty"`
}

// ProvenanceVerification requires a provenance file beside a chart. A chart without a valid one is not deployed.
type ProvenanceVerification struct {
	// KeyringSecretRef is a Secret whose key keyring.gpg holds the public keys. Default namespace: the cluster's.
	// +optional
	KeyringSecretRef *corev1.SecretReference `json:"keyringSecretRef,omitempty"`
}

// HelmChart is one release to install on a cluster, or to uninstall. Every string may be a Go template.
//
// +kubebuilder:validation:XValidation:rule="!(self.repositoryURL.startsWith('http') || self.repositoryURL.startsWith('oci:')) || (has(self.repositoryName) && self.repositoryName != \"\")",message="RepositoryName must be defined"
// +kubebuilder:validation:XValidation:rule="!(self.repositoryURL.startsWith('http') || self.repositoryURL.startsWith('oci:')) || (has(self.chartName) && self.chartName != \"\")",message="ChartName must be defined"
// +kubebuilder:validation:XValidation:rule="!(self.repositoryURL.startsWith('http') || self.repositoryURL.startsWith('oci:')) || (has(self.chartVersion) && self.chartVersion != \"\")",message="ChartVersion must be defined"
type HelmChart struct {
	// RepositoryURL is the location of the chart: a repository (http, https), an OCI registry (oci), or a Flux source
	// as gitrepository://, ocirepository:// or bucket:// and <namespace>/<name>/<path>.
	// +kubebuilder:validation:MinLength=1
	RepositoryURL string `json:"repositoryURL"`

	// RepositoryName is a name for the repository, which the user chooses. Required for http, https and oci.
	// +optional
	RepositoryName string `json:"repositoryName,omitempty"`

	// ChartName of the chart, also as <repositoryName>/<chart>. Required for http, https and oci.
	// +optional
	ChartName string `json:"chartName,omitempty"`

	// ChartVersion of the chart, with or without a leading v. Required for http, https and oci.
	// +optional
	ChartVersion string `json:"chartVersion,omitempty"`

	// ReleaseName of the release.
	// +kubebuilder:validation:MinLength=1
	ReleaseName string `json:"releaseName"`

	// ReleaseNamespace of the release.
	// +kubebuilder:validation:MinLength=1
	ReleaseNamespace string `json:"releaseNamespace"`

	// Values of the chart as YAML. The feature fails if they are not YAML or do not fit the chart's schema.
	// +optional
	Values string `json:"values,omitempty"`

	// ValuesFrom are further values. They override values; a later entry overrides an earlier one.
	// +optional
	ValuesFrom []ValueFrom `json:"valuesFrom,omitempty"`

	// HelmChartAction is the operation. Default Install.
	// +kubebuilder:default:=Install
	// +optional
	HelmChartAction HelmChartAction `json:"helmChartAction,omitempty"`

	// Options of Helm.
	// +optional
	Options *HelmOptions `json:"options,omitempty"`

	// RegistryCredentialsConfig configures the login. Default: no login.
	// +optional
	RegistryCredentialsConfig *RegistryCredentialsConfig `json:"registryCredentialsConfig,omitempty"`

	// SignatureVerification requires a cosign signature. Default: none is required.
	// +optional
	SignatureVerification *SignatureVerification `json:"signatureVerification,omitempty"`

	// ProvenanceVerification requires a provenance file. Default: none is required.
	// +optional
	ProvenanceVerification *ProvenanceVerification `json:"provenanceVerification,omitempty"`
}

// PostRenderStrategy selects the objects that patches are applied to.
//
// +kubebuilder:validation:Enum:=combined;separate;nohooks
type PostRenderStrategy string

// The post-render strategies.
const (
	// PostRenderCombined patches hooks and other objects.
	PostRenderCombined PostRenderStrategy = "combined"
	// PostRenderSeparate has the same effect: each object is patched by itself.
	PostRenderSeparate PostRenderStrategy = "separate"
	// PostRenderNoHooks does not patch hooks.
	PostRenderNoHooks PostRenderStrategy = "nohooks"
)

// HelmOptions are options of every Helm operation.
type HelmOptions struct {
	// SkipCRDs does not install the chart's crds directory. Default false.
	// +kubebuilder:default:=false
	// +optional
	SkipCRDs bool `json:"skipCRDs,omitempty"`

	// SkipSchemaValidation accepts values that do not fit the chart's schema. Default false.
	// +kubebuilder:default:=false
	// +optional
	SkipSchemaValidation bool `json:"skipSchemaValidation,omitempty"`

	// Wait for the objects to be ready before the release counts as deployed. Atomic implies it. Default false.
	// +kubebuilder:default:=false
	// +optional
	Wait bool `json:"wait,omitempty"`

	// WaitForJobs waits for Jobs to complete too, if wait is set. Default false.
	// +kubebuilder:default:=false
	// +optional
	WaitForJobs bool `json:"waitForJobs,omitempty"`

	// Timeout of every hook and every wait. Default 5m; not filled in.
	// +optional
	Timeout *metav1.Duration `json:"timeout,omitempty"`

	// DisableHooks leaves all hooks of the chart out, tests among them. Default false.
	// +kubebuilder:default:=false
	// +optional
	DisableHooks bool `json:"disableHooks,omitempty"`

	// DisableOpenAPIValidation disables the check of objects against the cluster's schema. Default false. True is
	// refused: Towline makes no check of its own, and the API server always checks applied objects.
	// +kubebuilder:default:=false
	// +optional
	DisableOpenAPIValidation bool `json:"disableOpenAPIValidation,omitempty"`

	// Atomic uninstalls a failed installation and rolls back a failed upgrade. Implies wait. Default false.
	// +kubebuilder:default:=false
	// +optional
	Atomic bool `json:"atomic,omitempty"`

	// DependencyUpdate fetches subcharts that a chart lacks. Default false. True is refused: as with Helm, it works for
	// charts in directories only. An archive that lacks a subchart is refused.
	// +kubebuilder:default:=false
	// +optional
	DependencyUpdate bool `json:"dependencyUpdate,omitempty"`

	// Labels of the release record. Those that Helm sets itself (createdAt, modifiedAt, name, owner, status, version)
	// are refused.
	// +optional
	Labels map[string]string `json:"labels,omitempty"`

	// EnableClientCache keeps the Helm client of a cluster between operations. Default false. True is refused: Towline
	// deploys without a Helm client.
	// +kubebuilder:default:=false
	// +optional
	EnableClientCache bool `json:"enableClientCache,omitempty"`

	// Description of the release record.
	// +optional
	Description string `json:"description,omitempty"`

	// PassCredentialsAll sends the login to every host in the URLs of the repository. Default false: to its own host
	// only.
	// +optional
	PassCredentialsAll bool `json:"passCredentialsAll,omitempty"`

	// RunTests runs the chart's test hooks after the release is deployed. A failed test fails the release. Default
	// false.
	// +optional
	RunTests bool `json:"runTests,omitempty"`

	// PostRenderStrategy selects the objects that patches are applied to: with nohooks all but hooks. Default: combined,
	// as with Helm.
	// +optional
	PostRenderStrategy PostRenderStrategy `json:"postRenderStrategy,omitempty"`

	// InstallOptions apply to the first installation.
	// +optional
	InstallOptions *HelmInstallOptions `json:"installOptions,omitempty"`

	// UpgradeOptions apply to upgrades.
	// +optional
	UpgradeOptions *HelmUpgradeOptions `json:"upgradeOptions,omitempty"`

	// UninstallOptions apply when the release is uninstalled.
	// +optional
	UninstallOptions *HelmUninstallOptions `json:"uninstallOptions,omitempty"`
}

// HelmInstallOptions are options of the first installation. Without them the defaults of the fields apply.
type HelmInstallOptions struct {
	// CreateNamespace creates the release namespace if it is missing. Default true.
	// +kubebuilder:default:=true
	// +optional
	CreateNamespace *bool `json:"createNamespace,omitempty"`

	// Replace reuses the name of a release that was uninstalled with keepHistory. Default true. False is refused: the
	// release could not be deployed again until a person deletes its history on the cluster.
	// +kubebuilder:default:=true
	// +optional
	Replace *bool `json:"replace,omitempty"`

	// DisableHooks runs no install hooks. Default false.
	// +kubebuilder:default:=false
	// +optional
	DisableHooks bool `json:"disableHooks,omitempty"`

	// TakeOwnership adopts objects that exist and belong to no release. Default false. No effect: Towline always adopts
	// objects that no other profile manages. False cannot be distinguished from the default.
	// +kubebuilder:default:=false
	// +optional
	TakeOwnership bool `json:"takeOwnership,omitempty"`

	// RecoverAfterConsecutiveFailures is the number of failed installations in a row after which the release is
	// uninstalled before the next attempt; 0 means never. Default 5.
	// +kubebuilder:default:=5
	// +optional
	RecoverAfterConsecutiveFailures *int32 `json:"recoverAfterConsecutiveFailures,omitempty"`
}

// HelmUpgradeOptions are options of upgrades. Without them the defaults of the fields apply.
type HelmUpgradeOptions struct {
	// Force deletes an object and creates it again when an immutable field changes. Default false.
	// +kubebuilder:default:=false
	// +optional
	Force bool `json:"force,omitempty"`

	// ResetValues drops the values of the current release. Default false. Towline always does so, since the profile has
	// all values.
	// +kubebuilder:default:=false
	// +optional
	ResetValues bool `json:"resetValues,omitempty"`

	// ReuseValues keeps the values of the current release and merges the new ones into them. Default false. True is
	// refused: a release has the values of its profile on every cluster, and does not depend on earlier deployments.
	// +kubebuilder:default:=false
	// +optional
	ReuseValues bool `json:"reuseValues,omitempty"`

	// ResetThenReuseValues merges the values of the current release, and then the new ones, into the defaults of the
	// chart. Default false. True is refused, as for reuseValues.
	// +kubebuilder:default:=false
	// +optional
	ResetThenReuseValues bool `json:"resetThenReuseValues,omitempty"`

	// Recreate restarts pods. Default false. True is refused: Helm has removed it.
	// +kubebuilder:default:=false
	// +optional
	Recreate bool `json:"recreate,omitempty"`

	// MaxHistory is the number of recorded revisions of a release; 0 means no limit. Default 2.
	// +kubebuilder:default:=2
	// +optional
	MaxHistory *int32 `json:"maxHistory,omitempty"`

	// CleanupOnFail deletes the objects that a failed upgrade created. Default false.
	// +kubebuilder:default:=false
	// +optional
	CleanupOnFail bool `json:"cleanupOnFail,omitempty"`

	// SubNotes renders the notes of subcharts too. Default false.
	// +kubebuilder:default:=false
	// +optional
	SubNotes bool `json:"subNotes,omitempty"`

	// UpgradeCRDs changes existing CustomResourceDefinitions to those of the chart's crds directories. Default false: as
	// with Helm, they are created if they do not exist, and otherwise left as they are. Those in templates are always
	// applied.
	// +kubebuilder:default:=false
	// +optional
	UpgradeCRDs bool `json:"upgradeCRDs,omitempty"`

	// DisableHooks runs no upgrade hooks. Default false.
	// +kubebuilder:default:=false
	// +optional
	DisableHooks bool `json:"disableHooks,omitempty"`

	// TakeOwnership adopts objects that exist and belong to no release. Default false. No effect: Towline always adopts
	// them, as at the installation.
	// +kubebuilder:default:=false
	// +optional
	TakeOwnership bool `json:"takeOwnership,omitempty"`
}

// DeletionPropagation selects how the dependents of a deleted object are deleted.
//
// +kubebuilder:validation:Enum:=orphan;foreground;background
type DeletionPropagation string

// The ways to propagate a deletion.
const (
	// DeletionOrphan does not delete dependents.
	DeletionOrphan DeletionPropagation = "orphan"
	// DeletionForeground deletes dependents first.
	DeletionForeground DeletionPropagation = "foreground"
	// DeletionBackground deletes dependents afterwards.
	DeletionBackground DeletionPropagation = "background"
)

// HelmUninstallOptions are options of uninstalling a release. Without them the defaults of the fields apply.
type HelmUninstallOptions struct {
	// KeepHistory keeps the release records. Default false.
	// +optional
	KeepHistory bool `json:"keepHistory,omitempty"`

	// DeletionPropagation selects how dependents are deleted. Default background; not filled in.
	// +optional
	DeletionPropagation DeletionPropagation `json:"deletionPropagation,omitempty"`

	// DisableHooks runs no delete hooks. Default false.
	// +kubebuilder:default:=false
	// +optional
	DisableHooks bool `json:"disableHooks,omitempty"`
}
