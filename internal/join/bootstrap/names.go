package bootstrap

import (
	"fmt"
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
)

// Names of the Karmada surface.
const (
	// AgentsGroup is the group, and the one organisation of the certificates, of all agents.
	AgentsGroup = "system:karmada:agents"
	// AgentUserPrefix and the name of its Cluster make the user, and the common name of the certificate, of an agent.
	AgentUserPrefix = "system:karmada:agent:"
	// DefaultGroup is the group of bootstrap tokens that may ask for a registration.
	DefaultGroup = "system:bootstrappers:karmada:default-cluster-token"
	// ReservedName is no name for a Cluster: on other hubs its agent would be the one that may do everything.
	ReservedName = "rbac-generator"
	// Signer is who signs the certificates of agents.
	Signer = certificatesv1.KubeAPIServerClientSignerName
)

const (
	// clusterGroupPrefix and the name of a Cluster make the group of the tokens that are for that Cluster only.
	clusterGroupPrefix = "system:bootstrappers:karmada:cluster:"
	// tokenUserPrefix and the id of a bootstrap token make the user that the API server takes its holder for.
	tokenUserPrefix = "system:bootstrap:"
	// tokensGroup is the group of everybody who comes with a bootstrap token.
	tokensGroup = "system:bootstrappers"
)

// AgentUser returns the user that the agent of a Cluster is on the hub.
func AgentUser(cluster string) string { return AgentUserPrefix + cluster }

// OnlyFor returns the one Cluster that a bootstrap token with these groups is for; ok is false if it is for no one in particular. A token that
// claims to be for two is for none: cluster is "" then.
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

// checkName says what is wrong with the name of a Cluster.
func checkName(name string) error {
	if name == ReservedName {
		return fmt.Errorf("the name %q is reserved", name)
	}
	reasons := validation.IsDNS1123Label(name)
	if len(name) > clusterv1alpha1.MaxClusterName {
		reasons = append(reasons, validation.MaxLenError(clusterv1alpha1.MaxClusterName))
	}
	if len(reasons) > 0 {
		slices.Sort(reasons)
		return fmt.Errorf("the cluster name %q is invalid: %s", name, strings.Join(reasons, "; "))
	}
	return nil
}
