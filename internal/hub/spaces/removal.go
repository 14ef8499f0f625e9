package spaces

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
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
)

const (
	// answerLimit is how long a step of a removal may stand still before the member must show that it is alive.
	answerLimit = 20 * time.Second
	// patienceLimit is how long one may stand still though the member is alive. What was not withdrawn until then is left behind.
	patienceLimit = 2 * time.Minute
	// look is the time between two looks at what is waited for, in case that no watch tells.
	look = 5 * time.Second
)

// judge finds out whether the member can do anything. What is on one that cannot be reached is left behind at once. That it is not ready may be
// said by a status that was lost, or restored: the member decides.
func (c *Controller) judge(ctx context.Context, s *state) error {
	if s.member.Abandoned {
		return nil
	}
	ready := meta.FindStatusCondition(s.cluster.Status.Conditions, clusterv1alpha1.ClusterConditionReady)
	if ready != nil && ready.Status == metav1.ConditionTrue {
		return nil
	}
	if alive, err := c.alive(ctx, s); alive || err != nil {
		return err
	}
	return c.abandon(ctx, s)
}

// abandon notes that what is on the member is left behind.
func (c *Controller) abandon(ctx context.Context, s *state) error {
	if s.member.Abandoned {
		return nil
	}
	changed := s.cluster.DeepCopy()
	if err := karmada.AnnotateDeparture(ctx, c.Live, changed, kube.DeregisterForce, kube.DeregisterAbandon); err != nil {
		return err
	}
	s.cluster, s.member = changed, fleet.FromCluster(changed)
	return nil
}

// withdraw has the summaries and the Works of the Cluster withdrawn, and waits for that.
func (c *Controller) withdraw(ctx context.Context, s *state) error {
	summaries, works := &configv1beta1.ClusterSummaryList{}, &workv1alpha1.WorkList{}
	for _, list := range []client.ObjectList{summaries, works} {
		if err := c.Live.List(ctx, list, client.InNamespace(s.member.Namespace)); err != nil {
			return fmt.Errorf("list what is in the execution space: %w", err)
		}
	}
	left := make([]client.Object, 0, len(summaries.Items)+len(works.Items))
	for i := range summaries.Items {
		left = append(left, &summaries.Items[i])
	}
	for i := range works.Items {
		left = append(left, &works.Items[i])
	}
	if len(left) == 0 {
		return nil
	}
	for _, obj := range left {
		if err := c.deleteOnce(ctx, obj); err != nil {
			return err
		}
	}
	what := fmt.Sprintf("%d ClusterSummaries and %d Works to be withdrawn", len(summaries.Items), len(works.Items))
	if !s.member.Abandoned {
		if hopeless, err := c.hopeless(ctx, s, what); err != nil || !hopeless {
			return waiting(err, what)
		}
		if err := c.abandon(ctx, s); err != nil {
			return err
		}
	}
	return c.letGo(ctx, s, what)
}

// letGo has what is abandoned let go of. Those who look after it do so themselves, and tell what they leave behind; nobody waits long for them.
func (c *Controller) letGo(ctx context.Context, s *state, what string) error {
	if c.Forget != nil {
		// Who is at work on the member would wait for its answers until their time is up.
		c.Forget(s.member.Key())
	}
	if s.member.Mode == fleet.Push && c.patience.still(s.cluster.UID, "abandoned: "+what, c.Clock.Now()) < answerLimit {
		return waiting(nil, what)
	}
	if s.member.Mode == fleet.Pull {
		// Nobody but the agent looks after its Works.
		if err := karmada.ReleaseWorks(ctx, c.Live, s.cluster.Name); err != nil {
			return err
		}
		if c.patience.still(s.cluster.UID, "abandoned: "+what, c.Clock.Now()) < answerLimit {
			return waiting(nil, what)
		}
	}
	if err := karmada.ReleaseSpace(ctx, c.Live, s.cluster.Name); err != nil {
		return err
	}
	return waiting(nil, what)
}

// deleteOnce deletes obj unless that was done already.
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

// hopeless says whether there is no use in waiting any more: nothing has changed for a time, and the member gives no sign of life, or nothing
// has changed for long.
func (c *Controller) hopeless(ctx context.Context, s *state, left string) (bool, error) {
	still := c.patience.still(s.cluster.UID, left, c.Clock.Now())
	if still < answerLimit {
		return false, nil
	}
	if still >= patienceLimit {
		return true, nil
	}
	alive, err := c.alive(ctx, s)
	return !alive, err
}

// waiting says what is waited for, unless err does.
func waiting(err error, what string) error {
	if err != nil {
		return err
	}
	return phase.Wait{After: look, Reason: what}
}

// clear deletes what the hub has of the Cluster, with the rights that its agent needed until now. Nobody waits until the execution space is gone,
// for which Kubernetes takes some seconds: what comes into it at the last moment is let go of by whoever looks after it, since its Cluster is gone.
func (c *Controller) clear(ctx context.Context, s *state) error {
	return karmada.RemoveTraces(ctx, c.Live, s.cluster)
}

// sweep deletes what the hub has of a Cluster that went without us, of which the hub of the default shard knows as well as any.
func (c *Controller) sweep(ctx context.Context, name string) error {
	if !c.Shard.IsDefault() {
		return nil
	}
	return karmada.Sweep(ctx, c.Live, name)
}

// sweepAll is sweep for all Clusters that went while no hub was there.
func (c *Controller) sweepAll(ctx context.Context) error {
	// It ends when it has succeeded, or with the hub.
	_ = wait.PollUntilContextCancel(ctx, retryMost, true, func(ctx context.Context) (bool, error) {
		err := karmada.SweepAll(ctx, c.Live)
		if err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "sweep what is left of clusters that are gone")
		}
		return err == nil, nil
	})
	return nil
}

// release lets the Cluster go.
func (c *Controller) release(ctx context.Context, s *state) error {
	free := s.cluster.DeepCopy()
	if !controllerutil.RemoveFinalizer(free, clusterv1alpha1.ClusterFinalizer) {
		return nil
	}
	// The lock keeps finalizers of others.
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Live.Patch(ctx, free, patch, client.FieldOwner(kube.FieldManager)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("remove finalizer: %w", err)
	}
	c.patience.end(s.cluster.UID)
	if c.Forget != nil {
		c.Forget(s.member.Key())
	}
	c.Events.Eventf(s.cluster, nil, corev1.EventTypeNormal, "RemoveExecutionSpaceSucceed", "RemoveExecutionSpace", "cluster %s is removed", s.cluster.Name)
	return nil
}
