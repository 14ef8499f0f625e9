package fleet

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/version"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// The hub registers itself as the member HubNamespace/HubName.
const (
	HubNamespace = "mgmt"
	HubName      = "mgmt"
)

// FromSveltosCluster reads a SveltosCluster into a Member.
func FromSveltosCluster(c *libv1beta1.SveltosCluster) Member {
	m := Member{
		Type:        TypeSveltos,
		Namespace:   c.Namespace,
		Name:        c.Name,
		Labels:      c.Labels,
		Mode:        Push,
		Ready:       c.Status.Ready,
		Down:        c.Status.ConnectionStatus == libv1beta1.ConnectionDown,
		DownMessage: c.Status.FailureMessage,
		// Deregistering a paused cluster means it.
		Paused:            c.Spec.Paused && c.DeletionTimestamp.IsZero(),
		Refused:           refused(c),
		Deleting:          !c.DeletionTimestamp.IsZero(),
		KeepAddons:        deregistration(c, kube.DeregisterKeep),
		Forced:            deregistration(c, kube.DeregisterForce),
		Abandoned:         deregistration(c, kube.DeregisterAbandon),
		Held:              slices.Contains(c.Finalizers, kube.FinalizerCluster),
		Shard:             c.Annotations[libv1beta1.ShardAnnotation],
		KubernetesVersion: c.Status.Version,
		APIVersions:       c.Status.APIVersions,
		Home:              kube.AgentNamespace,
		UID:               string(c.UID),
	}
	if c.Spec.PullMode {
		m.Mode = Pull
		m.DeliveryNamespace, _ = DeliveryNamespace(c)
		return m
	}
	if c.Spec.WorkloadIdentity != nil {
		m.Identity = c.Spec.WorkloadIdentity
		return m
	}
	if m.IsHub() && c.Spec.KubeconfigName == "" {
		return m
	}
	m.KubeconfigKey = c.Spec.KubeconfigKeyName
	m.KubeconfigSecret = c.Spec.KubeconfigName
	if m.KubeconfigSecret == "" {
		m.KubeconfigSecret = KubeconfigSecretName(c.Name)
	}
	return m
}

// deregistration says whether c is being deleted and option is among what it says of that.
func deregistration(c metav1.Object, option string) bool {
	options := strings.Split(c.GetAnnotations()[kube.AnnotationDeregister], ",")
	return c.GetDeletionTimestamp() != nil && slices.Contains(options, option)
}

// KubeconfigSecretName returns the name of the Secret that holds the kubeconfig of cluster, unless its spec says otherwise.
func KubeconfigSecretName(cluster string) string { return cluster + "-sveltos-kubeconfig" }

// IsHub says whether m is the hub itself.
func (m Member) IsHub() bool {
	return m.Namespace == HubNamespace && m.Name == HubName && m.Mode == Push
}

// PlainVersion returns a gitVersion as v<major>.<minor>.<patch>, without pre-release and build metadata: "v1.31.6+k3s1" becomes
// "v1.31.6". What is no version comes back as "".
func PlainVersion(gitVersion string) string {
	v, err := version.ParseGeneric(gitVersion)
	if err != nil {
		return ""
	}
	return fmt.Sprintf("v%d.%d.%d", v.Major(), v.Minor(), v.Patch())
}

// RefusedSuffix ends what a Member says of the field that it is refused for.
const RefusedSuffix = " is not supported yet"

// overrideSuffix ends the annotations that name a ConfigMap with patches for an agent of the Sveltos surface. Of these agents, Towline has
// the one that is patched by libv1beta1.AgentConfigAnnotation.
const overrideSuffix = "/config-override-ref"

// IsRefusal says whether message is what a Member is refused for.
func IsRefusal(message string) bool {
	return message == longPullName || message == foreignDelivery || message == reservedNamespace || strings.HasSuffix(message, RefusedSuffix)
}

// refused names the first field or annotation that would change what Towline does, if Towline acted on it.
func refused(c *libv1beta1.SveltosCluster) string {
	if _, reserved := OfExecutionSpace(c.Namespace); reserved {
		return reservedNamespace
	}
	if c.Spec.PullMode {
		if long := LongName(c); long != "" {
			return long
		}
		if _, foreign := DeliveryNamespace(c); foreign {
			return foreignDelivery
		}
	}
	for _, key := range slices.Sorted(maps.Keys(c.Annotations)) {
		if strings.HasSuffix(key, overrideSuffix) && key != libv1beta1.AgentConfigAnnotation {
			return "annotation " + key + RefusedSuffix
		}
	}
	switch w := c.Spec.WorkloadIdentity; {
	case w == nil:
	case c.Spec.PullMode:
		return "spec.workloadIdentity in pull mode" + RefusedSuffix
	case w.Provider == libv1beta1.WorkloadIdentityOIDC:
		return "spec.workloadIdentity.provider OIDC" + RefusedSuffix
	}
	return ""
}

// settledSveltosCluster returns c without heartbeats, what counts them, and conditions, which are for people.
func settledSveltosCluster(c *libv1beta1.SveltosCluster) *libv1beta1.SveltosCluster {
	settled := *c
	settled.SetGroupVersionKind(libv1beta1.GroupVersion.WithKind(libv1beta1.SveltosClusterKind))
	settled.ManagedFields, settled.ResourceVersion = nil, ""
	settled.Status.AgentLastReportTime, settled.Status.ConnectionFailures, settled.Status.Conditions = nil, 0, nil
	return &settled
}
