package bootstrap

import (
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	tokenapi "k8s.io/cluster-bootstrap/token/api"
)

// Names that are the same as in Karmada.
const (
	// AgentsGroup is the group of all agents. It is the only organization in their certificates.
	AgentsGroup = "system:karmada:agents"
	// AgentUserPrefix is the prefix of an agent's user; the name of its Cluster follows. The user is the common name of
	// its certificate.
	AgentUserPrefix = "system:karmada:agent:"
	// DefaultTokenGroup is the group of bootstrap tokens for registrations.
	DefaultTokenGroup = "system:bootstrappers:karmada:default-cluster-token"
	// TokenUserPrefix is the prefix of the user of a bootstrap token's holder; the id of the token follows.
	TokenUserPrefix = tokenapi.BootstrapUserPrefix
	// Signer is the signer of the certificates of agents.
	Signer = certificatesv1.KubeAPIServerClientSignerName
)

// clusterGroupPrefix is the prefix of the group of the tokens for one Cluster; the name of the Cluster follows.
const clusterGroupPrefix = "system:bootstrappers:karmada:cluster:"

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
