package fleet

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// DefaultClusterNamespace is the namespace with the credentials of Clusters, on the hub and on the member, unless the
// registration sets another one. It is the default of Karmada.
const DefaultClusterNamespace = "karmada-cluster"

// ReasonIDTaken is the reason of the condition Ready of a Cluster whose ID belongs to an older Cluster.
const ReasonIDTaken = "ClusterIDTaken"

// ExecutionSpace returns the hub namespace with the Works of a Cluster.
func ExecutionSpace(cluster string) string { return clusterv1alpha1.ExecutionSpacePrefix + cluster }

// ClusterOfExecutionSpace returns the name of the Cluster of an execution space. ok is false if namespace is not an
// execution space.
func ClusterOfExecutionSpace(namespace string) (cluster string, ok bool) {
	cluster, ok = strings.CutPrefix(namespace, clusterv1alpha1.ExecutionSpacePrefix)
	return cluster, ok && cluster != ""
}

// FromCluster converts a Cluster to a Member, whose namespace is the execution space of the Cluster.
func FromCluster(c *clusterv1alpha1.Cluster) Member {
	m := Member{
		Type:      TypeKarmada,
		Namespace: ExecutionSpace(c.Name),
		Name:      c.Name,
		Labels:    c.Labels,
		Mode:      Push,
		// The version is read at the first connection.
		Ready:      c.Status.KubernetesVersion != "",
		Refused:    clusterRefusal(c),
		Deleting:   !c.DeletionTimestamp.IsZero(),
		KeepAddons: hasDeregisterOption(c, kube.DeregisterKeep),
		Forced:     hasDeregisterOption(c, kube.DeregisterForce),
		Abandoned:  hasDeregisterOption(c, kube.DeregisterAbandon),
		// Without the ID of the hub on the Cluster, the hub cannot distinguish its objects from objects of other hubs.
		HasFinalizer:        slices.Contains(c.Finalizers, clusterv1alpha1.ClusterFinalizer) && c.Annotations[kube.AnnotationHub] != "",
		Shard:               c.Annotations[libv1beta1.ShardAnnotation],
		CacheMayLackObjects: cacheMayLackObjects(c),
		KubernetesVersion:   c.Status.KubernetesVersion,
		APIVersions:         apiVersionsOf(c.Status.APIEnablements),
		MemberNamespace:     DefaultClusterNamespace,
		Scope:               string(c.UID),
		Hub:                 c.Annotations[kube.AnnotationHub],
		UID:                 string(c.UID),
	}
	if ready := meta.FindStatusCondition(c.Status.Conditions, clusterv1alpha1.ClusterConditionReady); m.Ready && (ready == nil || ready.Status != metav1.ConditionTrue) {
		m.Down = true
		if ready != nil {
			m.DownMessage = ready.Message
		}
	}
	if c.Spec.SyncMode == clusterv1alpha1.Pull {
		m.Mode, m.DeliveryNamespace = Pull, m.Namespace
		return m
	}
	m.Access = &Access{
		Server: c.Spec.APIEndpoint, ProxyURL: c.Spec.ProxyURL, ProxyHeader: c.Spec.ProxyHeader, Insecure: c.Spec.InsecureSkipTLSVerification,
	}
	if ref := c.Spec.SecretRef; ref != nil {
		m.Access.Secret = types.NamespacedName{Namespace: ref.Namespace, Name: ref.Name}
		// The namespace with the credentials has the same name on the hub and on the member.
		m.MemberNamespace = cmp.Or(ref.Namespace, m.MemberNamespace)
	}
	return m
}

// clusterRefusal returns Member.Refused for c. A Cluster whose ID is taken is not refused while it is being deleted: it
// may have been accepted before, so its deletion must be handled.
func clusterRefusal(c *clusterv1alpha1.Cluster) string {
	ready := meta.FindStatusCondition(c.Status.Conditions, clusterv1alpha1.ClusterConditionReady)
	switch {
	case ready != nil && ready.Reason == ReasonIDTaken && c.DeletionTimestamp.IsZero():
		return ready.Message
	case len(validation.IsDNS1123Label(c.Name)) > 0 || len(c.Name) > clusterv1alpha1.MaxClusterName:
		return "metadata.name: must be a DNS label of at most 48 characters"
	}
	return ""
}

// apiVersionsOf converts the APIs in a status to the form of Member.APIVersions.
func apiVersionsOf(apis []clusterv1alpha1.APIEnablement) []string {
	var served []string
	for _, api := range apis {
		served = append(served, api.GroupVersion)
		for _, resource := range api.Resources {
			served = append(served, api.GroupVersion+"/"+resource.Kind)
		}
	}
	slices.Sort(served)
	return slices.Compact(served)
}

// stripCluster implements WithoutVolatileFields. It removes the nodes and pods, the transition times of conditions, the
// taints that result from conditions, the generation (which changes with these taints), and an annotation that only the
// registration reads.
func stripCluster(c *clusterv1alpha1.Cluster) *clusterv1alpha1.Cluster {
	stripped := *c
	stripped.SetGroupVersionKind(clusterv1alpha1.GroupVersion.WithKind(clusterv1alpha1.ClusterKind))
	stripped.ManagedFields, stripped.ResourceVersion, stripped.Generation = nil, "", 0
	stripped.Annotations = maps.Clone(c.Annotations)
	delete(stripped.Annotations, kube.AnnotationFirstUse)
	stripped.Spec.Taints = slices.DeleteFunc(slices.Clone(c.Spec.Taints), func(taint corev1.Taint) bool {
		return taint.Key == clusterv1alpha1.TaintNotReady || taint.Key == clusterv1alpha1.TaintUnreachable
	})
	stripped.Status.NodeSummary, stripped.Status.ResourceSummary = nil, nil
	stripped.Status.Conditions = slices.Clone(c.Status.Conditions)
	for i := range stripped.Status.Conditions {
		stripped.Status.Conditions[i].LastTransitionTime = metav1.Time{}
	}
	return &stripped
}
