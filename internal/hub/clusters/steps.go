package clusters

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/clusterstatus"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
)

// configTimeout limits one call of MemberConfig.
const configTimeout = 5 * time.Second

// state is the data that the steps of one reconcile share.
type state struct {
	cluster *clusterv1alpha1.Cluster
	member  fleet.Member
	// status is the desired status. patchStatus writes it.
	status clusterv1alpha1.ClusterStatus
	// specErr is the error of completeSpec. The last step returns it.
	specErr error
	// requeueAfter is the time until the next reconcile; zero means that only a watch event triggers it.
	requeueAfter time.Duration
}

// observe computes s.status by the mode of the member.
func (c *Controller) observe(ctx context.Context, s *state) error {
	return map[fleet.Mode]func(context.Context, *state) error{fleet.Push: c.observePush, fleet.Pull: c.evaluatePull}[s.member.Mode](ctx, s)
}

// observePush sends requests to a push member and sets s.status. A failure of the member is part of the status, not an
// error.
func (c *Controller) observePush(ctx context.Context, s *state) error {
	s.requeueAfter = wait.Jitter(observeInterval, observeJitter)
	observer, err := c.ensureObserver(ctx, s)
	if err != nil {
		if ctx.Err() != nil || isHubError(err) {
			return err
		}
		if apierrors.IsNotFound(err) && karmada.IsRegistering(s.cluster) {
			s.status = registeringStatus(s.cluster.Status, c.Clock.Now())
			return nil
		}
		c.updateFailures(s.cluster.Name, func(before int) int { return before + 1 })
		s.status = noConfigStatus(s.cluster.Status, err, c.Clock.Now())
		return nil
	}
	observed := observer.Observe(ctx, s.cluster.Status, s.cluster.Spec.ResourceModels)
	if ctx.Err() != nil {
		return fmt.Errorf("observe %s: %w", s.member.Name, ctx.Err())
	}
	c.updateFailures(s.cluster.Name, func(before int) int {
		if observer.Failures() == 0 {
			return 0
		}
		return before + 1
	})
	// An observation can take seconds. If the Cluster was deleted, refused or changed to another mode meanwhile, the
	// result must not be written.
	latest := &clusterv1alpha1.Cluster{}
	if err := c.Hub.Get(ctx, client.ObjectKeyFromObject(s.cluster), latest); err != nil {
		return fmt.Errorf("read cluster %s: %w", s.member.Name, err)
	}
	if latest.UID != s.cluster.UID || latest.Spec.SyncMode != s.cluster.Spec.SyncMode || fleet.FromCluster(latest).Refused != "" {
		return phase.Wait{After: conflictRetryDelay, Reason: "the cluster was replaced or changed during the observation"}
	}
	s.cluster, s.member, s.status = latest, fleet.FromCluster(latest), observed
	return nil
}

// isHubError returns whether an error of MemberConfig is a failure of a request to the hub: the member may be healthy.
func isHubError(err error) bool {
	var netErr net.Error
	return errors.As(err, &netErr) || errors.Is(err, context.DeadlineExceeded) || apierrors.IsServerTimeout(err) || apierrors.IsTimeout(err) ||
		apierrors.IsTooManyRequests(err) || apierrors.IsInternalError(err) || apierrors.IsServiceUnavailable(err)
}

// evaluatePull sets s.status from the heartbeats of the agent of a pull member. While the agent is not silent, s.status
// is the status that the agent has written.
func (c *Controller) evaluatePull(ctx context.Context, s *state) error {
	c.observers.drop(s.member.Name)
	liveness, err := c.Heartbeats.Evaluate(ctx, s.member, reportID(s.cluster.Status))
	if err != nil {
		return err
	}
	if ready := readyCondition(s.cluster.Status); ready == nil || ready.Status == metav1.ConditionUnknown {
		// The agent has never reported, or the hub has reported it as silent: only a report of the agent changes that.
		return nil
	}
	if liveness.State == heartbeats.Silent {
		s.status = silentStatus(s.cluster.Status, c.Clock.Now())
		return nil
	}
	s.requeueAfter = liveness.Remaining
	return nil
}

// patchStatus writes the status if it differs, and records events about the changes.
func (c *Controller) patchStatus(ctx context.Context, s *state) error {
	before := s.cluster.Status
	if equality.Semantic.DeepEqual(before, s.status) {
		c.recordEvents(s, before)
		return nil
	}
	patched := s.cluster.DeepCopy()
	patched.Status = s.status
	// The patch has the whole list of conditions. The optimistic lock keeps concurrent changes of it by an agent or
	// another controller.
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Hub.Status().Patch(ctx, patched, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return waitOnConflict(fmt.Errorf("patch status of cluster %s: %w", s.member.Name, err))
	}
	s.cluster = patched
	c.recordEvents(s, before)
	return nil
}

// completeSpec writes the default resource models, and moves the deprecated field zone to zones. It is the first step,
// so that the spec is complete when the cluster becomes ready. If the API server rejects the spec, it sets s.specErr,
// so that the other steps run first.
func (c *Controller) completeSpec(ctx context.Context, s *state) error {
	err := c.patchSpec(ctx, s, func(spec *clusterv1alpha1.ClusterSpec) {
		if len(spec.ResourceModels) == 0 {
			spec.ResourceModels = clusterstatus.DefaultResourceModels()
		}
		if spec.Zone != "" {
			spec.Zones, spec.Zone = []string{spec.Zone}, ""
		}
	})
	var conflict phase.Wait
	if errors.As(err, &conflict) || apierrors.IsNotFound(err) {
		return err
	}
	s.specErr = err
	return nil
}

// updateTaints writes desiredTaints to the spec.
func (c *Controller) updateTaints(ctx context.Context, s *state) error {
	return c.patchSpec(ctx, s, func(spec *clusterv1alpha1.ClusterSpec) {
		spec.Taints = desiredTaints(spec.Taints, readyCondition(s.cluster.Status), c.Clock.Now())
	})
}

// patchSpec patches the spec with the result of change. It does nothing for a Cluster that is being deleted.
func (c *Controller) patchSpec(ctx context.Context, s *state, change func(*clusterv1alpha1.ClusterSpec)) error {
	if s.member.Deleting {
		return nil
	}
	patched := s.cluster.DeepCopy()
	change(&patched.Spec)
	if equality.Semantic.DeepEqual(s.cluster.Spec, patched.Spec) {
		return nil
	}
	// The patch has whole lists. The optimistic lock keeps concurrent changes of them, for example taints of users.
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Hub.Patch(ctx, patched, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return waitOnConflict(fmt.Errorf("patch spec of cluster %s: %w", s.member.Name, err))
	}
	s.cluster = patched
	return nil
}

// waitOnConflict returns a phase.Wait for a write conflict, and any other error unchanged.
func waitOnConflict(err error) error {
	if apierrors.IsConflict(err) {
		return phase.Wait{After: conflictRetryDelay, Reason: err.Error()}
	}
	return err
}

// recordEvents records a change of the condition Ready as an event. It records none for a Cluster that is being
// deleted: the deregistration has its own events.
func (c *Controller) recordEvents(s *state, before clusterv1alpha1.ClusterStatus) {
	ready := readyCondition(s.status)
	former, hasFormer := c.replaceLastReady(s.cluster.Name, conditionSummary(ready))
	if !hasFormer {
		former = conditionSummary(readyCondition(before))
	}
	if ready == nil || former == conditionSummary(ready) || s.member.Deleting || ready.Reason == clusterv1alpha1.ReasonRegistrationNotFinished {
		return
	}
	if ready.Status == metav1.ConditionTrue {
		c.Events.Eventf(s.cluster, nil, corev1.EventTypeNormal, ready.Reason, clusterv1alpha1.ClusterKind, "cluster %s is ready, Kubernetes %s",
			s.cluster.Name, s.status.KubernetesVersion)
		return
	}
	c.Events.Eventf(s.cluster, nil, corev1.EventTypeWarning, ready.Reason, clusterv1alpha1.ClusterKind, "cluster %s: %s", s.cluster.Name, ready.Message)
}

// replaceLastReady replaces the entry of a Cluster in c.lastReady and returns the former entry; ok is false if there
// was none.
func (c *Controller) replaceLastReady(name, summary string) (former string, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lastReady == nil {
		c.lastReady = map[string]string{}
	}
	former, ok = c.lastReady[name]
	c.lastReady[name] = summary
	return former, ok
}

// conditionSummary returns the status and the reason of a condition, "" for nil.
func conditionSummary(ready *metav1.Condition) string {
	if ready == nil {
		return ""
	}
	return string(ready.Status) + "/" + ready.Reason
}
