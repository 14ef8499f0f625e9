package karmada

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join/rollback"
	"github.com/towline/towline/internal/kube"
)

// deletionTimeout limits the wait for the end of a namespace's deletion.
const deletionTimeout = 20 * time.Second

// ensureNamespace creates namespace if it does not exist. If it is being deleted, ensureNamespace waits for the end of
// the deletion first. An existing namespace is not changed.
func ensureNamespace(ctx context.Context, c client.Client, namespace *corev1.Namespace) error {
	err := wait.PollUntilContextTimeout(ctx, pollInterval, deletionTimeout, true, func(context.Context) (bool, error) {
		live := &corev1.Namespace{}
		err := c.Get(ctx, client.ObjectKeyFromObject(namespace), live)
		if !apierrors.IsNotFound(err) {
			return err == nil && live.DeletionTimestamp.IsZero(), err
		}
		err = c.Create(ctx, namespace.DeepCopy(), client.FieldOwner(kube.FieldManager))
		return err == nil, client.IgnoreAlreadyExists(err)
	})
	if err != nil {
		return fmt.Errorf("create namespace %s: %w", namespace.Name, err)
	}
	return nil
}

// EnsureExecutionNamespace creates the execution namespace of cluster, or corrects its labels and the ID of the cluster
// in its annotations. Objects in it stay. It fails for the namespace of an earlier Cluster, until that is deleted.
func EnsureExecutionNamespace(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster) (created bool, err error) {
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fleet.ExecutionSpace(cluster.Name)}}
	SetOwnerLabels(namespace, cluster.Name)
	if cluster.Spec.ID != "" {
		metav1.SetMetaDataAnnotation(&namespace.ObjectMeta, kube.AnnotationClusterID, cluster.Spec.ID)
	}
	_, result, err := rollback.New(hub, "").Apply(ctx, namespace, func(live *unstructured.Unstructured) error {
		if BelongsToAnotherCluster(live, cluster) {
			return fmt.Errorf("namespace %s has the Works of an earlier cluster %s with another ID", live.GetName(), cluster.Name)
		}
		return nil
	})
	return result == rollback.Created, err
}

// BelongsToAnotherCluster returns whether namespace was created for an earlier Cluster with the same name but another
// ID. Its objects must then not be applied to cluster. It returns false if one of the IDs is not known, and if cluster
// is older than the namespace: then its own ID was corrected.
func BelongsToAnotherCluster(namespace client.Object, cluster *clusterv1alpha1.Cluster) bool {
	id, created := namespace.GetAnnotations()[kube.AnnotationClusterID], namespace.GetCreationTimestamp()
	return Owner(namespace) != "" && id != "" && cluster.Spec.ID != "" && id != cluster.Spec.ID && created.Before(&cluster.CreationTimestamp)
}
