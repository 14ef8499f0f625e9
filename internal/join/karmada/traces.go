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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
)

// What the hub has of a Cluster carries the name and the uid of that in labels, and no owner reference: with one, whoever deletes the Cluster
// decides by the propagation policy that the garbage collector takes everything first, which its withdrawal needs, or that it stays.
const (
	clusterLabel    = "towline.dev/cluster"
	clusterUIDLabel = "towline.dev/cluster-uid"
	// tracesPage is how many traces one request asks for.
	tracesPage = 500
)

// traceKinds are the kinds of traces in the order in which they go: rights first, so that nobody has them when the rest goes.
func traceKinds() []schema.GroupVersionKind {
	return []schema.GroupVersionKind{
		rbacv1.SchemeGroupVersion.WithKind("ClusterRoleBinding"), rbacv1.SchemeGroupVersion.WithKind("RoleBinding"),
		rbacv1.SchemeGroupVersion.WithKind("ClusterRole"), rbacv1.SchemeGroupVersion.WithKind("Role"),
		coordinationv1.SchemeGroupVersion.WithKind("Lease"), corev1.SchemeGroupVersion.WithKind("Secret"),
		corev1.SchemeGroupVersion.WithKind("ConfigMap"), corev1.SchemeGroupVersion.WithKind("Namespace"),
	}
}

// Mark notes on an object of the hub that it goes with cluster.
func Mark(obj client.Object, cluster *clusterv1alpha1.Cluster) {
	mark(obj, map[string]string{clusterv1alpha1.SystemLabel: "true", clusterLabel: cluster.Name, clusterUIDLabel: string(cluster.UID)})
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

// RemoveTraces deletes what the hub has of cluster: the rights of its agent, its credentials, the claim of its id, and its execution space, for
// which nobody waits. hub must read from the API server. It can be repeated.
func RemoveTraces(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster) error {
	traces, err := listTraces(ctx, hub, client.MatchingLabels{clusterLabel: cluster.Name, clusterUIDLabel: string(cluster.UID)})
	if err != nil {
		return err
	}
	return deleteTraces(ctx, hub, traces)
}

// removeRemains is RemoveTraces for a Cluster that is gone and that no hub has looked after: what its registration had not marked yet when it was
// cut off goes, too.
func removeRemains(ctx context.Context, hub client.Client, gone *clusterv1alpha1.Cluster) error {
	return insist(ctx, func() error {
		if err := AdoptSecrets(ctx, hub, gone); err != nil {
			return err
		}
		claim := claimant{hub: hub, id: gone.Spec.ID, name: gone.Name, attempt: gone.Annotations[attemptAnnotation]}
		if err := claim.giveBack(ctx); err != nil {
			return fmt.Errorf("take back the claim of the cluster ID %s: %w", gone.Spec.ID, err)
		}
		return RemoveTraces(ctx, hub, gone)
	})
}

// Sweep deletes what the hub has of Clusters of that name which are gone, though nobody has carried out their removal. hub must read from the
// API server.
func Sweep(ctx context.Context, hub client.Client, name string) error {
	traces, err := listTraces(ctx, hub, client.MatchingLabels{clusterLabel: name})
	if err != nil || len(traces) == 0 {
		return err
	}
	// Read after its traces: what goes with it was made when it existed.
	cluster := &clusterv1alpha1.Cluster{}
	err = hub.Get(ctx, client.ObjectKey{Name: name}, cluster)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("read cluster(%s): %w", name, err)
	}
	stay := cluster.UID
	traces = slices.DeleteFunc(traces, func(trace *metav1.PartialObjectMetadata) bool {
		return Marked(trace) == "" || err == nil && Marked(trace) == stay
	})
	return deleteTraces(ctx, hub, traces)
}

// SweepAll is Sweep for all names.
func SweepAll(ctx context.Context, hub client.Client) error {
	traces, err := listTraces(ctx, hub, client.HasLabels{clusterLabel, clusterUIDLabel})
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
	return deleteTraces(ctx, hub, slices.DeleteFunc(traces, func(trace *metav1.PartialObjectMetadata) bool { return living[Marked(trace)] }))
}

func listTraces(ctx context.Context, hub client.Client, labels client.ListOption) ([]*metav1.PartialObjectMetadata, error) {
	var traces []*metav1.PartialObjectMetadata
	for _, kind := range traceKinds() {
		for next := ""; ; {
			list := &metav1.PartialObjectMetadataList{}
			list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
			if err := hub.List(ctx, list, labels, client.Limit(tracesPage), client.Continue(next)); err != nil {
				return nil, fmt.Errorf("list what %s objects clusters have on the control plane: %w", kind.Kind, err)
			}
			for i := range list.Items {
				// Whoever made it, only what registrations make bears both.
				if list.Items[i].Labels[clusterv1alpha1.SystemLabel] == "true" && list.Items[i].DeletionTimestamp.IsZero() {
					list.Items[i].SetGroupVersionKind(kind)
					traces = append(traces, &list.Items[i])
				}
			}
			if next = list.Continue; next == "" {
				break
			}
		}
	}
	return traces, nil
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
