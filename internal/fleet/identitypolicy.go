package fleet

import (
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strings"

	"k8s.io/client-go/transport"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// AllNamespaces in IdentityPolicy.Namespaces stands for all namespaces.
const AllNamespaces = "*"

// IdentityPolicy limits the use of the hub's cloud identity. Without it, a user who may create SveltosClusters could
// have a token of the hub sent to any server. The zero value allows nothing.
type IdentityPolicy struct {
	// Namespaces are the namespaces whose SveltosClusters may use the identity.
	Namespaces []string
	// Hosts are hosts of API servers that may get tokens in addition to the hosts of the cloud providers. *.example.com
	// stands for all subdomains, but not for example.com itself.
	Hosts []string
	// NewTransportWrapper is identity.Wrap. It is a field, so that agents do not link the libraries of cloud providers.
	NewTransportWrapper NewIdentityWrapper
}

// NewIdentityWrapper returns a wrapper that adds tokens of a cloud identity to requests to endpoint. If isUnverified
// is true, it first verifies with the provider that endpoint is a public endpoint of the cluster.
type NewIdentityWrapper func(w *libv1beta1.WorkloadIdentity, endpoint *url.URL, isUnverified bool) (transport.WrapperFunc, error)

// Validate returns an error if a host has a port or is not a host.
func (p IdentityPolicy) Validate() error {
	for _, host := range p.Hosts {
		if name := strings.TrimPrefix(host, "*."); name == "" || strings.ContainsAny(name, "*/:[] ") {
			return fmt.Errorf("%q is neither a host without a port nor *.<domain>", host)
		}
	}
	return nil
}

// checkNamespace returns an error if clusters in a namespace must not use the identity.
func (p IdentityPolicy) checkNamespace(namespace string) error {
	if slices.Contains(p.Namespaces, AllNamespaces) || slices.Contains(p.Namespaces, namespace) {
		return nil
	}
	return fmt.Errorf("the cloud identity of the hub is not for clusters in namespace %s: it is not in the hub's --workload-identity-namespaces", namespace)
}

// isKnownHost returns whether a token may be sent to host: only the provider can assign its name, or the operator of
// the hub has listed it.
func (p IdentityPolicy) isKnownHost(provider libv1beta1.WorkloadIdentityProvider, host string) bool {
	host = strings.TrimSuffix(strings.ToLower(host), ".")
	if strings.Contains(host, ":") {
		return false // an IPv6 address, whose zone can look like a domain
	}
	isListed := slices.ContainsFunc(p.Hosts, func(allowed string) bool {
		domain, isDomain := strings.CutPrefix(strings.ToLower(allowed), "*")
		return host == strings.ToLower(allowed) || isDomain && strings.HasSuffix(host, domain)
	})
	pattern := providerHosts()[provider]
	return isListed || pattern != nil && pattern.MatchString(host)
}

// providerHosts returns patterns for the names that providers give to API servers of clusters, and to nothing else.
func providerHosts() map[libv1beta1.WorkloadIdentityProvider]*regexp.Regexp {
	return map[libv1beta1.WorkloadIdentityProvider]*regexp.Regexp{
		// <id>.gr7.<region>.eks.amazonaws.com, and for dual-stack clusters <id>.eks-cluster.<region>.api.aws; AWS in China
		// has domains of its own.
		libv1beta1.WorkloadIdentityAWS: regexp.MustCompile(`\.eks\.amazonaws\.com(\.cn)?$|\.eks-cluster\.[a-z0-9-]+\.api\.(aws|amazonwebservices\.com\.cn)$`),
		// <name>.hcp.<region>.azmk8s.io, and <name>.<id>.privatelink.<region>.azmk8s.io; then Azure Government and Azure in
		// China.
		libv1beta1.WorkloadIdentityAzure: regexp.MustCompile(`\.azmk8s\.io$|\.cx\.aks\.containerservice\.azure\.us$|\.cx\.prod\.service\.azk8s\.cn$`),
		// The DNS endpoint, gke-<id>.<region>.gke.goog. The other endpoints are addresses.
		libv1beta1.WorkloadIdentityGCP: regexp.MustCompile(`\.gke\.goog$`),
	}
}
