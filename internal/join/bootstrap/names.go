package bootstrap

import (
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
)

// Names of the Karmada surface.
const (
	// AgentsGroup is the group, and the one organisation of the certificates, of all agents.
	AgentsGroup = "system:karmada:agents"
	// AgentUserPrefix and the name of its Cluster make the user, and the common name of the certificate, of an agent.
	AgentUserPrefix = "system:karmada:agent:"
	// DefaultGroup is the group of bootstrap tokens that may ask for a registration.
	DefaultGroup = "system:bootstrappers:karmada:default-cluster-token"
	// TokenUserPrefix and the id of a bootstrap token make the user that the API server takes its holder for.
	TokenUserPrefix = "system:bootstrap:"
	// Signer is who signs the certificates of agents.
	Signer = certificatesv1.KubeAPIServerClientSignerName
)

const (
	// clusterGroupPrefix and the name of a Cluster make the group of the tokens that are for that Cluster only.
	clusterGroupPrefix = "system:bootstrappers:karmada:cluster:"
	// tokensGroup is the group of everybody who comes with a bootstrap token.
	tokensGroup = "system:bootstrappers"
)

// AgentUser returns the user that the agent of a Cluster is on the hub.
func AgentUser(cluster string) string { return AgentUserPrefix + cluster }

// OnlyFor returns the one Cluster that a bootstrap token with these groups is for; ok is false if it is for no one in
// particular. A token that claims to be for two is for none: cluster is "" then.
func OnlyFor(groups []string) (cluster string, ok bool) {
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
