package v1beta1

import corev1 "k8s.io/api/core/v1"

// Labels and annotations on SveltosCluster.
const (
	// KubernetesVersionLabel carries a push-mode cluster's version as v<major>.<minor>.<patch>, without build metadata.
	KubernetesVersionLabel = "projectsveltos.io/k8s-version"
	// AgentLabel has the value AgentLabelPresent on clusters in which an evaluation agent runs.
	AgentLabel = "sveltos-agent"
	// AgentLabelPresent is the only value of AgentLabel.
	AgentLabelPresent = "present"
	// ShardAnnotation names the shard of controllers that looks after the cluster; absent means the default shard.
	ShardAnnotation = "sharding.projectsveltos.io/key"
	// AgentConfigAnnotation is <namespace>/<name> of a ConfigMap with patches for the pull agent's own manifest.
	AgentConfigAnnotation = "sveltosapplier.projectsveltos.io/config-override-ref"
)

// Labels on objects that belong to one cluster, such as ClusterSummary and ClusterConfiguration.
const (
	// ClusterNameLabel carries the cluster's name.
	ClusterNameLabel = "projectsveltos.io/cluster-name"
	// ClusterTypeLabel carries the cluster's ClusterType.
	ClusterTypeLabel = "projectsveltos.io/cluster-type"
	// ServiceAccountNameLabel on a profile names the ServiceAccount in the member to deploy as.
	ServiceAccountNameLabel = "projectsveltos.io/serviceaccount-name"
	// ServiceAccountNamespaceLabel is the namespace of the ServiceAccount in ServiceAccountNameLabel.
	ServiceAccountNamespaceLabel = "projectsveltos.io/serviceaccount-namespace"
)

// Labels and annotations on ConfigurationGroup and ConfigurationBundle. Together with the namespace they identify one
// group.
const (
	// PullClusterNameLabel carries the name of the cluster the object is for; an agent selects its work by it.
	PullClusterNameLabel = "pullmode.projectsveltos.io/clustername"
	// PullRequestorKindLabel carries the kind that asked for the delivery, for instance ClusterSummary.
	PullRequestorKindLabel = "pullmode.projectsveltos.io/requestorkind"
	// PullRequestorFeatureLabel carries the FeatureID the delivery is for.
	PullRequestorFeatureLabel = "pullmode.projectsveltos.io/requestorfeature"
	// PullRequestorNameAnnotation carries the requestor's name; an annotation, since it may exceed 63 characters.
	PullRequestorNameAnnotation = "pullmode.projectsveltos.io/requestorname"
	// PullIndexAnnotation on a bundle distinguishes the bundles of one group.
	PullIndexAnnotation = "pullmode.projectsveltos.io/index"
)

// Ownership marks on every object deployed to a member; they decide conflicts between profiles.
const (
	// ReasonLabel carries the FeatureID an object was deployed for.
	ReasonLabel = "projectsveltos.io/reason"
	// ReferenceKindAnnotation, -Namespace and -Name identify the object that held the content, for instance a ConfigMap.
	ReferenceKindAnnotation = "projectsveltos.io/reference-kind"
	// ReferenceNamespaceAnnotation: see ReferenceKindAnnotation.
	ReferenceNamespaceAnnotation = "projectsveltos.io/reference-namespace"
	// ReferenceNameAnnotation: see ReferenceKindAnnotation.
	ReferenceNameAnnotation = "projectsveltos.io/reference-name"
	// ReferenceTierAnnotation is the decimal tier of the reference within its profile.
	ReferenceTierAnnotation = "projectsveltos.io/reference-tier"
	// HashAnnotation is "sha256:" and the hex digest of the object as delivered.
	HashAnnotation = "projectsveltos.io/hash"
	// OwnerKindAnnotation is the kind of the profile the object belongs to.
	OwnerKindAnnotation = "projectsveltos.io/owner-kind"
	// OwnerNameAnnotation is the name of the profile the object belongs to.
	OwnerNameAnnotation = "projectsveltos.io/owner-name"
	// OwnerTierAnnotation is the decimal tier of the profile the object belongs to.
	OwnerTierAnnotation = "projectsveltos.io/owner-tier"
)

// Annotations that users set on content or on objects that refer to it. Unless noted, only their presence counts.
const (
	// TemplateAnnotation marks a ConfigMap or Secret whose content is a Go template.
	TemplateAnnotation = "projectsveltos.io/template"
	// LuaAnnotation marks a ConfigMap or Secret whose content is a Lua script that makes objects.
	LuaAnnotation = "projectsveltos.io/lua"
	// SubresourcesAnnotation is a comma-separated list of subresources to apply along with the objects of a ConfigMap or
	// Secret.
	SubresourcesAnnotation = "projectsveltos.io/subresources"
	// TextTemplateAnnotation on a profile turns off HTML escaping in template functions.
	TextTemplateAnnotation = "projectsveltos.io/tex-template"
	// ProfilePausedAnnotation on a profile suspends it.
	ProfilePausedAnnotation = "profile.projectsveltos.io/paused"
	// IgnoreDriftAnnotation exempts a deployed object from drift detection.
	IgnoreDriftAnnotation = "projectsveltos.io/driftDetectionIgnore"
	// ForceRecreateAnnotation allows to delete a deployed object and to create it again if an immutable field changes.
	ForceRecreateAnnotation = "projectsveltos.io/forceRecreate"
	// CheckNameAnnotation on a Job names the check it runs for.
	CheckNameAnnotation = "validatehealth.projectsveltos.io/check-name"
)

// ProfileSecretType is the type a Secret must have to be used as the content of a profile.
const ProfileSecretType corev1.SecretType = "addons.projectsveltos.io/cluster-profile"

// ConditionUnclaimedBundles on a SveltosCluster or Cluster is True while the cluster holds bundles that no
// ClusterSummary of the hub accounts for and that the hub keeps, since no user has requested to withdraw them. Its
// message lists them, with the command that withdraws them. It is absent otherwise. Towline's own.
const ConditionUnclaimedBundles = "UnclaimedBundles"
