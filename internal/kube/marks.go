package kube

// FieldManager is the one field manager of every server-side apply that Towline makes.
const FieldManager = "towline"

// AgentNamespace is the namespace of the agent on a member, and of the hub's own objects: the name is fixed by the Sveltos surface.
const AgentNamespace = "projectsveltos"

// AnnotationKeep is how a chart says that an object outlives its release; "keep" is the only value that Helm knows.
const AnnotationKeep = "helm.sh/resource-policy"

// Marks on every object that Towline applies to a member, and on some of the hub. Those of the domain projectsveltos.io are fixed by the
// Sveltos surface.
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
	AnnotationAdopted        = "towline.dev/adopted"   // "true": the object existed before Towline; withdrawing strips the marks and keeps it
	AnnotationDeliveryNS     = "towline.dev/delivery-namespace"
	AnnotationDeliveryHolder = "towline.dev/delivery-cluster" // on a Namespace: the one pull-mode cluster whose deliveries live in it
)

// Marks of registration and deregistration.
const (
	// AnnotationAgentOptions on a SveltosCluster holds, as JSON, what join.AgentOptions says of a pull-mode cluster's agent.
	AnnotationAgentOptions = "towline.dev/agent-options"
	// AnnotationDeregister on a SveltosCluster or Cluster says how it is to be deregistered: any of DeregisterKeep and DeregisterForce, separated by a comma.
	AnnotationDeregister = "towline.dev/deregister"
	// AnnotationAgentOrder on a SveltosCluster that is being deleted is the hub's order to its agent; AgentOrderRemove is the only one.
	AnnotationAgentOrder = "towline.dev/agent-order"
	// AnnotationDeadline on a SveltosCluster that is deregistered by force is until when (RFC 3339) the hub waits for what it waits for now.
	AnnotationDeadline = "towline.dev/deregister-deadline"
	// AnnotationLeftBehind on a SveltosCluster that is deregistered by force lists, in JSON and for people, what the hub left on the member.
	AnnotationLeftBehind = "towline.dev/left-behind"
	// AnnotationExchanged on an agent's Lease is the uid of the Secret that the manifest's token was bound to which the agent exchanged last.
	AnnotationExchanged = "towline.dev/exchanged"
	// AnnotationUnrequested on an agent's Lease lists, as JSON, the bundles that are on the member and have no group on
	// the hub.
	AnnotationUnrequested = "towline.dev/unrequested-bundles"
	// AnnotationWithdraw on a SveltosCluster or Cluster is a person's order to withdraw what ClusterSummaries that are gone deployed there: their
	// names, separated by commas. The hub removes the annotation once nothing of them is left.
	AnnotationWithdraw = "towline.dev/withdraw"
	// AnnotationMember is the uid of the member's namespace kube-system, which tells one cluster from another: on an agent's Lease that of the
	// cluster where the agent runs, on the SveltosCluster of a push-mode cluster that of the cluster that was registered.
	AnnotationMember = "towline.dev/member"
)

// Marks of the Karmada surface that are Towline's own.
const (
	// AnnotationHub is the uid of the namespace kube-system of the hub that a Cluster, a ConfigurationGroup, or an object on a member belongs to.
	AnnotationHub = "towline.dev/hub"
	// AnnotationScope on an object of a member is the uid of the Cluster that it was deployed for, so that several hubs, or a later
	// registration, do not take each other's objects for their own.
	AnnotationScope = "towline.dev/scope"
	// AnnotationClusterID on a CertificateSigningRequest is the id of the cluster that asks to be registered: the uid of its kube-system namespace.
	AnnotationClusterID = "towline.dev/cluster-id"
	// AnnotationUntil on a CertificateSigningRequest is until when (RFC 3339) the one who asks waits for the answer.
	AnnotationUntil = "towline.dev/until"
	// AnnotationBootstrapToken on a Cluster is the id (the public part) of the bootstrap token that it was registered with.
	AnnotationBootstrapToken = "towline.dev/bootstrap-token"
	// AnnotationRegistered on the Secret of a bootstrap token says which cluster the token registered: <name>/<id>.
	AnnotationRegistered = "towline.dev/registered"
	// AnnotationApproved on a Cluster is when (RFC 3339) a certificate was last approved for its registration.
	AnnotationApproved = "towline.dev/approved"
)

// Values of AnnotationDeregister and AnnotationAgentOrder.
const (
	DeregisterKeep   = "keep-addons" // leave what is deployed on the member
	DeregisterForce  = "force"       // leave behind what cannot be reached, or does not go in time
	AgentOrderRemove = "remove"      // remove yourself from the member
	// DeregisterAbandon is added by the hub when the time of a deregistration by force is over: what is not withdrawn stays.
	DeregisterAbandon = "abandon"
)

// FinalizerCluster on a SveltosCluster lets the hub withdraw what is deployed, and take identity and credentials back, before it goes. Only a
// running hub adds it, before it does anything for the cluster.
const FinalizerCluster = "towline.dev/deregistration"
