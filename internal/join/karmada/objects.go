package karmada

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// Labels of the objects that the hub has for a Cluster: its name and its UID. The objects have no owner references,
// because then the propagation policy of the request that deletes the Cluster would decide whether the garbage
// collector deletes the objects before the hub has cleaned up the member, or orphans them.
const (
	clusterLabel    = "towline.dev/cluster"
	clusterUIDLabel = "towline.dev/cluster-uid"
	// pageSize is the number of objects that one request lists.
	pageSize = 500
)

// AgentRoleName returns the name of the roles and bindings of a Cluster's agent on the hub.
func AgentRoleName(cluster string) string { return "system:karmada:" + cluster + ":agent" }

// agentRBAC returns the names of the RBAC objects of a Cluster's agent, the bindings first. A Cluster whose name is too
// long has none.
func agentRBAC(cluster string) []*metav1.PartialObjectMetadata {
	if len(cluster) > clusterv1alpha1.MaxClusterName {
		return nil
	}
	role, namespace, group := AgentRoleName(cluster), fleet.ExecutionSpace(cluster), rbacv1.SchemeGroupVersion
	return []*metav1.PartialObjectMetadata{
		named(group.WithKind("ClusterRoleBinding"), "", role), named(group.WithKind("RoleBinding"), namespace, role),
		named(group.WithKind("RoleBinding"), kube.AgentNamespace, role),
		named(group.WithKind("ClusterRole"), "", role), named(group.WithKind("Role"), namespace, role),
	}
}

func leaseOf(cluster string) *metav1.PartialObjectMetadata {
	return named(coordinationv1.SchemeGroupVersion.WithKind("Lease"), fleet.ExecutionSpace(cluster), cluster)
}

func reservationOf(cluster *clusterv1alpha1.Cluster) *metav1.PartialObjectMetadata {
	return named(corev1.SchemeGroupVersion.WithKind("ConfigMap"), fleet.DefaultClusterNamespace, reservationName(cluster.Spec.ID))
}

// hubObjects returns the names of all objects that the hub may have for a Cluster, in the order of their deletion.
func hubObjects(cluster *clusterv1alpha1.Cluster) []*metav1.PartialObjectMetadata {
	all := append(agentRBAC(cluster.Name), leaseOf(cluster.Name))
	for _, secret := range secretsOf(cluster) {
		all = append(all, named(corev1.SchemeGroupVersion.WithKind("Secret"), secret.Namespace, secret.Name))
	}
	namespace := named(corev1.SchemeGroupVersion.WithKind("Namespace"), "", fleet.ExecutionSpace(cluster.Name))
	return append(all, reservationOf(cluster), namespace)
}

func named(kind schema.GroupVersionKind, namespace, name string) *metav1.PartialObjectMetadata {
	obj := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	obj.SetGroupVersionKind(kind)
	return obj
}

// secretsOf returns references to the Secrets in the spec of a Cluster, and to the Secrets with the default names.
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

// SetOwnerLabels sets the labels that make cluster the owner of an object on the hub. It removes owner references to
// earlier Clusters with the same name, because the garbage collector would delete the object with such a reference.
func SetOwnerLabels(obj client.Object, cluster *clusterv1alpha1.Cluster) {
	if hasOtherOwner(obj, cluster.UID) {
		obj.SetOwnerReferences(slices.DeleteFunc(slices.Clone(obj.GetOwnerReferences()), refersToOther(cluster.UID)))
	}
	labels := maps.Clone(obj.GetLabels())
	if labels == nil {
		labels = map[string]string{}
	}
	labels[clusterv1alpha1.SystemLabel], labels[clusterLabel], labels[clusterUIDLabel] = "true", cluster.Name, string(cluster.UID)
	obj.SetLabels(labels)
}

// OwnerUID returns the UID of the Cluster that owns an object of the hub, or "".
func OwnerUID(obj client.Object) types.UID { return types.UID(obj.GetLabels()[clusterUIDLabel]) }

// isOwnedBy returns whether obj has the labels of a Cluster with that name and is not being deleted. Only registrations
// set all three labels.
func isOwnedBy(obj client.Object, cluster string) bool {
	labels := obj.GetLabels()
	return labels[clusterv1alpha1.SystemLabel] == "true" && labels[clusterLabel] == cluster && OwnerUID(obj) != "" && obj.GetDeletionTimestamp().IsZero()
}

func hasOtherOwner(obj client.Object, cluster types.UID) bool {
	return slices.ContainsFunc(obj.GetOwnerReferences(), refersToOther(cluster))
}

// refersToOther returns a predicate for owner references to a Cluster other than cluster.
func refersToOther(cluster types.UID) func(metav1.OwnerReference) bool {
	return func(ref metav1.OwnerReference) bool {
		group, _, _ := strings.Cut(ref.APIVersion, "/")
		return group == clusterv1alpha1.GroupVersion.Group && ref.Kind == clusterv1alpha1.ClusterKind && ref.UID != cluster
	}
}

// Adopt makes cluster the owner of obj. An earlier Cluster with the same name was its owner. Adopt returns a conflict
// if cluster has been deleted, or if obj has changed since it was read. hub must read from the API server.
func Adopt(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster, obj client.Object) error {
	return adopt(ctx, hub, cluster, obj, func() {})
}

// adopt is Adopt with a further change of obj.
func adopt(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster, obj client.Object, change func()) error {
	live := &clusterv1alpha1.Cluster{}
	if err := hub.Get(ctx, client.ObjectKeyFromObject(cluster), live); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("read cluster(%s): %w", cluster.Name, err)
	}
	if live.UID != cluster.UID {
		resource := clusterv1alpha1.GroupVersion.WithResource("clusters").GroupResource()
		return apierrors.NewConflict(resource, cluster.Name, errors.New("it was deleted or replaced"))
	}
	before := obj.DeepCopyObject().(client.Object)
	SetOwnerLabels(obj, cluster)
	change()
	return hub.Patch(ctx, obj, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}), client.FieldOwner(kube.FieldManager))
}

// DeleteHubObjects deletes the hub's objects of a deregistered cluster: the RBAC and the Lease of its agent, its
// credentials, the reservation of its ID, and its execution namespace. It does not wait for the end of their deletion.
// hub must read from the API server. It can be repeated.
func DeleteHubObjects(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster) error {
	return deleteOwned(ctx, hub, cluster, hubObjects(cluster))
}

// DeleteAgentRBAC deletes the RBAC of the agent and its Lease.
func DeleteAgentRBAC(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster) error {
	return deleteOwned(ctx, hub, cluster, append(agentRBAC(cluster.Name), leaseOf(cluster.Name)))
}

// deleteOwned deletes those objects that cluster owns.
func deleteOwned(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster, objects []*metav1.PartialObjectMetadata) error {
	var errs []error
	for _, obj := range objects {
		err := hub.Get(ctx, client.ObjectKeyFromObject(obj), obj)
		if err == nil && isOwnedBy(obj, cluster.Name) && OwnerUID(obj) == cluster.UID {
			err = deleteIfUnchanged(ctx, hub, obj)
		}
		if client.IgnoreNotFound(err) != nil {
			errs = append(errs, fmt.Errorf("delete %s %s on the control plane: %w", obj.Kind, client.ObjectKeyFromObject(obj), err))
		}
	}
	return errors.Join(errs...)
}

// deleteIfUnchanged deletes obj if it has not changed since it was read. Otherwise, for example if a later Cluster has
// adopted it, it returns a conflict.
func deleteIfUnchanged(ctx context.Context, hub client.Client, obj client.Object) error {
	uid, version := obj.GetUID(), obj.GetResourceVersion()
	return client.IgnoreNotFound(hub.Delete(ctx, obj, client.Preconditions{UID: &uid, ResourceVersion: &version}))
}

// DeleteLeftoverRBAC deletes the RBAC of agents whose Cluster with that name was deleted without a cleanup by the hub.
// Their other objects stay: while a hub is being restored, its Clusters may be missing, and only RBAC is created again
// automatically. hub must read from the API server.
func DeleteLeftoverRBAC(ctx context.Context, hub client.Client, name string) error {
	if len(name) > clusterv1alpha1.MaxClusterName {
		return nil
	}
	return deleteRBACWithoutCluster(ctx, hub, client.MatchingLabels{clusterLabel: name}, client.MatchingFields{metav1.ObjectNameField: name})
}

// DeleteAllStaleRBAC is DeleteLeftoverRBAC for all names.
func DeleteAllStaleRBAC(ctx context.Context, hub client.Client) error {
	return deleteRBACWithoutCluster(ctx, hub, client.HasLabels{clusterLabel, clusterUIDLabel})
}

// deleteRBACWithoutCluster deletes the selected RBAC objects whose owner is not one of the selected Clusters.
func deleteRBACWithoutCluster(ctx context.Context, hub client.Client, selected client.ListOption, selectedClusters ...client.ListOption) error {
	found, err := listAgentRBAC(ctx, hub, selected)
	if err != nil || len(found) == 0 {
		return err
	}
	// An RBAC object is created after its Cluster. So a list of Clusters after the list of RBAC objects has every owner
	// that still exists.
	clusters := &clusterv1alpha1.ClusterList{}
	if err := hub.List(ctx, clusters, selectedClusters...); err != nil {
		return fmt.Errorf("list the clusters of the control plane: %w", err)
	}
	owners := map[types.UID]bool{}
	for i := range clusters.Items {
		owners[clusters.Items[i].UID] = true
	}
	var errs []error
	for _, obj := range found {
		if owners[OwnerUID(obj)] {
			continue
		}
		if err := deleteIfUnchanged(ctx, hub, obj); err != nil {
			errs = append(errs, fmt.Errorf("delete %s %s on the control plane: %w", obj.Kind, client.ObjectKeyFromObject(obj), err))
		}
	}
	return errors.Join(errs...)
}

// listAgentRBAC lists the RBAC objects of agents.
func listAgentRBAC(ctx context.Context, hub client.Client, selected client.ListOption) ([]*metav1.PartialObjectMetadata, error) {
	var found []*metav1.PartialObjectMetadata
	for _, kind := range []string{"ClusterRoleBinding", "RoleBinding", "ClusterRole", "Role"} {
		for next := ""; ; {
			list := &metav1.PartialObjectMetadataList{}
			list.SetGroupVersionKind(rbacv1.SchemeGroupVersion.WithKind(kind + "List"))
			if err := hub.List(ctx, list, selected, client.Limit(pageSize), client.Continue(next)); err != nil {
				return nil, fmt.Errorf("list the %s objects of clusters on the control plane: %w", kind, err)
			}
			for i := range list.Items {
				item := &list.Items[i]
				item.SetGroupVersionKind(rbacv1.SchemeGroupVersion.WithKind(kind))
				isAgents := slices.ContainsFunc(agentRBAC(item.Labels[clusterLabel]), func(other *metav1.PartialObjectMetadata) bool {
					return item.Kind == other.Kind && item.Namespace == other.Namespace && item.Name == other.Name
				})
				if isAgents && isOwnedBy(item, item.Labels[clusterLabel]) {
					found = append(found, item)
				}
			}
			if next = list.Continue; next == "" {
				break
			}
		}
	}
	return found, nil
}
