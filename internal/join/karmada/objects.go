package karmada

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join/rollback"
	"github.com/towline/towline/internal/kube"
)

// clusterLabel on an object of the hub is the name of the Cluster that owns it. There is no owner reference: with
// foreground or orphan propagation, the garbage collector would delete the objects before the hub has cleaned up the
// member, or keep them.
const clusterLabel = "towline.dev/cluster"

// AgentRoleName returns the name of a Cluster agent's roles and bindings on the hub.
func AgentRoleName(cluster string) string { return "system:karmada:" + cluster + ":agent" }

// agentRBAC returns the keys of the agent's RBAC objects, in the order of their deletion.
func agentRBAC(cluster string) []*metav1.PartialObjectMetadata {
	role, namespace, group := AgentRoleName(cluster), fleet.ExecutionSpace(cluster), rbacv1.SchemeGroupVersion
	return []*metav1.PartialObjectMetadata{
		partialMetadata(group.WithKind("ClusterRoleBinding"), "", role), partialMetadata(group.WithKind("RoleBinding"), namespace, role),
		partialMetadata(group.WithKind("RoleBinding"), kube.AgentNamespace, role),
		partialMetadata(group.WithKind("Role"), namespace, role), partialMetadata(group.WithKind("ClusterRole"), "", role),
	}
}

func reservationOf(cluster *clusterv1alpha1.Cluster) *metav1.PartialObjectMetadata {
	return partialMetadata(corev1.SchemeGroupVersion.WithKind("ConfigMap"), fleet.DefaultClusterNamespace, reservationName(cluster.Spec.ID))
}

// hubObjects returns the keys of all objects that the hub may have for a Cluster, in the order of their deletion.
func hubObjects(cluster *clusterv1alpha1.Cluster) []*metav1.PartialObjectMetadata {
	space := fleet.ExecutionSpace(cluster.Name)
	all := append(agentRBAC(cluster.Name), partialMetadata(coordinationv1.SchemeGroupVersion.WithKind("Lease"), space, cluster.Name))
	for _, secret := range secretsOf(cluster) {
		all = append(all, partialMetadata(corev1.SchemeGroupVersion.WithKind("Secret"), secret.Namespace, secret.Name))
	}
	return append(all, reservationOf(cluster), partialMetadata(corev1.SchemeGroupVersion.WithKind("Namespace"), "", space))
}

func partialMetadata(kind schema.GroupVersionKind, namespace, name string) *metav1.PartialObjectMetadata {
	obj := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	obj.SetGroupVersionKind(kind)
	return obj
}

// secretsOf returns the Secrets in the spec of a Cluster, and those with the default names.
func secretsOf(cluster *clusterv1alpha1.Cluster) []clusterv1alpha1.LocalSecretReference {
	secrets := []clusterv1alpha1.LocalSecretReference{
		{Namespace: fleet.DefaultClusterNamespace, Name: cluster.Name},
		{Namespace: fleet.DefaultClusterNamespace, Name: impersonatorSecret(cluster.Name)},
	}
	for _, ref := range []*clusterv1alpha1.LocalSecretReference{cluster.Spec.SecretRef, cluster.Spec.ImpersonatorSecretRef} {
		if ref != nil && !slices.Contains(secrets, *ref) {
			secrets = append(secrets, *ref)
		}
	}
	return secrets
}

// SetOwnerLabels makes a Cluster the owner of an object on the hub.
func SetOwnerLabels(obj client.Object, cluster string) {
	labels := maps.Clone(obj.GetLabels())
	if labels == nil {
		labels = map[string]string{}
	}
	labels[clusterv1alpha1.SystemLabel], labels[clusterLabel] = "true", cluster
	obj.SetLabels(labels)
}

// Owner returns the name of the Cluster that owns an object on the hub, or "".
func Owner(obj client.Object) string {
	if obj.GetLabels()[clusterv1alpha1.SystemLabel] != "true" {
		return ""
	}
	return obj.GetLabels()[clusterLabel]
}

// DeleteHubObjects deletes the hub's objects of a deregistered Cluster: the RBAC and the Lease of its agent, its
// Secrets, the reservation of its ID, and its execution namespace. It does not wait for finalizers. It can be repeated.
// hub must read from the API server.
func DeleteHubObjects(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster) error {
	return deleteOwned(ctx, hub, cluster.Name, hubObjects(cluster), apierrors.IsNotFound)
}

// deleteOwned deletes the objects that cluster owns. It ignores errors for which isIgnored is true.
func deleteOwned(ctx context.Context, hub client.Client, cluster string, objects []*metav1.PartialObjectMetadata, isIgnored func(error) bool) error {
	var errs []error
	for _, obj := range objects {
		err := hub.Get(ctx, client.ObjectKeyFromObject(obj), obj)
		if err == nil && Owner(obj) == cluster {
			err = hub.Delete(ctx, obj, client.Preconditions{UID: &obj.UID})
		}
		if err != nil && !isIgnored(err) {
			errs = append(errs, fmt.Errorf("delete %s %s on the control plane: %w", obj.Kind, client.ObjectKeyFromObject(obj), err))
		}
	}
	return errors.Join(errs...)
}

func isMissingOrForbidden(err error) bool {
	return apierrors.IsNotFound(err) || apierrors.IsForbidden(err)
}

// DeleteLeftoverRBAC deletes the RBAC of an agent whose Cluster does not exist. The other objects stay: during a
// restore of the hub, Clusters may be missing for some time, and the hub recreates only RBAC. hub must read from the
// API server.
func DeleteLeftoverRBAC(ctx context.Context, hub client.Client, cluster string) error {
	err := hub.Get(ctx, client.ObjectKey{Name: cluster}, &clusterv1alpha1.Cluster{})
	if apierrors.IsNotFound(err) {
		return deleteOwned(ctx, hub, cluster, agentRBAC(cluster), apierrors.IsNotFound)
	}
	return err
}

// DeleteAllLeftoverRBAC is DeleteLeftoverRBAC for all Clusters.
func DeleteAllLeftoverRBAC(ctx context.Context, hub client.Client) error {
	roles := &metav1.PartialObjectMetadataList{}
	roles.SetGroupVersionKind(rbacv1.SchemeGroupVersion.WithKind("ClusterRoleList"))
	if err := hub.List(ctx, roles, client.HasLabels{clusterLabel}); err != nil {
		return fmt.Errorf("list the ClusterRoles of agents: %w", err)
	}
	var errs []error
	for i := range roles.Items {
		errs = append(errs, DeleteLeftoverRBAC(ctx, hub, Owner(&roles.Items[i])))
	}
	return errors.Join(errs...)
}

// EnsureExecutionNamespace creates the execution namespace of cluster, or corrects its labels and the ID in its
// annotations. It returns an error until the namespace of an earlier Cluster with the same name is deleted.
func EnsureExecutionNamespace(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster) (created bool, err error) {
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fleet.ExecutionSpace(cluster.Name)}}
	SetOwnerLabels(namespace, cluster.Name)
	if cluster.Spec.ID != "" {
		metav1.SetMetaDataAnnotation(&namespace.ObjectMeta, kube.AnnotationClusterID, cluster.Spec.ID)
	}
	_, result, err := rollback.New(hub, "").Apply(ctx, namespace, func(live *unstructured.Unstructured) error {
		if BelongsToEarlierCluster(live, cluster) {
			return fmt.Errorf("namespace %s has the Works of an earlier cluster %s with another ID", live.GetName(), cluster.Name)
		}
		return nil
	})
	return result == rollback.Created, err
}

// BelongsToEarlierCluster returns whether namespace was created for an earlier Cluster with the same name and another
// ID. Its objects must not be applied to cluster. It returns false if an ID is unknown, or if cluster is older than
// namespace: then the ID of cluster was corrected.
func BelongsToEarlierCluster(namespace client.Object, cluster *clusterv1alpha1.Cluster) bool {
	id, created := namespace.GetAnnotations()[kube.AnnotationClusterID], namespace.GetCreationTimestamp()
	return Owner(namespace) != "" && id != "" && cluster.Spec.ID != "" && id != cluster.Spec.ID && created.Before(&cluster.CreationTimestamp)
}
