package fleet

import (
	"crypto/sha256"
	"encoding/base32"
	"strings"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// MaxPullName is the maximum length of the name of a pull-mode cluster, in bytes. The name is used as a label value.
const MaxPullName = 63

// maxNamespace is the maximum length of the name of a namespace, in bytes.
const maxNamespace = 63

// DeliveryNamespace returns the hub namespace with the groups and bundles of a pull-mode cluster. The annotation
// kube.AnnotationDeliveryNS selects the own namespace of the cluster or the derived namespace. If it names another
// namespace, isForeign is true and the own namespace is returned. Such a cluster is refused: a user who may only write
// SveltosClusters in one namespace must not reach others.
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

// DeliveryHolder returns the value of kube.AnnotationDeliveryHolder on the delivery namespace of a cluster, which
// reserves the namespace for its deliveries. It is the cluster's name in the own namespace of the cluster, and
// otherwise "namespace/name".
func DeliveryHolder(namespace, cluster, deliveryNamespace string) string {
	if deliveryNamespace == namespace {
		return cluster
	}
	return namespace + "/" + cluster
}

// ContentKeySecret returns the name of the Secret in the delivery namespace with the content key of a cluster, which
// encrypts its sensitive content.
func ContentKeySecret(cluster string) string { return cluster + "-sveltos-content-key" }

// ValidatePullName returns an error message if the name of a pull-mode cluster is too long for a registration, else "".
func ValidatePullName(c *libv1beta1.SveltosCluster) string {
	if !c.Spec.PullMode || len(c.Name) <= MaxPullName {
		return ""
	}
	return refusalLongPullName
}

// The values of Member.Refused for a name or namespace that is not allowed.
const (
	refusalReservedNamespace = "metadata.namespace: namespaces that begin with " + clusterv1alpha1.ExecutionSpacePrefix + " are for Clusters of cluster.karmada.io"
	refusalLongPullName      = "metadata.name: the name of a cluster in pull mode may have 63 characters at most"
	refusalForeignDelivery   = "annotation " + kube.AnnotationDeliveryNS + " names a namespace that is not the cluster's"
)
