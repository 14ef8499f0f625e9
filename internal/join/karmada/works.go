package karmada

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// ForceDeleteWorks deletes the Works of a cluster and removes their finalizer. The objects on the cluster stay. hub
// must read from the API server. It can be repeated.
func ForceDeleteWorks(ctx context.Context, hub client.Client, cluster string) error {
	works := &workv1alpha1.WorkList{}
	if err := hub.List(ctx, works, client.InNamespace(fleet.ExecutionSpace(cluster))); err != nil {
		return fmt.Errorf("list the Works of cluster %s: %w", cluster, err)
	}
	var errs []error
	for i := range works.Items {
		errs = append(errs, forceDelete(ctx, hub, &works.Items[i], workv1alpha1.ExecutionFinalizer))
	}
	return errors.Join(errs...)
}

// ForceDeleteNamespaceContent deletes the Works and the ClusterSummaries of a cluster and removes their finalizers. No
// other objects block the deletion of its execution namespace. See ForceDeleteWorks.
func ForceDeleteNamespaceContent(ctx context.Context, hub client.Client, cluster string) error {
	errs := []error{ForceDeleteWorks(ctx, hub, cluster)}
	summaries := &configv1beta1.ClusterSummaryList{}
	if err := hub.List(ctx, summaries, client.InNamespace(fleet.ExecutionSpace(cluster))); err != nil && !meta.IsNoMatchError(err) {
		errs = append(errs, fmt.Errorf("list the ClusterSummaries of cluster %s: %w", cluster, err))
	}
	for i := range summaries.Items {
		errs = append(errs, forceDelete(ctx, hub, &summaries.Items[i], configv1beta1.ClusterSummaryFinalizer))
	}
	return errors.Join(errs...)
}

// forceDelete deletes obj and removes a finalizer from it.
func forceDelete(ctx context.Context, hub client.Client, obj client.Object, finalizer string) error {
	uid := obj.GetUID()
	err := kube.RetryOn(ctx, kube.IsStaleWrite, func() error {
		if err := hub.Get(ctx, client.ObjectKeyFromObject(obj), obj); err != nil || obj.GetUID() != uid {
			return client.IgnoreNotFound(err)
		}
		if obj.GetDeletionTimestamp().IsZero() {
			if err := hub.Delete(ctx, obj, client.Preconditions{UID: &uid}); err != nil {
				return client.IgnoreNotFound(err)
			}
			if err := hub.Get(ctx, client.ObjectKeyFromObject(obj), obj); err != nil {
				return client.IgnoreNotFound(err)
			}
		}
		before := obj.DeepCopyObject().(client.Object)
		if !controllerutil.RemoveFinalizer(obj, finalizer) {
			return nil
		}
		patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
		return client.IgnoreNotFound(hub.Patch(ctx, obj, patch, client.FieldOwner(kube.FieldManager)))
	})
	if err != nil {
		return fmt.Errorf("release %T %s: %w", obj, client.ObjectKeyFromObject(obj), err)
	}
	return nil
}

// forceDeleteCluster completes a deregistration without a hub. Objects that the user is not allowed to delete stay.
func (d *deletion) forceDeleteCluster(ctx context.Context) error {
	name := d.cluster.Name
	if err := ForceDeleteNamespaceContent(ctx, d.hub, name); err != nil {
		return err
	}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fleet.ExecutionSpace(name)}}
	if err := d.hub.Delete(ctx, namespace); err != nil && !isMissingOrForbidden(err) {
		return fmt.Errorf("delete namespace %s: %w", namespace.Name, err)
	}
	if err := d.deleteHubObjects(ctx); err != nil {
		return err
	}
	return forceDelete(ctx, d.hub, d.cluster, clusterv1alpha1.ClusterFinalizer)
}
