package v1beta1

import corev1 "k8s.io/api/core/v1"

// WorkloadIdentityProvider issues the hub's identity.
//
// +kubebuilder:validation:Enum:=AWS;GCP;Azure;OIDC
type WorkloadIdentityProvider string

// The providers of a workload identity.
const (
	// WorkloadIdentityAWS is an IAM role, for EKS.
	WorkloadIdentityAWS WorkloadIdentityProvider = "AWS"
	// WorkloadIdentityGCP is a Google service account, for GKE.
	WorkloadIdentityGCP WorkloadIdentityProvider = "GCP"
	// WorkloadIdentityAzure is a federated Entra identity, for AKS.
	WorkloadIdentityAzure WorkloadIdentityProvider = "Azure"
	// WorkloadIdentityOIDC is a client of any OpenID Connect provider.
	WorkloadIdentityOIDC WorkloadIdentityProvider = "OIDC"
)

// WorkloadIdentity reaches a cluster with short-lived credentials from an identity provider. The part that belongs to
// the provider must be set, and no other.
//
// +kubebuilder:validation:XValidation:rule="(self.provider == \"AWS\") == has(self.aws)",message="aws must be set if and only if provider is AWS"
// +kubebuilder:validation:XValidation:rule="(self.provider == \"GCP\") == has(self.gcp)",message="gcp must be set if and only if provider is GCP"
// +kubebuilder:validation:XValidation:rule="(self.provider == \"Azure\") == has(self.azure)",message="azure must be set if and only if provider is Azure"
// +kubebuilder:validation:XValidation:rule="(self.provider == \"OIDC\") == has(self.oidc)",message="oidc must be set if and only if provider is OIDC"
type WorkloadIdentity struct {
	// Provider of the identity.
	Provider WorkloadIdentityProvider `json:"provider"`

	// Endpoint is the URL of the cluster's API server.
	// +kubebuilder:validation:MinLength=1
	Endpoint string `json:"endpoint"`

	// CASecretRef is a Secret in the namespace of the SveltosCluster, whose key ca.crt signs the API server's certificate.
	// Default: the system's authorities.
	// +optional
	CASecretRef *corev1.SecretReference `json:"caSecretRef,omitempty"`

	// AWS identifies an EKS cluster.
	// +optional
	AWS *AWSIdentity `json:"aws,omitempty"`

	// GCP identifies a GKE cluster.
	// +optional
	GCP *GCPIdentity `json:"gcp,omitempty"`

	// Azure identifies an AKS cluster.
	// +optional
	Azure *AzureIdentity `json:"azure,omitempty"`

	// OIDC names an identity provider and the client to be there.
	// +optional
	OIDC *OIDCIdentity `json:"oidc,omitempty"`
}

// AWSIdentity identifies an EKS cluster and the role to reach it with.
type AWSIdentity struct {
	// ClusterName in EKS; needed to get a token.
	// +optional
	ClusterName string `json:"clusterName,omitempty"`

	// RoleARN is the role to assume. Default: the hub's own role.
	// +optional
	RoleARN string `json:"roleARN,omitempty"`

	// Region of the cluster. Default: the hub's environment variable AWS_REGION.
	// +optional
	Region string `json:"region,omitempty"`
}

// GCPIdentity identifies a GKE cluster, for people: the hub's token is good for every cluster that lets the hub in.
type GCPIdentity struct {
	// ProjectID of the cluster.
	// +optional
	ProjectID string `json:"projectID,omitempty"`

	// ClusterName in GKE.
	// +optional
	ClusterName string `json:"clusterName,omitempty"`

	// Location is the region or zone of the cluster.
	// +optional
	Location string `json:"location,omitempty"`
}

// AzureIdentity identifies an AKS cluster and the application to reach it as.
type AzureIdentity struct {
	// TenantID of the directory; needed to get a token.
	// +optional
	TenantID string `json:"tenantID,omitempty"`

	// ClientID of the managed identity or application; needed to get a token.
	// +optional
	ClientID string `json:"clientID,omitempty"`

	// SubscriptionID the cluster is in.
	// +optional
	SubscriptionID string `json:"subscriptionID,omitempty"`

	// ResourceGroup the cluster is in.
	// +optional
	ResourceGroup string `json:"resourceGroup,omitempty"`

	// ClusterName in AKS.
	// +optional
	ClusterName string `json:"clusterName,omitempty"`
}

// OIDCIdentity is a client of an OpenID Connect provider; it uses the client credentials grant.
type OIDCIdentity struct {
	// TokenURL of the provider; needed to get a token.
	// +optional
	TokenURL string `json:"tokenURL,omitempty"`

	// SecretRef is a Secret with the keys client_id and client_secret; needed to get a token.
	// +optional
	SecretRef *corev1.SecretReference `json:"secretRef,omitempty"`

	// Scopes to ask for. Default: none.
	// +optional
	Scopes []string `json:"scopes,omitempty"`

	// CASecretRef is a Secret whose key ca.crt signs the provider's certificate. Default: the system's authorities.
	// +optional
	CASecretRef *corev1.SecretReference `json:"caSecretRef,omitempty"`
}
