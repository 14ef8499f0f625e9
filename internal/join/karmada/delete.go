package karmada

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

const (
	// DefaultDeleteTimeout is the default timeout of a deregistration, as in Karmada.
	DefaultDeleteTimeout = time.Minute
	// forceTimeout limits each of two further waits with DeleteOptions.Force: first for the hub, which completes the
	// deletion without the member, and then for the end of forceDeleteCluster.
	forceTimeout = 15 * time.Second
	// deletePollInterval is the interval between two reads of a Cluster in deletion.
	deletePollInterval = 200 * time.Millisecond
)

// ErrNoCluster is returned for a Cluster that does not exist.
var ErrNoCluster = errors.New("no cluster object found in karmada control Plane")

// noClusterError is an ErrNoCluster with Karmada's error text.
type noClusterError struct{ name string }

func (n noClusterError) Error() string {
	return fmt.Sprintf("no cluster object %s found in karmada control Plane", n.name)
}
func (n noClusterError) Is(target error) bool { return target == ErrNoCluster }

// DeleteOptions are the options of DeleteCluster.
type DeleteOptions struct {
	// Orphan keeps the propagated objects on the cluster.
	Orphan bool
	// Force completes the deregistration after Timeout, even without a running hub. Objects may stay on the cluster.
	Force bool
	// Timeout limits the wait for the hub. 0 is no wait.
	Timeout time.Duration
	// Progress is called with the reasons for waiting. It is required.
	Progress func(string)
}

// DeleteCluster deletes a Cluster, and waits until the hub has deleted the propagated objects and the registration. It
// returns an ErrNoCluster if the Cluster does not exist, and an error if its mode is not mode. After the timeout, it
// returns a context.DeadlineExceeded, and the hub continues the deletion. hub must read from the API server.
func DeleteCluster(ctx context.Context, hub client.Client, name string, mode clusterv1alpha1.ClusterSyncMode, o DeleteOptions) error {
	cluster, err := clusterOfMode(ctx, hub, name, mode)
	if err != nil {
		return err
	}
	d := &deletion{hub: hub, cluster: cluster, options: o}
	if err := d.run(ctx); err != nil {
		return fmt.Errorf("delete the cluster object %s: %w", name, err)
	}
	return nil
}

// clusterOfMode reads a Cluster, and returns an error if its mode is not mode.
func clusterOfMode(ctx context.Context, hub client.Client, name string, mode clusterv1alpha1.ClusterSyncMode) (*clusterv1alpha1.Cluster, error) {
	cluster := &clusterv1alpha1.Cluster{}
	err := hub.Get(ctx, client.ObjectKey{Name: name}, cluster)
	if apierrors.IsNotFound(err) {
		return nil, noClusterError{name}
	}
	if err != nil {
		return nil, fmt.Errorf("read the cluster object %s: %w", name, err)
	}
	verb := map[clusterv1alpha1.ClusterSyncMode][2]string{
		clusterv1alpha1.Pull: {"unregister", "unregistering"}, clusterv1alpha1.Push: {"unjoin", "unjoining"},
	}[cluster.Spec.SyncMode]
	if cluster.Spec.SyncMode != mode {
		return nil, fmt.Errorf("cluster %s is a %s mode member cluster, please use command `%s` if you want to continue %s the cluster",
			name, cluster.Spec.SyncMode, verb[0], verb[1])
	}
	return cluster, nil
}

// deletion is one run of DeleteCluster.
type deletion struct {
	hub     client.Client
	cluster *clusterv1alpha1.Cluster
	options DeleteOptions
}

func (d *deletion) run(ctx context.Context) error {
	if d.options.Orphan {
		// The hub must read the option before the deletion.
		if err := fleet.AddDeregisterOptions(ctx, d.hub, d.cluster, kube.DeregisterKeep); err != nil {
			return err
		}
	}
	err := d.hub.Delete(ctx, d.cluster.DeepCopy(), client.Preconditions{UID: &d.cluster.UID})
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	isDeleted, err := d.awaitDeletion(ctx, d.options.Timeout)
	if err != nil {
		return err
	}
	if isDeleted {
		if controllerutil.ContainsFinalizer(d.cluster, clusterv1alpha1.ClusterFinalizer) {
			return nil // the hub has deleted its objects
		}
		return d.deleteHubObjects(ctx)
	}
	if !d.options.Force {
		return fmt.Errorf("wait %s for it to be gone: %w; the hub goes on with it", d.options.Timeout, context.DeadlineExceeded)
	}
	d.options.Progress(fmt.Sprintf("The cluster object %s is not gone after %s; ending its removal by force", d.cluster.Name, d.options.Timeout))
	if err := fleet.AddDeregisterOptions(ctx, d.hub, d.cluster, kube.DeregisterForce, kube.DeregisterAbandon); err != nil {
		return client.IgnoreNotFound(err)
	}
	if isDeleted, err = d.awaitDeletion(ctx, forceTimeout); isDeleted || err != nil {
		return err
	}
	if err := d.forceDeleteCluster(ctx); err != nil {
		return err
	}
	isDeleted, err = d.awaitDeletion(ctx, forceTimeout)
	if err == nil && !isDeleted {
		return fmt.Errorf("wait %s for it to be gone: %w", forceTimeout, context.DeadlineExceeded)
	}
	return err
}

// deleteHubObjects deletes the Cluster's objects on the hub. Objects that the user may not delete stay.
func (d *deletion) deleteHubObjects(ctx context.Context) error {
	return deleteOwned(ctx, d.hub, d.cluster.Name, hubObjects(d.cluster), isMissingOrForbidden)
}

// awaitDeletion waits until the Cluster is deleted or replaced. After limit, it returns false and the error of the last
// read.
func (d *deletion) awaitDeletion(ctx context.Context, limit time.Duration) (isDeleted bool, err error) {
	isReported := false
	// The requests use ctx without the limit, so that a DeadlineExceeded of a request comes from ctx.
	_ = wait.PollUntilContextTimeout(ctx, deletePollInterval, limit, true, func(context.Context) (bool, error) {
		live := &clusterv1alpha1.Cluster{}
		getErr := d.hub.Get(ctx, client.ObjectKeyFromObject(d.cluster), live)
		// With the agent's credentials, the hub returns Forbidden as soon as the permissions of the agent are deleted.
		isDeleted = apierrors.IsNotFound(getErr) || apierrors.IsForbidden(getErr) || getErr == nil && live.UID != d.cluster.UID
		err = nil
		switch {
		case isDeleted:
		case getErr != nil:
			err = fmt.Errorf("read it: %w", getErr) // the API server may be unavailable for a moment
		case !isReported:
			d.options.Progress(fmt.Sprintf("Waiting for the cluster object %s to be deleted", d.cluster.Name))
			isReported = true
		}
		return isDeleted, nil
	})
	return isDeleted, cmp.Or(ctx.Err(), err)
}

// ForceDeleteWorks deletes the Works of a cluster and removes their finalizer, so that the propagated objects stay. It
// can be repeated. hub must read from the API server.
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

// ForceDeleteNamespaceContent is ForceDeleteWorks for Works and ClusterSummaries. Other objects do not block the
// deletion of the execution namespace.
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

// forceDelete deletes obj and removes a finalizer from it. It does nothing if obj was created again since its read.
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

// forceDeleteCluster completes a deregistration without the hub. Objects that the user may not delete stay.
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
