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

// The hub registers its own cluster as the member HubNamespace/HubName.
const (
	HubNamespace = "mgmt"
	HubName      = "mgmt"
)

// FromSveltosCluster converts a SveltosCluster to a Member.
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
		// A pause does not stop the deregistration.
		Paused:              c.Spec.Paused && c.DeletionTimestamp.IsZero(),
		Refused:             sveltosRefusal(c),
		Deleting:            !c.DeletionTimestamp.IsZero(),
		KeepAddons:          hasDeregisterOption(c, kube.DeregisterKeep),
		Forced:              hasDeregisterOption(c, kube.DeregisterForce),
		Abandoned:           hasDeregisterOption(c, kube.DeregisterAbandon),
		HasFinalizer:        slices.Contains(c.Finalizers, kube.FinalizerCluster),
		Shard:               c.Annotations[libv1beta1.ShardAnnotation],
		CacheMayLackObjects: cacheMayLackObjects(c),
		KubernetesVersion:   c.Status.Version,
		APIVersions:         c.Status.APIVersions,
		MemberNamespace:     kube.AgentNamespace,
		UID:                 string(c.UID),
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

// hasDeregisterOption returns true if c is being deleted and its deregistration has this option.
func hasDeregisterOption(c metav1.Object, option string) bool {
	options := strings.Split(c.GetAnnotations()[kube.AnnotationDeregister], ",")
	return c.GetDeletionTimestamp() != nil && slices.Contains(options, option)
}

// KubeconfigSecretName returns the default name of the Secret with the kubeconfig of a cluster.
func KubeconfigSecretName(cluster string) string { return cluster + "-sveltos-kubeconfig" }

// IsHub returns true if m is the cluster of the hub itself.
func (m Member) IsHub() bool {
	return m.Namespace == HubNamespace && m.Name == HubName && m.Mode == Push
}

// PlainVersion returns a gitVersion as v<major>.<minor>.<patch>, without pre-release and build metadata: "v1.31.6" for
// "v1.31.6+k3s1". It returns "" for an invalid version.
func PlainVersion(gitVersion string) string {
	v, err := version.ParseGeneric(gitVersion)
	if err != nil {
		return ""
	}
	return fmt.Sprintf("v%d.%d.%d", v.Major(), v.Minor(), v.Patch())
}

// RefusedSuffix is the end of Member.Refused for an unsupported field.
const RefusedSuffix = " is not supported yet"

// overrideSuffix is the end of the annotations that name a ConfigMap with patches for one of the agents of Sveltos.
// Towline supports only libv1beta1.AgentConfigAnnotation, which patches its own agent.
const overrideSuffix = "/config-override-ref"

// IsRefusal returns true if message can be Member.Refused of a SveltosCluster. The hub uses it to remove the message of
// an earlier refusal from the status.
func IsRefusal(message string) bool {
	return message == refusalLongPullName || message == refusalForeignDelivery || message == refusalReservedNamespace || strings.HasSuffix(message, RefusedSuffix)
}

// sveltosRefusal returns Member.Refused for c: a message about the first namespace, name, annotation or field that is
// not accepted, or "".
func sveltosRefusal(c *libv1beta1.SveltosCluster) string {
	if _, reserved := ClusterOfExecutionSpace(c.Namespace); reserved {
		return refusalReservedNamespace
	}
	if c.Spec.PullMode {
		if message := ValidatePullName(c); message != "" {
			return message
		}
		if _, isForeign := DeliveryNamespace(c); isForeign {
			return refusalForeignDelivery
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

// stripSveltosCluster implements WithoutVolatileFields. It removes heartbeats, failure counters, conditions, and the
// results of the checks of an agent. The failure message and the connection status, which the hub derives from them,
// stay.
func stripSveltosCluster(c *libv1beta1.SveltosCluster) *libv1beta1.SveltosCluster {
	stripped := *c
	stripped.SetGroupVersionKind(libv1beta1.GroupVersion.WithKind(libv1beta1.SveltosClusterKind))
	stripped.ManagedFields, stripped.ResourceVersion = nil, ""
	stripped.Status.AgentLastReportTime, stripped.Status.ConnectionFailures, stripped.Status.Conditions = nil, 0, nil
	stripped.Status.AgentCheckFailures, stripped.Status.AgentCheckMessage = 0, ""
	return &stripped
}
