package engine

import "k8s.io/apimachinery/pkg/runtime/schema"

// The ranks that other code refers to. Objects are applied in the order of their ranks and removed in the reverse
// order.
const (
	rankNamespace = 0
	rankCRD       = 1
	rankOther     = 100 // kinds that are not listed: custom resources, mostly
	rankLast      = 200 // webhooks and APIServices, which change how the API server treats all other objects
)

const (
	groupAPIExtensions = "apiextensions.k8s.io"
	groupRBAC          = "rbac.authorization.k8s.io"
)

// rankOf returns the rank of a kind. The order is Helm's install order, with three exceptions: Namespaces and
// CustomResourceDefinitions are first, and custom resources come after the workloads that may serve them and before
// webhooks, which may refuse every request until their workloads run. Kinds of equal rank are applied concurrently.
func rankOf(gk schema.GroupKind) int {
	switch gk.Group {
	case "":
		return coreRank(gk.Kind)
	case groupAPIExtensions:
		return rankCRD
	case "scheduling.k8s.io", "storage.k8s.io", "networking.k8s.io", "policy":
		return infrastructureRank(gk.Kind)
	case groupRBAC:
		return rbacRank(gk.Kind)
	case "apps", "batch", "autoscaling":
		return workloadRank(gk.Kind)
	case "apiregistration.k8s.io", "admissionregistration.k8s.io":
		return rankLast
	}
	return rankOther
}

func coreRank(kind string) int {
	switch kind {
	case "Namespace":
		return rankNamespace
	case "ResourceQuota", "LimitRange":
		return 11
	case "ServiceAccount":
		return 12
	case "Secret", "ConfigMap":
		return 13
	case "PersistentVolume":
		return 15
	case "PersistentVolumeClaim":
		return 16
	case "Service":
		return 30
	case "Pod", "ReplicationController":
		return 40
	}
	return rankOther
}

func infrastructureRank(kind string) int {
	switch kind {
	case "PriorityClass", "NetworkPolicy":
		return 10
	case "PodDisruptionBudget":
		return 11
	case "StorageClass", "CSIDriver":
		return 14
	case "IngressClass":
		return 49
	case "Ingress":
		return 50
	}
	return rankOther
}

func rbacRank(kind string) int {
	switch kind {
	case "ClusterRole":
		return 20
	case "ClusterRoleBinding":
		return 21
	case "Role":
		return 22
	}
	return 23
}

func workloadRank(kind string) int {
	switch kind {
	case "DaemonSet":
		return 39
	case "ReplicaSet", "Deployment":
		return 41
	case "HorizontalPodAutoscaler":
		return 42
	case "StatefulSet":
		return 43
	}
	return 44
}
