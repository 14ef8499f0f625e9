package bootstrap

import (
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
)

// Names that are the same as in Karmada.
const (
	// AgentsGroup is the group, and the one organisation of the certificates, of all agents.
	AgentsGroup = "system:karmada:agents"
	// AgentUserPrefix and the name of its Cluster are the user of an agent, and the common name of its certificate.
	AgentUserPrefix = "system:karmada:agent:"
	// DefaultTokenGroup is the group of bootstrap tokens for registrations.
	DefaultTokenGroup = "system:bootstrappers:karmada:default-cluster-token"
	// TokenUserPrefix and the id of a bootstrap token are the user of its holder.
	TokenUserPrefix = "system:bootstrap:"
	// Signer is the signer of the certificates of agents.
	Signer = certificatesv1.KubeAPIServerClientSignerName
)

const (
	// clusterGroupPrefix and the name of a Cluster are the group of the tokens for that Cluster.
	clusterGroupPrefix = "system:bootstrappers:karmada:cluster:"
	// tokensGroup is the group of all holders of bootstrap tokens.
	tokensGroup = "system:bootstrappers"
)

// AgentUser returns the user of a Cluster's agent on the hub.
func AgentUser(cluster string) string { return AgentUserPrefix + cluster }

// BoundCluster returns the Cluster of a bootstrap token with these groups; ok is false for a token that is not bound to
// a Cluster. A token with the groups of two Clusters is for none of them: cluster is "" then.
func BoundCluster(groups []string) (cluster string, ok bool) {
	for _, group := range groups {
		name, found := strings.CutPrefix(group, clusterGroupPrefix)
		if !found {
			continue
		}
		if ok && name != cluster {
			return "", true
		}
		cluster, ok = name, true
	}
	return cluster, ok
}
