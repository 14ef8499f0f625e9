package executionnamespaces

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/summaries"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
)

const (
	// stallTimeout is how long a step of a removal may make no progress while the member does not answer.
	stallTimeout = 20 * time.Second
	// maxStallTimeout is how long a step may make no progress while the member is alive. After it, the deployments on
	// the member are abandoned.
	maxStallTimeout = 2 * time.Minute
	// pollInterval is the maximal interval between two checks of pending work. A watch usually triggers one sooner.
	pollInterval = 5 * time.Second
)

// abandonUnreachable abandons a member that is not ready and not alive, without a wait. The Ready condition is not
// enough, because a condition that is missing or false may come from a backup.
func (c *Controller) abandonUnreachable(ctx context.Context, s *state) error {
	if s.member.Abandoned {
		return nil
	}
	ready := meta.FindStatusCondition(s.cluster.Status.Conditions, clusterv1alpha1.ClusterConditionReady)
	if ready != nil && ready.Status == metav1.ConditionTrue {
		return nil
	}
	if alive, err := c.isAlive(ctx, s); alive || err != nil {
		return err
	}
	return c.abandon(ctx, s)
}

// abandon records on the Cluster that the member is abandoned: its deployments stay.
func (c *Controller) abandon(ctx context.Context, s *state) error {
	if s.member.Abandoned {
		return nil
	}
	changed := s.cluster.DeepCopy()
	if err := fleet.AddDeregisterOptions(ctx, c.Live, changed, kube.DeregisterForce, kube.DeregisterAbandon); err != nil {
		return err
	}
	s.cluster, s.member = changed, fleet.FromCluster(changed)
	return nil
}

// withdraw deletes the summaries and the Works of the Cluster, and waits until they are withdrawn from the member.
func (c *Controller) withdraw(ctx context.Context, s *state) error {
	summaries, works := &configv1beta1.ClusterSummaryList{}, &workv1alpha1.WorkList{}
	for _, list := range []client.ObjectList{summaries, works} {
		if err := c.Live.List(ctx, list, client.InNamespace(s.member.Namespace)); err != nil {
			return fmt.Errorf("list objects in the execution namespace: %w", err)
		}
	}
	remaining := make([]client.Object, 0, len(summaries.Items)+len(works.Items))
	for i := range summaries.Items {
		remaining = append(remaining, &summaries.Items[i])
	}
	for i := range works.Items {
		remaining = append(remaining, &works.Items[i])
	}
	if len(remaining) == 0 {
		return nil
	}
	for _, obj := range remaining {
		if err := c.deleteOnce(ctx, obj); err != nil {
			return err
		}
	}
	pendingWork := fmt.Sprintf("ClusterSummaries (%d) and Works (%d) to be withdrawn", len(summaries.Items), len(works.Items))
	if !s.member.Abandoned {
		if stalled, err := c.checkStalled(ctx, s, pendingWork); err != nil || !stalled {
			return errorOrWait(err, pendingWork)
		}
		if err := c.abandon(ctx, s); err != nil {
			return err
		}
	}
	return c.forceDeleteAbandoned(ctx, s, pendingWork)
}

// forceDeleteAbandoned removes the finalizers of the summaries and Works of an abandoned member. It returns a
// phase.Wait or an error, never nil. The controllers of these objects first get stallTimeout to remove the finalizers
// themselves, because they record which objects stay on the member.
func (c *Controller) forceDeleteAbandoned(ctx context.Context, s *state, pendingWork string) error {
	if c.Forget != nil {
		// Cancel running requests to the member, which would block these controllers until they time out.
		c.Forget(s.member.Key())
	}
	if s.member.Mode == fleet.Push && c.progress.recordPending(s.cluster.UID, "abandoned: "+pendingWork, c.Clock.Now()) < stallTimeout {
		return errorOrWait(nil, pendingWork)
	}
	if s.member.Mode == fleet.Pull {
		// Only the agent manages the Works of a pull member.
		if err := karmada.ForceDeleteWorks(ctx, c.Live, s.cluster.Name); err != nil {
			return err
		}
		if c.progress.recordPending(s.cluster.UID, "abandoned: "+pendingWork, c.Clock.Now()) < stallTimeout {
			return errorOrWait(nil, pendingWork)
		}
	}
	if err := karmada.ForceDeleteNamespaceContent(ctx, c.Live, s.cluster.Name); err != nil {
		return err
	}
	return errorOrWait(nil, pendingWork)
}

// deleteOnce deletes obj unless it is being deleted.
func (c *Controller) deleteOnce(ctx context.Context, obj client.Object) error {
	if !obj.GetDeletionTimestamp().IsZero() {
		return nil
	}
	uid := obj.GetUID()
	if err := c.Live.Delete(ctx, obj, client.Preconditions{UID: &uid}); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete %T %s: %w", obj, client.ObjectKeyFromObject(obj), err)
	}
	return nil
}

// checkStalled records the pending work, and returns whether the removal is stalled. Then it must stop waiting.
func (c *Controller) checkStalled(ctx context.Context, s *state, pendingWork string) (bool, error) {
	stalledFor := c.progress.recordPending(s.cluster.UID, pendingWork, c.Clock.Now())
	if stalledFor < stallTimeout {
		return false, nil
	}
	if stalledFor >= maxStallTimeout {
		return true, nil
	}
	alive, err := c.isAlive(ctx, s)
	return !alive, err
}

// errorOrWait returns err, or a phase.Wait for pending work if err is nil.
func errorOrWait(err error, pendingWork string) error {
	if err != nil {
		return err
	}
	return phase.Wait{After: pollInterval, Reason: pendingWork}
}

// deleteHubObjects deletes the objects of the Cluster on the hub, including the RBAC of its agent. It does not wait
// until the execution namespace is deleted, which takes some seconds. Objects that are created in it meanwhile do not
// block its deletion: other controllers remove their finalizers, because the Cluster is deleted.
func (c *Controller) deleteHubObjects(ctx context.Context, s *state) error {
	return karmada.DeleteHubObjects(ctx, c.Live, s.cluster)
}

// deleteLeftoverRBAC deletes the RBAC of a Cluster that was deleted without its finalizer, so that deleteHubObjects did
// not run. Only the hub of the default shard does so, because the shard of a deleted Cluster is not known.
func (c *Controller) deleteLeftoverRBAC(ctx context.Context, name string) error {
	if !c.Shard.IsDefault() {
		return nil
	}
	return karmada.DeleteLeftoverRBAC(ctx, c.Live, name)
}

// deleteAllLeftoverRBAC is deleteLeftoverRBAC for all Clusters that were deleted while the hub was not running. It
// retries until it succeeds or ctx ends.
func (c *Controller) deleteAllLeftoverRBAC(ctx context.Context) error {
	_ = wait.PollUntilContextCancel(ctx, retryMax, true, func(ctx context.Context) (bool, error) {
		err := karmada.DeleteAllLeftoverRBAC(ctx, c.Live)
		if err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "delete objects of deleted clusters")
		}
		return err == nil, nil
	})
	return nil
}

// removeFinalizer deletes the ClusterConfiguration of the Cluster, and then removes its finalizer.
func (c *Controller) removeFinalizer(ctx context.Context, s *state) error {
	changed := s.cluster.DeepCopy()
	if !controllerutil.RemoveFinalizer(changed, clusterv1alpha1.ClusterFinalizer) {
		return nil
	}
	if err := summaries.DeleteConfiguration(ctx, c.Live, s.member); err != nil {
		return err
	}
	// The optimistic lock keeps the finalizers of others.
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Live.Patch(ctx, changed, patch, client.FieldOwner(kube.FieldManager)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("remove finalizer: %w", err)
	}
	c.progress.remove(s.cluster.UID)
	if c.Forget != nil {
		c.Forget(s.member.Key())
	}
	c.Events.Eventf(s.cluster, nil, corev1.EventTypeNormal, "RemoveExecutionSpaceSucceed", "RemoveExecutionSpace", "cluster %s is removed", s.cluster.Name)
	return nil
}
