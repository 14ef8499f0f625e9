package v1alpha1

// Types of the conditions of a Cluster.
const (
	ClusterConditionReady                  = "Ready"
	ClusterConditionCompleteAPIEnablements = "CompleteAPIEnablements"
)

// Reasons of the condition Ready.
const (
	ReasonClusterReady              = "ClusterReady"              // True
	ReasonClusterNotReachable       = "ClusterNotReachable"       // False: no answer
	ReasonClusterNotReady           = "ClusterNotReady"           // False: it answers that it is not healthy
	ReasonStatusCollectionFailed    = "StatusCollectionFailed"    // False: the status of the cluster cannot be read
	ReasonRegistrationNotFinished   = "RegistrationNotFinished"   // False: the registration has not written the credentials
	ReasonClusterStatusNeverUpdated = "ClusterStatusNeverUpdated" // Unknown: there is no report yet
	ReasonClusterStatusUnknown      = "ClusterStatusUnknown"      // Unknown: reports no longer arrive
)

// Reasons of the condition CompleteAPIEnablements.
const (
	ReasonAPIEnablementsComplete = "Complete" // True
	ReasonAPIEnablementsPartial  = "Partial"  // False: some APIs did not answer
	ReasonAPIEnablementsEmpty    = "Empty"    // False: none did
)

// Taints that keep new work off a cluster.
const (
	TaintNotReady      = "cluster.karmada.io/not-ready"     // Ready is False
	TaintUnreachable   = "cluster.karmada.io/unreachable"   // Ready is Unknown
	TaintUnschedulable = "cluster.karmada.io/unschedulable" // people set it
)

// ClusterFinalizer on a Cluster lets the hub withdraw its objects from the cluster first.
const ClusterFinalizer = "karmada.io/cluster-controller"

// SystemLabel is "true" on the objects that a registration creates, on the hub and on the cluster.
const SystemLabel = "karmada.io/system"

// ExecutionSpacePrefix and the name of a Cluster make the name of the hub's namespace in which its Works live.
const ExecutionSpacePrefix = "karmada-es-"

// MaxClusterName is how many characters the name of a Cluster may have.
const MaxClusterName = 48

// Keys of the Secrets that a Cluster names.
const (
	SecretTokenKey    = "token"
	SecretCABundleKey = "caBundle"
)
