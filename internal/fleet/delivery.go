package fleet

import (
	"crypto/sha256"
	"encoding/base32"
	"strings"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// MaxPullName is the maximal length, in bytes, of the name of a pull-mode cluster: the name is a label value, whose
// length Kubernetes limits.
const MaxPullName = 63

// maxNamespace is the maximal length, in bytes, of a namespace name.
const maxNamespace = 63

// DeliveryNamespace returns the hub namespace with the groups and bundles of a pull-mode cluster. The annotation
// kube.AnnotationDeliveryNS selects the cluster's own namespace or the derived namespace. isForeign is true if it names
// another namespace, which a user who may only write SveltosClusters in one namespace must not reach: such a cluster is
// refused, and its own namespace is returned.
func DeliveryNamespace(c *libv1beta1.SveltosCluster) (namespace string, isForeign bool) {
	derived := DerivedNamespace(c.Namespace, c.Name)
	switch c.Annotations[kube.AnnotationDeliveryNS] {
	case "", c.Namespace:
		return c.Namespace, false
	case derived:
		return derived, false
	}
	return c.Namespace, true
}

// DerivedNamespace returns the name of the delivery namespace of a cluster that cannot use its own namespace:
// namespace--cluster. If that is too long, not a valid name, or ambiguous, a hash replaces the end.
func DerivedNamespace(namespace, cluster string) string {
	const hashLength = 12
	name := namespace + "--" + cluster
	if len(name) <= maxNamespace && strings.Count(name, "--") == 1 && !strings.Contains(name, ".") {
		return name
	}
	sum := sha256.Sum256([]byte(namespace + "/" + cluster))
	suffix := strings.ToLower(base32.StdEncoding.EncodeToString(sum[:]))[:hashLength]
	name = strings.ReplaceAll(name, ".", "-")
	return strings.Trim(name[:min(len(name), maxNamespace-hashLength-1)], "-") + "-" + suffix
}

// DeliveryHolder returns the value of kube.AnnotationDeliveryHolder on the delivery namespace of a cluster: the name of
// the cluster if this is the cluster's own namespace, else the namespace and the name of the cluster.
func DeliveryHolder(namespace, cluster, deliveryNamespace string) string {
	if deliveryNamespace == namespace {
		return cluster
	}
	return namespace + "/" + cluster
}

// ContentKeySecret returns the name of the Secret in the delivery namespace with the key of a cluster's encrypted
// content.
func ContentKeySecret(cluster string) string { return cluster + "-sveltos-content-key" }

// NameTooLong returns an error message if the name of a pull-mode cluster is too long for a registration, else "".
func NameTooLong(c *libv1beta1.SveltosCluster) string {
	if !c.Spec.PullMode || len(c.Name) <= MaxPullName {
		return ""
	}
	return longPullName
}

// Messages in Member.Refused about the name of a cluster or a foreign delivery namespace.
const (
	reservedNamespace = "metadata.namespace: namespaces that begin with " + clusterv1alpha1.ExecutionSpacePrefix + " are for Clusters of cluster.karmada.io"
	longPullName      = "metadata.name: the name of a cluster in pull mode may have 63 characters at most"
	foreignDelivery   = "annotation " + kube.AnnotationDeliveryNS + " names a namespace that is not the cluster's"
)
