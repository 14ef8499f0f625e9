package fleet

import (
	"crypto/sha256"
	"encoding/base32"
	"strings"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// MaxPullName is how long, in bytes, the name of a pull-mode cluster may be: it is a value of labels, which Kubernetes bounds.
const MaxPullName = 63

// maxNamespace is how long, in bytes, Kubernetes lets the name of a namespace be.
const maxNamespace = 63

// DeliveryNamespace returns the hub namespace in which the groups and bundles of a pull-mode cluster live. Whoever writes SveltosClusters in
// one namespace must not reach into another one: the annotation chooses between the cluster's own and the derived namespace, and nothing else.
// foreign says that it names any other; the cluster is refused then, and its own namespace is returned.
func DeliveryNamespace(c *libv1beta1.SveltosCluster) (namespace string, foreign bool) {
	derived := DerivedNamespace(c.Namespace, c.Name)
	switch c.Annotations[kube.AnnotationDeliveryNS] {
	case "", c.Namespace:
		return c.Namespace, false
	case derived:
		return derived, false
	}
	return c.Namespace, true
}

// DerivedNamespace returns the name of the namespace for the deliveries of a cluster that cannot have its own one for them: namespace--cluster,
// with a hash in place of the end where that is too long, is no name of a namespace, or could mean another pair.
func DerivedNamespace(namespace, cluster string) string {
	const hashed = 12
	plain := namespace + "--" + cluster
	if len(plain) <= maxNamespace && strings.Count(plain, "--") == 1 && !strings.Contains(plain, ".") {
		return plain
	}
	sum := sha256.Sum256([]byte(namespace + "/" + cluster))
	suffix := strings.ToLower(base32.StdEncoding.EncodeToString(sum[:]))[:hashed]
	plain = strings.ReplaceAll(plain, ".", "-")
	return strings.Trim(plain[:min(len(plain), maxNamespace-hashed-1)], "-") + "-" + suffix
}

// DeliveryHolder returns the value of kube.AnnotationDeliveryHolder on a namespace that is claimed for the deliveries
// of a cluster: the cluster's name on the cluster's own namespace, and both names elsewhere.
func DeliveryHolder(namespace, cluster, delivery string) string {
	if delivery == namespace {
		return cluster
	}
	return namespace + "/" + cluster
}

// LongName says, for people, that the name of a pull-mode cluster is too long to be registered; "" if it is not.
func LongName(c *libv1beta1.SveltosCluster) string {
	if !c.Spec.PullMode || len(c.Name) <= MaxPullName {
		return ""
	}
	return longPullName
}

// What a Member says that is refused for its name, or because what is meant for it would go to somebody else.
const (
	reservedNamespace = "metadata.namespace: namespaces that begin with " + clusterv1alpha1.ExecutionSpacePrefix + " are for Clusters of cluster.karmada.io"
	longPullName      = "metadata.name: the name of a cluster in pull mode may have 63 characters at most"
	foreignDelivery   = "annotation " + kube.AnnotationDeliveryNS + " names a namespace that is not the cluster's"
)
