package deregistration

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/summaries"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
)

// state is shared by the steps of one reconcile.
type state struct {
	cluster *libv1beta1.SveltosCluster
	member  fleet.Member
	// unreachable is the reason why the member is unreachable, "" if it is reachable.
	unreachable string
	// pollSoon is true if the pending work takes seconds and no watch triggers a reconcile.
	pollSoon bool
	// isFinalizerRemoved is true after the last step. Then there is no object to report on.
	isFinalizerRemoved bool
}

// withdraw deletes the summaries of the cluster and waits until they are withdrawn from the member.
func (c *Controller) withdraw(ctx context.Context, s *state) error {
	summaries, err := c.listSummaries(ctx, s.member)
	if err != nil {
		return err
	}
	for i := range summaries {
		summary := &summaries[i]
		if !summary.DeletionTimestamp.IsZero() {
			continue
		}
		if err := c.Live.Delete(ctx, summary, client.Preconditions{UID: &summary.UID}); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete summary %s: %w", client.ObjectKeyFromObject(summary), err)
		}
	}
	if len(summaries) == 0 {
		return nil
	}
	if s.member.Forced && c.timeLeft(s) <= 0 {
		if err := c.addOption(ctx, s, kube.DeregisterAbandon); err != nil {
			return err
		}
		if c.Forget != nil {
			// Cancel the running requests to the member.
			c.Forget(s.member.Key())
		}
	}
	return s.waitFor(describePending(summaries))
}

// withdrawRemaining withdraws this hub's bundles without a summary: first the member's bundles on the hub
// (deploymentType Local), and then the bundles on the member. It does nothing after the deadline, or after the agent
// was ordered to remove itself.
func (c *Controller) withdrawRemaining(ctx context.Context, s *state) error {
	isRemovalOrdered := s.cluster.Annotations[kube.AnnotationAgentRequest] == kube.AgentRequestRemove
	if c.WithdrawRemaining == nil || isRemovalOrdered || (s.member.Forced && c.timeLeft(s) <= 0) {
		return nil
	}
	if err := c.withdrawRemainingFrom(ctx, s, s.member.OnHub()); err != nil {
		return err
	}
	switch {
	case s.unreachable != "" && s.member.Forced:
		return nil // a forced deregistration does not wait for an unreachable member
	case s.unreachable != "":
		return c.waitForAgent(ctx, s)
	}
	return c.withdrawRemainingFrom(ctx, s, s.member)
}

// withdrawRemainingFrom withdraws this hub's bundles from a member or from the hub, and records the bundles of other
// hubs as left behind.
func (c *Controller) withdrawRemainingFrom(ctx context.Context, s *state, on fleet.Member) error {
	pending, kept, err := c.WithdrawRemaining(ctx, on)
	if err != nil {
		return err
	}
	if s.cluster, err = fleet.RecordLeftBehind(ctx, c.Live, s.cluster, kept...); err != nil {
		return err
	}
	if len(pending) > 0 {
		s.pollSoon = true
		return s.waitFor(pending[0] + " to be withdrawn")
	}
	return nil
}

// waitForAgent returns a phase.Wait for an unreachable agent: it must withdraw the bundles without ClusterSummaries,
// which its cluster may have, before it removes itself. waitForAgent returns nil for a push member, and for an agent
// that has never reported.
func (c *Controller) waitForAgent(ctx context.Context, s *state) error {
	if s.member.Mode != fleet.Pull {
		return nil
	}
	if _, hasReported, err := c.Reachability.evaluateAgent(ctx, s.cluster); err != nil || !hasReported {
		return err
	}
	return s.waitFor("its agent, to withdraw its deployments")
}

// listSummaries lists the summaries of a member from the API server, since the cache may lack some. It does not select
// them by labels, since labels can be lost.
func (c *Controller) listSummaries(ctx context.Context, m fleet.Member) ([]configv1beta1.ClusterSummary, error) {
	var list configv1beta1.ClusterSummaryList
	if err := c.Live.List(ctx, &list, client.InNamespace(m.Namespace)); err != nil {
		return nil, fmt.Errorf("list summaries of cluster %s: %w", m.Key(), err)
	}
	var ofMember []configv1beta1.ClusterSummary
	for _, summary := range list.Items {
		if match.MemberID(&summary) == m.ID() {
			ofMember = append(ofMember, summary)
		}
	}
	return ofMember, nil
}

// describePending returns the text for pending summaries: the first one, with its failure, and the number of others.
func describePending(summaries []configv1beta1.ClusterSummary) string {
	text := "ClusterSummary " + client.ObjectKeyFromObject(&summaries[0]).String() + " to be withdrawn"
	if more := len(summaries) - 1; more > 0 {
		text = fmt.Sprintf("%s and %d more", text, more)
	}
	for _, feature := range summaries[0].Status.FeatureSummaries {
		isRemoving := feature.Status == libv1beta1.FeatureStatusRemoving || feature.Status == libv1beta1.FeatureStatusAgentRemoving
		if isRemoving && feature.FailureMessage != "" {
			return fmt.Sprintf("%s (%s: %s)", text, feature.FeatureID, feature.FailureMessage)
		}
	}
	return text
}

// waitFor returns a phase.Wait for pending work, with the reason if the member is unreachable.
func (s *state) waitFor(pendingWork string) error {
	if s.unreachable != "" {
		pendingWork += "; " + s.unreachable
	}
	return phase.Wait{Reason: kube.OneLine(pendingWork)}
}

// removeRegistration removes the objects of the registration from the member. A forced deregistration does not wait for
// an unreachable member. It waits for a reachable member until the deadline.
func (c *Controller) removeRegistration(ctx context.Context, s *state) error {
	if s.member.Mode == fleet.Pull {
		return c.removeAgent(ctx, s)
	}
	return c.removeHubIdentity(ctx, s)
}

// removeAgent orders the agent to remove itself and waits for its answer.
func (c *Controller) removeAgent(ctx context.Context, s *state) error {
	isRemovalOrdered := s.cluster.Annotations[kube.AnnotationAgentRequest] == kube.AgentRequestRemove
	if isRemovalOrdered && s.cluster.Status.AgentRemovedAt != nil {
		return nil
	}
	if _, hasReported, err := c.Reachability.evaluateAgent(ctx, s.cluster); err != nil || !hasReported {
		return err
	}
	if s.member.Forced && (s.unreachable != "" || isRemovalOrdered && c.timeLeft(s) <= 0) {
		return c.recordLeftBehind(ctx, s, fleet.LeftBehindAgent, "the agent of cluster "+s.member.Key()+" stays on it, without access to the hub")
	}
	if !isRemovalOrdered {
		if err := c.orderAgentRemoval(ctx, s); err != nil {
			return fmt.Errorf("order the agent to remove itself: %w", err)
		}
	}
	return s.waitFor("its agent to remove itself")
}

// orderAgentRemoval orders the agent to remove itself. It first deletes an existing answer, AgentRemovedAt: such an
// answer comes from a backup, and the agent would not overwrite it.
func (c *Controller) orderAgentRemoval(ctx context.Context, s *state) error {
	if s.cluster.Status.AgentRemovedAt != nil {
		changed := s.cluster.DeepCopy()
		changed.Status.AgentRemovedAt = nil
		if err := c.Live.Status().Patch(ctx, changed, client.MergeFrom(s.cluster), client.FieldOwner(kube.FieldManager)); err != nil {
			return err
		}
		s.cluster = changed
	}
	ordered := s.cluster.DeepCopy()
	metav1.SetMetaDataAnnotation(&ordered.ObjectMeta, kube.AnnotationAgentRequest, kube.AgentRequestRemove)
	if s.member.Forced {
		c.setDeadline(ordered)
	}
	if err := c.Live.Patch(ctx, ordered, client.MergeFrom(s.cluster), client.FieldOwner(kube.FieldManager)); err != nil {
		return err
	}
	s.cluster = ordered
	return nil
}

// removeHubIdentity deletes the identity of this hub from a push member.
func (c *Controller) removeHubIdentity(ctx context.Context, s *state) error {
	if s.cluster.Annotations[join.AnnotationMemberIdentity] != "true" {
		return nil
	}
	err := c.deleteMemberObjects(ctx, s)
	switch {
	case err == nil:
		return c.recordIdentityRemoved(ctx, s)
	case ctx.Err() != nil:
		return ctx.Err()
	case s.member.Forced && (s.unreachable != "" || c.timeLeft(s) <= 0):
		return c.recordLeftBehind(ctx, s, "the hub's identity", "the identity of the hub stays on cluster "+s.member.Key()+": "+err.Error())
	case s.unreachable != "":
		return s.waitFor("the hub's identity on it to be removed")
	}
	return fmt.Errorf("remove the hub's identity on it: %w", err)
}

// recordIdentityRemoved records that the identity of this hub on the member is deleted: after the next step, which
// deletes the credentials, the hub cannot check it again.
func (c *Controller) recordIdentityRemoved(ctx context.Context, s *state) error {
	changed := s.cluster.DeepCopy()
	delete(changed.Annotations, join.AnnotationMemberIdentity)
	if err := c.Live.Patch(ctx, changed, client.MergeFrom(s.cluster), client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("record that the hub's identity on it is removed: %w", err)
	}
	s.cluster = changed
	return nil
}

// deleteMemberObjects calls DeleteMemberObjects with memberDeletionTimeout.
func (c *Controller) deleteMemberObjects(ctx context.Context, s *state) error {
	member, err := c.Config(ctx, s.member)
	if err != nil {
		return err
	}
	hubUID, err := join.ClusterUID(ctx, c.Live)
	if err != nil {
		return err
	}
	limitedCtx, cancel := context.WithTimeout(ctx, memberDeletionTimeout)
	defer cancel()
	// The request is also sent to a member that counts as unreachable: if an earlier reconcile has deleted the identity,
	// the member rejects the hub.
	return c.DeleteMemberObjects(limitedCtx, member, hubUID, s.cluster)
}

// deleteHubObjects deletes the objects of the registration on the hub, and records events about the objects that stay.
func (c *Controller) deleteHubObjects(ctx context.Context, s *state) error {
	unlock, err := c.Locks.Lock(ctx, client.ObjectKeyFromObject(s.cluster))
	if err != nil {
		return err
	}
	defer unlock()
	result, err := join.DeleteHubObjects(ctx, c.Live, c.Kinds, s.cluster)
	if len(result.Deleted) > 0 {
		log.FromContext(ctx).Info("deleted the registration of a cluster", logkeys.Count, len(result.Deleted))
	}
	if err != nil {
		return err
	}
	for _, kept := range result.Kept {
		// Events that differ only in their text are merged. The related object makes them distinct.
		object := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: kept.Ref.Namespace, Name: kept.Ref.Name}}
		object.SetGroupVersionKind(kept.Ref.GVK())
		c.Events.Eventf(s.cluster, object, corev1.EventTypeWarning, "LeftBehind", libv1beta1.SveltosClusterKind, "stays on the hub: %s", kept)
	}
	return nil
}

// removeFinalizer deletes the ClusterConfiguration and removes the finalizer, so that the API server deletes the
// cluster.
func (c *Controller) removeFinalizer(ctx context.Context, s *state) error {
	changed := s.cluster.DeepCopy()
	if !controllerutil.RemoveFinalizer(changed, kube.FinalizerCluster) {
		return nil
	}
	if err := summaries.DeleteConfiguration(ctx, c.Live, s.member); err != nil {
		return err
	}
	// Optimistic lock: finalizers that others add concurrently stay.
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Live.Patch(ctx, changed, patch, client.FieldOwner(kube.FieldManager)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("remove finalizer: %w", err)
	}
	s.isFinalizerRemoved = true
	c.recordEvent(s, corev1.EventTypeNormal, "Deregistered", "cluster "+s.member.Key()+" is deregistered")
	return nil
}

// report sets the failureMessage of the cluster to the pending work, if it differs.
func (c *Controller) report(ctx context.Context, s *state, outcome phase.Outcome) error {
	transient := apierrors.IsConflict(outcome.Err) || errors.Is(outcome.Err, context.Canceled)
	if s.isFinalizerRemoved || outcome.Kind == phase.Done || transient {
		return nil
	}
	message := join.WaitingPrefix + kube.OneLine(outcome.Message())
	if outcome.Kind != phase.Waiting {
		message = join.WaitingPrefix + "the hub, which will retry: " + kube.OneLine(outcome.Message())
	}
	if s.cluster.Status.FailureMessage == message {
		return nil
	}
	changed := s.cluster.DeepCopy()
	changed.Status.FailureMessage = message
	err := c.Live.Status().Patch(ctx, changed, client.MergeFrom(s.cluster), client.FieldOwner(kube.FieldManager))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("report on cluster %s: %w", s.member.Key(), err)
	}
	return nil
}

// recordEvent records an event on the cluster object.
func (c *Controller) recordEvent(s *state, kind, reason, note string) {
	c.Events.Eventf(s.cluster, nil, kind, reason, libv1beta1.SveltosClusterKind, "%s", note)
}
