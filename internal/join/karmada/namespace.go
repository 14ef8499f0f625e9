package karmada

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join/foreign"
	"github.com/towline/towline/internal/kube"
)

// deletionTimeout limits the wait for the end of an object's deletion.
const deletionTimeout = 20 * time.Second

// ensureNamespace creates a namespace on the hub if it does not exist. If the namespace is being deleted, it waits for
// the end of the deletion first. It records attempt, unless that is "", on a namespace that it creates.
func ensureNamespace(ctx context.Context, hub client.Client, name, attempt string) error {
	err := wait.PollUntilContextTimeout(ctx, pollInterval, deletionTimeout, true, func(context.Context) (bool, error) {
		live := &corev1.Namespace{}
		err := hub.Get(ctx, client.ObjectKey{Name: name}, live)
		if !apierrors.IsNotFound(err) {
			return err == nil && live.DeletionTimestamp.IsZero(), err
		}
		live.ObjectMeta = systemMeta("", name)
		if attempt != "" {
			metav1.SetMetaDataAnnotation(&live.ObjectMeta, attemptAnnotation, attempt)
		}
		err = hub.Create(ctx, live, client.FieldOwner(kube.FieldManager))
		return err == nil, client.IgnoreAlreadyExists(err)
	})
	if err != nil {
		return fmt.Errorf("create namespace %s: %w", name, err)
	}
	return nil
}

// deleteNamespace deletes a namespace of the hub that this attempt created, if it is empty.
func deleteNamespace(ctx context.Context, hub client.Client, resources foreign.Resources, name, attempt string) error {
	live := &corev1.Namespace{}
	err := hub.Get(ctx, client.ObjectKey{Name: name}, live)
	if err != nil || live.Annotations[attemptAnnotation] != attempt || !live.DeletionTimestamp.IsZero() {
		return client.IgnoreNotFound(err)
	}
	found, err := foreign.Find(ctx, hub, resources, name, func(*metav1.PartialObjectMetadata) bool { return false })
	if err != nil || found != "" {
		return err
	}
	err = hub.Delete(ctx, live, client.Preconditions{UID: &live.UID, ResourceVersion: &live.ResourceVersion})
	if client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete namespace %s on the control plane: %w", name, err)
	}
	return nil
}

// NewExecutionNamespace returns the desired execution namespace of cluster. It makes no request.
func NewExecutionNamespace(cluster *clusterv1alpha1.Cluster) *corev1.Namespace {
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fleet.ExecutionSpace(cluster.Name)}}
	SetOwnerLabels(namespace, cluster)
	recordID(namespace, cluster)
	return namespace
}

// AdoptExecutionNamespace makes cluster the owner of its execution namespace and records the ID of cluster on it. The
// objects in the namespace stay. hub must read from the API server.
func AdoptExecutionNamespace(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster, namespace *corev1.Namespace) error {
	isRecorded := cluster.Spec.ID == "" || namespace.Annotations[kube.AnnotationClusterID] == cluster.Spec.ID
	if isOwnedBy(namespace, cluster.Name) && OwnerUID(namespace) == cluster.UID && isRecorded && !hasOtherOwner(namespace, cluster.UID) {
		return nil
	}
	return adopt(ctx, hub, cluster, namespace, func() { recordID(namespace, cluster) })
}

// BelongsToAnotherCluster returns whether namespace was created for an earlier Cluster with the same name but another
// ID. Its objects must then not be applied to cluster. It returns false if one of the IDs is not known, as after a
// restore of the hub.
func BelongsToAnotherCluster(namespace *corev1.Namespace, cluster *clusterv1alpha1.Cluster) bool {
	owner, id := OwnerUID(namespace), namespace.Annotations[kube.AnnotationClusterID]
	return owner != "" && owner != cluster.UID && id != "" && cluster.Spec.ID != "" && id != cluster.Spec.ID
}

// recordID records the ID of cluster, if it has one, on its execution namespace.
func recordID(namespace *corev1.Namespace, cluster *clusterv1alpha1.Cluster) {
	if cluster.Spec.ID != "" {
		metav1.SetMetaDataAnnotation(&namespace.ObjectMeta, kube.AnnotationClusterID, cluster.Spec.ID)
	}
}
