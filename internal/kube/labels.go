package kube

import "strings"

// FieldManager is the field manager of all write requests of Towline.
const FieldManager = "towline"

// AgentNamespace is the namespace of the agent on a member, and of the hub's own objects. Its name is the same as in
// Sveltos.
const AgentNamespace = "projectsveltos"

// AnnotationKeep with the value "keep" keeps an object when its Helm release is uninstalled.
const AnnotationKeep = "helm.sh/resource-policy"

// The ownership labels and annotations on every object that Towline applies to a member, and on some objects of the
// hub. Names of the domain projectsveltos.io are the same as in Sveltos.
const (
	LabelReason              = "projectsveltos.io/reason" // the feature that deployed the object
	AnnotationReferenceKind  = "projectsveltos.io/reference-kind"
	AnnotationReferenceNS    = "projectsveltos.io/reference-namespace"
	AnnotationReferenceName  = "projectsveltos.io/reference-name"
	AnnotationReferenceTier  = "projectsveltos.io/reference-tier"
	AnnotationHash           = "projectsveltos.io/hash" // sha256:<hex> of the object as it was rendered
	AnnotationOwnerKind      = "projectsveltos.io/owner-kind"
	AnnotationOwnerName      = "projectsveltos.io/owner-name"
	AnnotationOwnerTier      = "projectsveltos.io/owner-tier"
	AnnotationDriftIgnore    = "projectsveltos.io/driftDetectionIgnore"
	AnnotationForceRecreate  = "projectsveltos.io/forceRecreate"
	AnnotationRequestor      = "towline.dev/requestor" // bundle.ID of the bundle that the object belongs to
	AnnotationAdopted        = "towline.dev/adopted"   // "true": the object existed before; it stays when the bundle is withdrawn
	AnnotationDeliveryNS     = "towline.dev/delivery-namespace"
	AnnotationDeliveryHolder = "towline.dev/delivery-cluster" // on a Namespace: the pull-mode cluster whose deliveries it has
)

// IsReservedKey returns whether only Towline may set a label or an annotation with this key on an object of a member.
func IsReservedKey(key string) bool {
	switch key {
	case LabelReason, AnnotationReferenceKind, AnnotationReferenceNS, AnnotationReferenceName, AnnotationReferenceTier,
		AnnotationHash, AnnotationOwnerKind, AnnotationOwnerName, AnnotationOwnerTier:
		return true
	}
	return strings.HasPrefix(key, "towline.dev/")
}

// Annotations for registration and deregistration.
const (
	// AnnotationAgentOptions on a SveltosCluster has the join.AgentOptions of a pull-mode cluster's agent as JSON.
	AnnotationAgentOptions = "towline.dev/agent-options"
	// AnnotationDeregister on a SveltosCluster or Cluster has options for its deregistration: DeregisterKeep and
	// DeregisterForce, separated by a comma.
	AnnotationDeregister = "towline.dev/deregister"
	// AnnotationAgentRequest on a SveltosCluster or a pull-mode Cluster that is being deleted is the hub's request to its
	// agent: AgentRequestRemove. The agent of a Cluster answers with the same annotation on its Lease. On a push-mode
	// Cluster it records that the hub's account on the member is deleted.
	AnnotationAgentRequest = "towline.dev/agent-order"
	// AnnotationDeadline on a SveltosCluster that is deregistered by force is the time (RFC 3339) until which the hub
	// waits in the current step.
	AnnotationDeadline = "towline.dev/deregister-deadline"
	// AnnotationLeftBehind on a SveltosCluster or Cluster that is being deleted lists the objects that stay on the member,
	// as JSON.
	AnnotationLeftBehind = "towline.dev/left-behind"
	// AnnotationExchanged on an agent's Lease is the uid of the hub's Secret to which the token in the agent's manifest
	// was bound. The agent sets it after it has exchanged the token, and the hub then deletes the Secret.
	AnnotationExchanged = "towline.dev/exchanged"
	// AnnotationUnrequested on an agent's Lease lists, as JSON, the bundles that are on the member and have no group on
	// the hub.
	AnnotationUnrequested = "towline.dev/unrequested-bundles"
	// AnnotationDecrypts on an agent's Lease is the holderIdentity of the agent if it can read encrypted content. An agent
	// of an earlier version writes its holderIdentity and does not change the annotation, so that the two differ.
	AnnotationDecrypts = "towline.dev/decrypts-content"
	// AnnotationWithdraw on a SveltosCluster or Cluster is a user's request to withdraw the objects of ClusterSummaries
	// that are deleted or belong to another hub: their names, separated by commas. The hub removes the annotation when
	// the objects are withdrawn.
	AnnotationWithdraw = "towline.dev/withdraw"
	// AnnotationMember is the uid of the member's namespace kube-system, which identifies the cluster. On an agent's Lease
	// it is the cluster where the agent runs, on the SveltosCluster of a push-mode cluster the registered cluster.
	AnnotationMember = "towline.dev/member"
	// AnnotationLabelledShard on a SveltosCluster or Cluster is the shard whose label all ClusterSummaries and
	// ConfigurationGroups of the cluster have, see fleet.Shard.SeesAll. Without it they have no label of a shard.
	AnnotationLabelledShard = "towline.dev/labelled-shard"
)

// AnnotationAllowedHosts on a Secret of the hub names the servers to which its credentials may be sent: host or
// host:port, separated by commas.
const AnnotationAllowedHosts = "towline.dev/allowed-hosts"

// Towline's own annotations for clusters of the Karmada API.
const (
	// AnnotationHub is the uid of the namespace kube-system of the hub that a Cluster, a ConfigurationGroup, or an object
	// on a member belongs to.
	AnnotationHub = "towline.dev/hub"
	// AnnotationScope on an object of a member is the uid of the Cluster that it was deployed for. It distinguishes
	// objects of several hubs and registrations.
	AnnotationScope = "towline.dev/scope"
	// AnnotationClusterID on a CertificateSigningRequest is the id of the cluster to register: the uid of its kube-system
	// namespace.
	AnnotationClusterID = "towline.dev/cluster-id"
	// AnnotationUntil on a CertificateSigningRequest is the time (RFC 3339) until which the requester waits.
	AnnotationUntil = "towline.dev/until"
	// AnnotationBootstrapToken on a Cluster is the id (the public part) of the bootstrap token that it was registered
	// with.
	AnnotationBootstrapToken = "towline.dev/bootstrap-token"
	// AnnotationRegistered on the Secret of a bootstrap token is the registered cluster: <name>/<id>.
	AnnotationRegistered = "towline.dev/registered"
	// AnnotationFirstUse on the Secret of a bootstrap token is the time (RFC 3339) of its first use. A Cluster that was
	// registered with the token also has the annotation until the registration is complete.
	AnnotationFirstUse = "towline.dev/registered-since"
)

// Values of AnnotationDeregister and AnnotationAgentRequest.
const (
	DeregisterKeep     = "keep-addons" // keep the deployed objects on the member
	DeregisterForce    = "force"       // keep objects that cannot be reached or are not deleted in time
	AgentRequestRemove = "remove"      // the agent must remove itself from the member
	// DeregisterAbandon is added by the hub after the deadline of a deregistration by force. Objects that are not
	// withdrawn by then stay.
	DeregisterAbandon = "abandon"
)

// FinalizerCluster on a SveltosCluster lets the hub withdraw the deployed objects and delete the identity and the
// credentials first. Only a running hub adds it, before it does anything for the cluster.
const FinalizerCluster = "towline.dev/deregistration"

// LabelAgentPatches on a ConfigMap of the hub, with the value "true", lets clusters in other namespaces use it as the
// patches of their agents' manifests.
const LabelAgentPatches = "towline.dev/agent-patches"
