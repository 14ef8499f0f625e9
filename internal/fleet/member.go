package fleet

import (
	"k8s.io/apimachinery/pkg/types"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// Mode says who dials whom.
type Mode string

// The two modes.
const (
	Push Mode = "Push" // the hub dials the member
	Pull Mode = "Pull" // an agent in the member dials the hub
)

// Type is the dialect of a member, in the words of ClusterSummary's clusterType.
type Type string

// The types of members.
const (
	TypeSveltos Type = "Sveltos" // SveltosClusters
	TypeKarmada Type = "Karmada" // Clusters of cluster.karmada.io
)

// Member is one cluster of the fleet, whatever kind of object declares it.
type Member struct {
	Type      Type
	Namespace string
	Name      string
	Labels    map[string]string
	Mode      Mode
	// Ready says that the cluster was reached once.
	Ready bool
	// Down says that the cluster is not reached now; DownMessage says what is known of the reason.
	Down        bool
	DownMessage string
	Paused      bool
	// Refused says which field of the cluster object is not acted on yet, so that nothing may be done to the cluster; "" if there is none.
	Refused string
	// Held says that a running hub looks after the cluster, so that what is deployed can be withdrawn before the cluster object goes.
	Held bool
	// Deleting says that the cluster is being deregistered. KeepAddons says that what is deployed stays on it then, Forced that what cannot
	// be reached is left behind, and Abandoned that the time of that is over: what is not withdrawn stays.
	Deleting   bool
	KeepAddons bool
	Forced     bool
	Abandoned  bool
	// Shard names the shard of hubs that looks after the cluster, "" being the default one.
	Shard string
	// KubernetesVersion is the member's raw gitVersion, "" until known.
	KubernetesVersion string
	// APIVersions lists what the member serves, as "group/version" and "group/version/Kind"; empty until known.
	APIVersions []string
	// DeliveryNamespace is the hub namespace of a pull member's groups and bundles.
	DeliveryNamespace string
	// KubeconfigSecret and KubeconfigKey say where a push member's kubeconfig is, in Namespace; an empty key means the first one.
	KubeconfigSecret string
	KubeconfigKey    string
	// Identity says how a push member without a kubeconfig is reached with the hub's own cloud identity; nil if it has a kubeconfig.
	Identity *libv1beta1.WorkloadIdentity
	// Access says how a push member of TypeKarmada is dialled; nil for every other member.
	Access *Access
	// Home is the namespace on the member in which Towline keeps what it knows of it.
	Home string
	// Scope and Hub tell what is deployed for this member from what other hubs, or earlier registrations, deployed on the same cluster: the uid
	// of the cluster object, and that of the hub. Both are empty for members of TypeSveltos.
	Scope string
	Hub   string
	// UID is the cluster object's uid: a cluster registered again under its old name is another member.
	UID string
}

// Access says how a Cluster is dialled.
type Access struct {
	// Server is the URL of its API server, ProxyURL that of the proxy on the way there, with ProxyHeader for it; empty for none.
	Server      string
	ProxyURL    string
	ProxyHeader map[string]string
	// Insecure turns the check of the server's certificate off.
	Insecure bool
	// Secret has the keys token and caBundle.
	Secret types.NamespacedName
}

// ID tells one member from all others, for as long as it is registered.
type ID struct {
	Type      Type
	Namespace string
	Name      string
}

// ID returns the ID of m.
func (m Member) ID() ID { return ID{Type: m.Type, Namespace: m.Namespace, Name: m.Name} }

// Key returns "namespace/name", which no two members that are not refused share.
func (m Member) Key() string { return m.Namespace + "/" + m.Name }

// String returns "type namespace/name".
func (i ID) String() string { return string(i.Type) + " " + i.Namespace + "/" + i.Name }

// CredentialsSecret returns "namespace/name" of the Secret that a push member is reached with, "" if there is none: that of its kubeconfig,
// of its token, or of the certificate authority beside its identity.
func (m Member) CredentialsSecret() string {
	switch {
	case m.Access != nil && m.Access.Secret.Name != "":
		return m.Access.Secret.String()
	case m.KubeconfigSecret != "":
		return m.Namespace + "/" + m.KubeconfigSecret
	case m.Identity != nil && m.Identity.CASecretRef != nil:
		return authorityAt(m).String()
	}
	return ""
}
