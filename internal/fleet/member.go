package fleet

import (
	"k8s.io/apimachinery/pkg/types"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// Mode is the direction of the connections between hub and member.
type Mode string

// The modes.
const (
	Push Mode = "Push" // the hub connects to the member
	Pull Mode = "Pull" // an agent in the member connects to the hub
	// Local is the mode for objects with deploymentType Local, which the hub applies to its own cluster: see Member.OnHub.
	Local Mode = "Local"
)

// Type is the kind of the cluster object. Its values are the values of clusterType in a ClusterSummary.
type Type string

// The types of members.
const (
	TypeSveltos Type = "Sveltos" // SveltosClusters
	TypeKarmada Type = "Karmada" // Clusters of cluster.karmada.io
)

// Member is a managed cluster of either kind.
type Member struct {
	Type      Type
	Namespace string
	Name      string
	Labels    map[string]string
	Mode      Mode
	// Ready is true once the cluster was reached.
	Ready bool
	// Down is true while the cluster is not reachable; DownMessage has the known reason.
	Down        bool
	DownMessage string
	Paused      bool
	// Refused is a message about a field of the cluster object that Towline does not support or accept, "" for none.
	// Nothing is done on a refused cluster.
	Refused string
	// HasFinalizer is true once the hub has set its finalizer (and, on a Cluster, the ID of the hub). Nothing is deployed
	// before: without the finalizer, the cluster object could be deleted before the deployed objects are removed.
	HasFinalizer bool
	// Deleting is true while the cluster is being deregistered. The next three fields are options of the deregistration.
	// KeepAddons keeps the deployed objects. With Forced the hub does not wait for an unreachable cluster. Abandoned is
	// true once the hub has stopped waiting: the remaining objects stay on the cluster.
	Deleting   bool
	KeepAddons bool
	Forced     bool
	Abandoned  bool
	// Shard is the shard of hubs that manages the cluster; "" is the default shard.
	Shard string
	// CacheMayLackObjects is true if the cluster belongs to a shard other than the default one, or did so before. The
	// cache of this hub may then lack ClusterSummaries and ConfigurationGroups that have the label of another shard.
	CacheMayLackObjects bool
	// KubernetesVersion is the gitVersion of the member; "" until known.
	KubernetesVersion string
	// APIVersions are the served APIs, as "group/version" and "group/version/Kind"; empty until known.
	APIVersions []string
	// DeliveryNamespace is the hub namespace with the groups and bundles of a pull member; "" for a push member.
	DeliveryNamespace string
	// KubeconfigSecret is the Secret in Namespace with the kubeconfig of a push member; "" for the cluster of the hub and
	// for members with Identity or Access. KubeconfigKey is its key; "" stands for the first key in alphabetical order.
	KubeconfigSecret string
	KubeconfigKey    string
	// Identity is set for push members that the hub accesses with its cloud identity; nil for all others.
	Identity *libv1beta1.WorkloadIdentity
	// Access is set for push members of TypeKarmada; nil for all others.
	Access *Access
	// MemberNamespace is the namespace with the inventories on the member.
	MemberNamespace string
	// Scope is the same as UID, and Hub is the ID of the hub. Both are empty for members of TypeSveltos. They are written
	// to the inventories and the annotations of deployed objects, to distinguish these from the objects of earlier
	// registrations and of other hubs.
	Scope string
	Hub   string
	// UID is the UID of the cluster object, for both types. Another registration under the same name has another UID.
	UID string
}

// Access is the information to connect to a Cluster.
type Access struct {
	// Server is the URL of the API server. ProxyURL is the URL of a proxy, "" for none, and ProxyHeader has the headers
	// for it.
	Server      string
	ProxyURL    string
	ProxyHeader map[string]string
	// Insecure disables the verification of the server's certificate.
	Insecure bool
	// Secret is the Secret with the keys token and caBundle.
	Secret types.NamespacedName
}

// ID identifies a member while it is registered. It is comparable, for use as a map key.
type ID struct {
	Type      Type
	Namespace string
	Name      string
}

// ID returns the ID of m.
func (m Member) ID() ID { return ID{Type: m.Type, Namespace: m.Namespace, Name: m.Name} }

// Key returns "namespace/name". It is unique among members that are not refused: a SveltosCluster in an execution space
// is refused.
func (m Member) Key() string { return m.Namespace + "/" + m.Name }

// OnHub returns m with the mode Local: the target for objects that a profile deploys to the cluster of the hub for
// each matching cluster, here m. That needs neither an agent nor a connection to m.
func (m Member) OnHub() Member {
	m.Mode = Local
	return m
}

// String returns "type namespace/name".
func (i ID) String() string { return string(i.Type) + " " + i.Namespace + "/" + i.Name }

// CredentialsSecret returns "namespace/name" of the Secret with the credentials of a push member: the token, the
// kubeconfig, or the certificate authority for its identity. It returns "" if there is none.
func (m Member) CredentialsSecret() string {
	switch {
	case m.Access != nil && m.Access.Secret.Name != "":
		return m.Access.Secret.String()
	case m.KubeconfigSecret != "":
		return m.Namespace + "/" + m.KubeconfigSecret
	case m.Identity != nil && m.Identity.CASecretRef != nil:
		return authoritySecret(m).String()
	}
	return ""
}
