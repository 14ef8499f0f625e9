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

// What the hub has of a Cluster carries the name and the uid of that in labels, and no owner reference: with one,
// whoever deletes the Cluster decides by the propagation policy that the garbage collector takes everything first,
// which its withdrawal needs, or that it stays.
const (
	clusterLabel    = "towline.dev/cluster"
	clusterUIDLabel = "towline.dev/cluster-uid"
	// tracesPage is how many traces one request asks for.
	tracesPage = 500
)

// AgentRole returns the name of the roles and bindings of a Cluster's agent on the hub.
func AgentRole(cluster string) string { return "system:karmada:" + cluster + ":agent" }

// rights names the objects that give the agent of a Cluster its rights, those first that end them at once. One whose
// name is too long has none.
func rights(cluster string) []*metav1.PartialObjectMetadata {
	if len(cluster) > clusterv1alpha1.MaxClusterName {
		return nil
	}
	role, space, group := AgentRole(cluster), fleet.ExecutionSpace(cluster), rbacv1.SchemeGroupVersion
	return []*metav1.PartialObjectMetadata{
		trace(group.WithKind("ClusterRoleBinding"), "", role), trace(group.WithKind("RoleBinding"), space, role),
		trace(group.WithKind("RoleBinding"), kube.AgentNamespace, role),
		trace(group.WithKind("ClusterRole"), "", role), trace(group.WithKind("Role"), space, role),
	}
}

// traces names all that the hub may have of a Cluster, in the order in which it goes.
func traces(cluster *clusterv1alpha1.Cluster) []*metav1.PartialObjectMetadata {
	space := fleet.ExecutionSpace(cluster.Name)
	all := append(rights(cluster.Name), trace(coordinationv1.SchemeGroupVersion.WithKind("Lease"), space, cluster.Name))
	for _, secret := range secretsOf(cluster) {
		all = append(all, trace(corev1.SchemeGroupVersion.WithKind("Secret"), secret.Namespace, secret.Name))
	}
	return append(all,
		trace(corev1.SchemeGroupVersion.WithKind("ConfigMap"), fleet.DefaultClusterNamespace, claimName(cluster.Spec.ID)),
		trace(corev1.SchemeGroupVersion.WithKind("Namespace"), "", space))
}

func trace(kind schema.GroupVersionKind, namespace, name string) *metav1.PartialObjectMetadata {
	named := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	named.SetGroupVersionKind(kind)
	return named
}

// secretsOf names the Secrets of a Cluster: those that it refers to, and those that a registration makes.
func secretsOf(cluster *clusterv1alpha1.Cluster) []clusterv1alpha1.LocalSecretReference {
	secrets := []clusterv1alpha1.LocalSecretReference{
		{Namespace: fleet.DefaultClusterNamespace, Name: cluster.Name}, {Namespace: fleet.DefaultClusterNamespace, Name: impersonatorSecret(cluster.Name)},
	}
	for _, ref := range []*clusterv1alpha1.LocalSecretReference{cluster.Spec.SecretRef, cluster.Spec.ImpersonatorSecretRef} {
		if ref != nil && !slices.Contains(secrets, *ref) {
			secrets = append(secrets, *ref)
		}
	}
	return secrets
}

// Mark notes on an object of the hub that it goes with cluster, and with no other one.
func Mark(obj client.Object, cluster *clusterv1alpha1.Cluster) {
	disown(obj, cluster.UID)
	mark(obj, map[string]string{clusterv1alpha1.SystemLabel: "true", clusterLabel: cluster.Name, clusterUIDLabel: string(cluster.UID)})
}

// disown takes off the owner references to other Clusters: those are gone, and the garbage collector would take obj
// with them.
func disown(obj client.Object, cluster types.UID) {
	if !owned(obj, cluster) {
		return
	}
	obj.SetOwnerReferences(slices.DeleteFunc(slices.Clone(obj.GetOwnerReferences()), byOther(cluster)))
}

func owned(obj client.Object, cluster types.UID) bool {
	return slices.ContainsFunc(obj.GetOwnerReferences(), byOther(cluster))
}

// byOther says of owner references whether they are to a Cluster other than cluster.
func byOther(cluster types.UID) func(metav1.OwnerReference) bool {
	return func(ref metav1.OwnerReference) bool {
		group, _, _ := strings.Cut(ref.APIVersion, "/")
		return group == clusterv1alpha1.GroupVersion.Group && ref.Kind == clusterv1alpha1.ClusterKind && ref.UID != cluster
	}
}

// Adopt lets obj go with cluster that went with an earlier Cluster of its name. It is a conflict if cluster is gone
// itself, or obj has changed since it was read. hub must read from the API server.
func Adopt(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster, obj client.Object) error {
	return adopt(ctx, hub, cluster, obj, func() {})
}

// adopt is Adopt with something else that is written on obj.
func adopt(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster, obj client.Object, also func()) error {
	live := &clusterv1alpha1.Cluster{}
	if err := hub.Get(ctx, client.ObjectKeyFromObject(cluster), live); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("read cluster(%s): %w", cluster.Name, err)
	}
	if live.UID != cluster.UID {
		resource := clusterv1alpha1.GroupVersion.WithResource("clusters").GroupResource()
		return apierrors.NewConflict(resource, cluster.Name, errors.New("it is another one now"))
	}
	before := obj.DeepCopyObject().(client.Object)
	Mark(obj, cluster)
	also()
	return hub.Patch(ctx, obj, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}), client.FieldOwner(kube.FieldManager))
}

func mark(obj client.Object, with map[string]string) {
	labels := maps.Clone(obj.GetLabels())
	if labels == nil {
		labels = map[string]string{}
	}
	maps.Copy(labels, with)
	obj.SetLabels(labels)
}

// unmark notes on an object of a registration that it goes with no Cluster, yet.
func unmark(obj client.Object) {
	mark(obj, map[string]string{clusterv1alpha1.SystemLabel: "true"})
	labels := obj.GetLabels()
	delete(labels, clusterLabel)
	delete(labels, clusterUIDLabel)
}

// Marked returns the uid of the Cluster that an object of the hub goes with, "" if it goes with none.
func Marked(obj client.Object) types.UID { return types.UID(obj.GetLabels()[clusterUIDLabel]) }

// RemoveTraces deletes what the hub has of cluster, which somebody removes: the rights of its agent, its credentials,
// the claim of its id, and its execution space, for which nobody waits. hub must read from the API server. It can be
// repeated.
func RemoveTraces(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster) error {
	return removeOwn(ctx, hub, cluster, traces(cluster))
}

// RemoveRights is RemoveTraces for the rights of its agent, and its Lease, alone.
func RemoveRights(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster) error {
	lease := trace(coordinationv1.SchemeGroupVersion.WithKind("Lease"), fleet.ExecutionSpace(cluster.Name), cluster.Name)
	return removeOwn(ctx, hub, cluster, append(rights(cluster.Name), lease))
}

func removeOwn(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster, named []*metav1.PartialObjectMetadata) error {
	found, err := findTraces(ctx, hub, cluster.Name, named)
	found = slices.DeleteFunc(found, func(trace *metav1.PartialObjectMetadata) bool { return Marked(trace) != cluster.UID })
	return errors.Join(deleteTraces(ctx, hub, found), err)
}

// removeRemains is RemoveTraces for a Cluster that was removed and that no hub has looked after: what its registration
// had not marked yet when it was cut off goes, too.
func removeRemains(ctx context.Context, hub client.Client, gone *clusterv1alpha1.Cluster) error {
	return insist(ctx, func() error {
		if err := markOwn(ctx, hub, gone); err != nil {
			return err
		}
		claim := claimant{hub: hub, id: gone.Spec.ID, name: gone.Name, attempt: gone.Annotations[attemptAnnotation]}
		if err := claim.giveBack(ctx); err != nil {
			return fmt.Errorf("take back the claim of the cluster ID %s: %w", gone.Spec.ID, err)
		}
		return RemoveTraces(ctx, hub, gone)
	})
}

// Sweep takes back the rights of the agents of Clusters of that name which are gone, though nobody has carried out
// their removal. It touches nothing else: a hub that was restored may not have its Clusters yet, and rights are all
// that is written again by itself. hub must read from the API server.
func Sweep(ctx context.Context, hub client.Client, name string) error {
	found, err := findTraces(ctx, hub, name, rights(name))
	if err != nil || len(found) == 0 {
		return err
	}
	// Read after its rights: what goes with it was made when it existed.
	cluster := &clusterv1alpha1.Cluster{}
	err = hub.Get(ctx, client.ObjectKey{Name: name}, cluster)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("read cluster(%s): %w", name, err)
	}
	stay := cluster.UID
	return deleteTraces(ctx, hub, slices.DeleteFunc(found, func(right *metav1.PartialObjectMetadata) bool { return err == nil && Marked(right) == stay }))
}

// SweepAll is Sweep for all names.
func SweepAll(ctx context.Context, hub client.Client) error {
	found, err := listRights(ctx, hub)
	if err != nil {
		return err
	}
	clusters := &clusterv1alpha1.ClusterList{}
	if err := hub.List(ctx, clusters); err != nil {
		return fmt.Errorf("list the clusters of the control plane: %w", err)
	}
	living := map[types.UID]bool{}
	for i := range clusters.Items {
		living[clusters.Items[i].UID] = true
	}
	return deleteTraces(ctx, hub, slices.DeleteFunc(found, func(right *metav1.PartialObjectMetadata) bool { return living[Marked(right)] }))
}

// findTraces reads those of the objects named that go with a Cluster of that name, and are not on their way out. What
// it can read it returns with the error.
func findTraces(ctx context.Context, hub client.Client, cluster string, named []*metav1.PartialObjectMetadata) (found []*metav1.PartialObjectMetadata, err error) {
	var errs []error
	for _, trace := range named {
		switch err := hub.Get(ctx, client.ObjectKeyFromObject(trace), trace); {
		case client.IgnoreNotFound(err) != nil:
			errs = append(errs, fmt.Errorf("read %s %s on the control plane: %w", trace.Kind, client.ObjectKeyFromObject(trace), err))
		case err == nil && isTrace(trace, cluster):
			found = append(found, trace)
		}
	}
	return found, errors.Join(errs...)
}

// isTrace says whether an object goes with a Cluster of that name, and stays. Whoever made it, only what registrations
// make bears all three.
func isTrace(obj client.Object, cluster string) bool {
	labels := obj.GetLabels()
	return labels[clusterv1alpha1.SystemLabel] == "true" && labels[clusterLabel] == cluster && Marked(obj) != "" && obj.GetDeletionTimestamp().IsZero()
}

// listRights lists the rights of the agents of all Clusters.
func listRights(ctx context.Context, hub client.Client) ([]*metav1.PartialObjectMetadata, error) {
	var found []*metav1.PartialObjectMetadata
	for _, kind := range []string{"ClusterRoleBinding", "RoleBinding", "ClusterRole", "Role"} {
		for next := ""; ; {
			list := &metav1.PartialObjectMetadataList{}
			list.SetGroupVersionKind(rbacv1.SchemeGroupVersion.WithKind(kind + "List"))
			if err := hub.List(ctx, list, client.HasLabels{clusterLabel, clusterUIDLabel}, client.Limit(tracesPage), client.Continue(next)); err != nil {
				return nil, fmt.Errorf("list what %s objects clusters have on the control plane: %w", kind, err)
			}
			for i := range list.Items {
				item := &list.Items[i]
				item.SetGroupVersionKind(rbacv1.SchemeGroupVersion.WithKind(kind))
				if cluster := item.Labels[clusterLabel]; isTrace(item, cluster) && slices.ContainsFunc(rights(cluster), sameAs(item)) {
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

func sameAs(one *metav1.PartialObjectMetadata) func(*metav1.PartialObjectMetadata) bool {
	return func(other *metav1.PartialObjectMetadata) bool {
		return one.Kind == other.Kind && one.Namespace == other.Namespace && one.Name == other.Name
	}
}

// deleteTraces deletes traces as they were read: one that has become a later Cluster's meanwhile makes that a conflict.
func deleteTraces(ctx context.Context, hub client.Client, traces []*metav1.PartialObjectMetadata) error {
	var errs []error
	for _, trace := range traces {
		uid, version := trace.GetUID(), trace.GetResourceVersion()
		if err := client.IgnoreNotFound(hub.Delete(ctx, trace, client.Preconditions{UID: &uid, ResourceVersion: &version})); err != nil {
			errs = append(errs, fmt.Errorf("delete %s %s on the control plane: %w", trace.Kind, client.ObjectKeyFromObject(trace), err))
		}
	}
	return errors.Join(errs...)
}
