package karmada

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// NewSpace returns the execution space of cluster as it is made.
func NewSpace(cluster *clusterv1alpha1.Cluster) *corev1.Namespace {
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fleet.ExecutionSpace(cluster.Name)}}
	Mark(space, cluster)
	noteID(space, cluster)
	return space
}

// AdoptSpace lets the execution space go with cluster, if it does not yet, and notes whose it is. What is in it stays.
// hub must read from the API server.
func AdoptSpace(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster, space *corev1.Namespace) error {
	noted := cluster.Spec.ID == "" || space.Annotations[kube.AnnotationClusterID] == cluster.Spec.ID
	if isTrace(space, cluster.Name) && Marked(space) == cluster.UID && noted && !owned(space, cluster.UID) {
		return nil
	}
	return adopt(ctx, hub, cluster, space, func() { noteID(space, cluster) })
}

// OfOther says whether the execution space went with a Cluster of the same name that was another cluster: nothing in it
// is meant for this one. One of which that is not known is this one's, as after the hub was restored.
func OfOther(space *corev1.Namespace, cluster *clusterv1alpha1.Cluster) bool {
	marked, noted := Marked(space), space.Annotations[kube.AnnotationClusterID]
	return marked != "" && marked != cluster.UID && noted != "" && cluster.Spec.ID != "" && noted != cluster.Spec.ID
}

// noteID notes on an execution space which cluster it is for, as long as its Cluster says that.
func noteID(space *corev1.Namespace, cluster *clusterv1alpha1.Cluster) {
	if cluster.Spec.ID != "" {
		metav1.SetMetaDataAnnotation(&space.ObjectMeta, kube.AnnotationClusterID, cluster.Spec.ID)
	}
}
