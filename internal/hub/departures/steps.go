package departures

import (
	"context"
	"errors"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
)

// state is what the steps of one reconcile know.
type state struct {
	cluster *libv1beta1.SveltosCluster
	member  fleet.Member
	// away says why the member cannot be reached, "" if it can be.
	away string
	// unwatched says that what is waited for is soon over and that no watch tells of it.
	unwatched bool
	// gone says that the cluster object has been let go.
	gone bool
}

// withdraw has the summaries of the cluster withdrawn, and waits for that.
func (c *Controller) withdraw(ctx context.Context, s *state) error {
	summaries, err := c.summaries(ctx, s.member)
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
	if s.member.Forced && c.remaining(s) <= 0 {
		if err := c.option(ctx, s, kube.DeregisterAbandon); err != nil {
			return err
		}
		if c.Forget != nil {
			// Who is at work on the member would wait for its answers until their time is up.
			c.Forget(s.member.Key())
		}
	}
	return s.wait(waitingFor(summaries))
}

// withdrawRest withdraws what the member holds of this hub without a summary, and lists what others deployed, which stays on it.
func (c *Controller) withdrawRest(ctx context.Context, s *state) error {
	told := s.cluster.Annotations[kube.AnnotationAgentOrder] == kube.AgentOrderRemove
	if c.WithdrawRest == nil || told || (s.member.Forced && (s.away != "" || c.remaining(s) <= 0)) {
		return nil
	}
	if s.away != "" {
		return c.awaitAgent(ctx, s)
	}
	pending, kept, err := c.WithdrawRest(ctx, s.member)
	if err != nil {
		return err
	}
	if s.cluster, err = join.LeaveBehind(ctx, c.Live, s.cluster, kept...); err != nil {
		return err
	}
	if len(pending) > 0 {
		s.unwatched = true
		return s.wait(pending[0] + " to be withdrawn")
	}
	return nil
}

// awaitAgent waits for an agent that is away: it may hold more than ClusterSummaries account for, and must not remove itself before. A push
// member is asked if the hub has something to remove there.
func (c *Controller) awaitAgent(ctx context.Context, s *state) error {
	if s.member.Mode != fleet.Pull {
		return nil
	}
	if _, came, err := c.Reach.listen(ctx, s.cluster); err != nil || !came {
		return err
	}
	return s.wait("its agent, to withdraw what it holds")
}

// summaries lists the summaries of a member, those included that no cache knows yet.
func (c *Controller) summaries(ctx context.Context, m fleet.Member) ([]configv1beta1.ClusterSummary, error) {
	var list configv1beta1.ClusterSummaryList
	// Not by their labels, which can be lost.
	if err := c.Live.List(ctx, &list, client.InNamespace(m.Namespace)); err != nil {
		return nil, fmt.Errorf("list summaries of cluster %s: %w", m.Key(), err)
	}
	var mine []configv1beta1.ClusterSummary
	for _, summary := range list.Items {
		if match.Target(&summary) == m.ID() {
			mine = append(mine, summary)
		}
	}
	return mine, nil
}

// waitingFor names one of the summaries and says what is in its way, if it knows.
func waitingFor(summaries []configv1beta1.ClusterSummary) string {
	text := "ClusterSummary " + client.ObjectKeyFromObject(&summaries[0]).String() + " to be withdrawn"
	if more := len(summaries) - 1; more > 0 {
		text = fmt.Sprintf("%s and %d more", text, more)
	}
	for _, feature := range summaries[0].Status.FeatureSummaries {
		leaving := feature.Status == libv1beta1.FeatureStatusRemoving || feature.Status == libv1beta1.FeatureStatusAgentRemoving
		if leaving && feature.FailureMessage != "" {
			return fmt.Sprintf("%s (%s: %s)", text, feature.FeatureID, feature.FailureMessage)
		}
	}
	return text
}

// wait says what the cluster waits for, and what is known of its member.
func (s *state) wait(what string) error {
	if s.away != "" {
		what += "; " + s.away
	}
	return phase.Wait{Reason: oneLine(what)}
}

// dismiss has that removed from the member which its registration put there, each mode in its own way. By force, nobody is waited for who cannot be reached, or
// does not do it in time.
func (c *Controller) dismiss(ctx context.Context, s *state) error {
	return map[fleet.Mode]func(context.Context, *state) error{fleet.Push: c.dismissHub, fleet.Pull: c.dismissAgent}[s.member.Mode](ctx, s)
}

// dismissAgent orders the agent to remove itself and waits until it has committed itself to that.
func (c *Controller) dismissAgent(ctx context.Context, s *state) error {
	told := s.cluster.Annotations[kube.AnnotationAgentOrder] == kube.AgentOrderRemove
	if told && s.cluster.Status.AgentRemovedAt != nil {
		return nil
	}
	if _, came, err := c.Reach.listen(ctx, s.cluster); err != nil || !came {
		return err
	}
	if s.member.Forced && (s.away != "" || told && c.remaining(s) <= 0) {
		return c.leave(ctx, s, join.AgentLeft, "the agent of cluster "+s.member.Key()+" stays on it, without access to the hub")
	}
	if !told {
		if err := c.orderAgent(ctx, s); err != nil {
			return fmt.Errorf("order the agent to remove itself: %w", err)
		}
	}
	return s.wait("its agent to remove itself")
}

// orderAgent orders the agent to remove itself. An answer from before that is from a backup, and goes first: the agent leaves one alone.
func (c *Controller) orderAgent(ctx context.Context, s *state) error {
	if s.cluster.Status.AgentRemovedAt != nil {
		asked := s.cluster.DeepCopy()
		asked.Status.AgentRemovedAt = nil
		if err := c.Live.Status().Patch(ctx, asked, client.MergeFrom(s.cluster), client.FieldOwner(kube.FieldManager)); err != nil {
			return err
		}
		s.cluster = asked
	}
	ordered := s.cluster.DeepCopy()
	metav1.SetMetaDataAnnotation(&ordered.ObjectMeta, kube.AnnotationAgentOrder, kube.AgentOrderRemove)
	if s.member.Forced {
		c.setDeadline(ordered)
	}
	if err := c.Live.Patch(ctx, ordered, client.MergeFrom(s.cluster), client.FieldOwner(kube.FieldManager)); err != nil {
		return err
	}
	s.cluster = ordered
	return nil
}

// dismissHub removes the identity that this hub was given on a push member.
func (c *Controller) dismissHub(ctx context.Context, s *state) error {
	if s.cluster.Annotations[join.AnnotationMemberIdentity] != "true" {
		return nil
	}
	err := c.retractMember(ctx, s)
	switch {
	case err == nil:
		return c.dismissed(ctx, s)
	case ctx.Err() != nil:
		return ctx.Err()
	case s.member.Forced && (s.away != "" || c.remaining(s) <= 0):
		return c.leave(ctx, s, "the hub's identity", "the identity of the hub on cluster "+s.member.Key()+" stays there: "+err.Error())
	case s.away != "":
		return s.wait("the hub's identity on it to be removed")
	}
	return fmt.Errorf("remove the hub's identity on it: %w", err)
}

// dismissed notes that there is no identity on the member any more. The next step deletes the credentials, with which nobody could find out
// any more in another run.
func (c *Controller) dismissed(ctx context.Context, s *state) error {
	noted := s.cluster.DeepCopy()
	delete(noted.Annotations, join.AnnotationMemberIdentity)
	if err := c.Live.Patch(ctx, noted, client.MergeFrom(s.cluster), client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("note that the hub's identity on it is removed: %w", err)
	}
	s.cluster = noted
	return nil
}

func (c *Controller) retractMember(ctx context.Context, s *state) error {
	member, err := c.Config(ctx, s.member)
	if err != nil {
		return err
	}
	hubUID, err := join.HubUID(ctx, c.Live)
	if err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, dismissLimit)
	defer cancel()
	// A member that is away is asked, too: one that took the identity back in an earlier run does not let us in any more.
	return c.RetractMember(limited, member, hubUID, s.cluster)
}

// retract takes back what the registration made on the hub, and reports what stays there of it.
func (c *Controller) retract(ctx context.Context, s *state) error {
	defer c.Turns.Lock(client.ObjectKeyFromObject(s.cluster))()
	done, err := join.Retract(ctx, c.Live, c.Kinds, s.cluster)
	if len(done.Deleted) > 0 {
		log.FromContext(ctx).Info("took back the registration of a cluster", logkeys.Count, len(done.Deleted))
	}
	if err != nil {
		return err
	}
	for _, kept := range done.Kept {
		// Events that differ in nothing but their text are one event: the related object tells them apart.
		object := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: kept.Ref.Namespace, Name: kept.Ref.Name}}
		object.SetGroupVersionKind(kept.Ref.GVK())
		c.Events.Eventf(s.cluster, object, corev1.EventTypeWarning, "LeftBehind", libv1beta1.SveltosClusterKind, "on the hub stays %s", kept)
	}
	return nil
}

// release lets the cluster object go.
func (c *Controller) release(ctx context.Context, s *state) error {
	free := s.cluster.DeepCopy()
	if !controllerutil.RemoveFinalizer(free, kube.FinalizerCluster) {
		return nil
	}
	// The lock keeps finalizers of others.
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Live.Patch(ctx, free, patch, client.FieldOwner(kube.FieldManager)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("remove finalizer: %w", err)
	}
	s.gone = true
	c.tell(s, corev1.EventTypeNormal, "Deregistered", "cluster "+s.member.Key()+" is deregistered")
	return nil
}

// report says on the cluster object what is waited for, if that is new.
func (c *Controller) report(ctx context.Context, s *state, outcome phase.Outcome) error {
	passing := apierrors.IsConflict(outcome.Err) || errors.Is(outcome.Err, context.Canceled)
	if s.gone || outcome.Kind == phase.Done || passing {
		return nil
	}
	message := join.WaitingPrefix + oneLine(outcome.Message())
	if outcome.Kind != phase.Waiting {
		message = join.WaitingPrefix + "the hub, which will try again: " + oneLine(outcome.Message())
	}
	if s.cluster.Status.FailureMessage == message {
		return nil
	}
	written := s.cluster.DeepCopy()
	written.Status.FailureMessage = message
	err := c.Live.Status().Patch(ctx, written, client.MergeFrom(s.cluster), client.FieldOwner(kube.FieldManager))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("report on cluster %s: %w", s.member.Key(), err)
	}
	return nil
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// tell records an event on the cluster object, where there is still a namespace for it.
func (c *Controller) tell(s *state, kind, reason, note string) {
	c.Events.Eventf(s.cluster, nil, kind, reason, libv1beta1.SveltosClusterKind, "%s", note)
}
