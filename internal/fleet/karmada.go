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

// DefaultClusterNamespace is where the credentials of Clusters are, on the hub and on the cluster, unless a registration says otherwise:
// that of the Karmada surface.
const DefaultClusterNamespace = "karmada-cluster"

// ReasonTaken is the reason of the condition Ready of a Cluster whose id another Cluster had first.
const ReasonTaken = "ClusterIDTaken"

// ExecutionSpace returns the hub's namespace for what is meant for a Cluster.
func ExecutionSpace(cluster string) string { return clusterv1alpha1.ExecutionSpacePrefix + cluster }

// OfExecutionSpace returns the name of the Cluster that namespace is the execution space of; ok is false if it is none.
func OfExecutionSpace(namespace string) (cluster string, ok bool) {
	cluster, ok = strings.CutPrefix(namespace, clusterv1alpha1.ExecutionSpacePrefix)
	return cluster, ok && cluster != ""
}

// FromCluster reads a Cluster into a Member, which lives in the Cluster's execution space.
func FromCluster(c *clusterv1alpha1.Cluster) Member {
	m := Member{
		Type:      TypeKarmada,
		Namespace: ExecutionSpace(c.Name),
		Name:      c.Name,
		Labels:    c.Labels,
		Mode:      Push,
		// Whoever reached the cluster has asked for its version.
		Ready:      c.Status.KubernetesVersion != "",
		Refused:    refusedCluster(c),
		Deleting:   !c.DeletionTimestamp.IsZero(),
		KeepAddons: deregistration(c, kube.DeregisterKeep),
		Forced:     deregistration(c, kube.DeregisterForce),
		Abandoned:  deregistration(c, kube.DeregisterAbandon),
		// What bears no mark of this hub could not be told from what other hubs deploy.
		Held:              slices.Contains(c.Finalizers, clusterv1alpha1.ClusterFinalizer) && c.Annotations[kube.AnnotationHub] != "",
		Shard:             c.Annotations[libv1beta1.ShardAnnotation],
		KubernetesVersion: c.Status.KubernetesVersion,
		APIVersions:       enabled(c.Status.APIEnablements),
		Home:              DefaultClusterNamespace,
		Scope:             string(c.UID),
		Hub:               c.Annotations[kube.AnnotationHub],
		UID:               string(c.UID),
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
		m.Home = cmp.Or(ref.Namespace, m.Home)
	}
	return m
}

// refusedCluster says why nothing may be done to c. Its id was found to be taken before anything was done for it: one that leaves may have been
// held, whatever its status says, and is asked how it is.
func refusedCluster(c *clusterv1alpha1.Cluster) string {
	ready := meta.FindStatusCondition(c.Status.Conditions, clusterv1alpha1.ClusterConditionReady)
	switch {
	case ready != nil && ready.Reason == ReasonTaken && c.DeletionTimestamp.IsZero():
		return ready.Message
	case len(validation.IsDNS1123Label(c.Name)) > 0 || len(c.Name) > clusterv1alpha1.MaxClusterName:
		return "metadata.name: it must be a label of DNS with no more than 48 characters"
	}
	return ""
}

// enabled lists APIs as a Member does.
func enabled(apis []clusterv1alpha1.APIEnablement) []string {
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

// settledCluster returns c without its nodes and pods, the times of its conditions, the taints that follow from these, and what only its
// registration looks at.
func settledCluster(c *clusterv1alpha1.Cluster) *clusterv1alpha1.Cluster {
	settled := *c
	settled.SetGroupVersionKind(clusterv1alpha1.GroupVersion.WithKind(clusterv1alpha1.ClusterKind))
	settled.ManagedFields, settled.ResourceVersion, settled.Generation = nil, "", 0
	settled.Annotations = maps.Clone(c.Annotations)
	delete(settled.Annotations, kube.AnnotationApproved)
	settled.Spec.Taints = slices.DeleteFunc(slices.Clone(c.Spec.Taints), func(taint corev1.Taint) bool {
		return taint.Key == clusterv1alpha1.TaintNotReady || taint.Key == clusterv1alpha1.TaintUnreachable
	})
	settled.Status.NodeSummary, settled.Status.ResourceSummary = nil, nil
	settled.Status.Conditions = slices.Clone(c.Status.Conditions)
	for i := range settled.Status.Conditions {
		settled.Status.Conditions[i].LastTransitionTime = metav1.Time{}
	}
	return &settled
}
