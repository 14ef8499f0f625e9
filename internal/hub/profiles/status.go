package profiles

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
)

// statusOf returns the status of a profile after a reconcile.
func statusOf(old configv1beta1.ProfileStatus, s *state, outcome phase.Outcome) configv1beta1.ProfileStatus {
	now := *old.DeepCopy()
	now.SuspensionReason = s.refusal
	if outcome.Kind == phase.Waiting || outcome.Kind == phase.Rejected {
		now.SuspensionReason = outcome.Message()
	}
	now.ReconciliationSuspended = now.SuspensionReason != ""
	if s.matched {
		now.MatchingClusters = match.Refs(s.members)
		if len(now.MatchingClusters) == 0 {
			now.MatchingClusters = nil
		}
	}
	return now
}

// announce says which members match before their summaries are made: a summary's content is stored by how many members get it.
func (r *reconciler) announce(ctx context.Context, s *state) error {
	return r.report(ctx, s, phase.Outcome{Kind: phase.Done})
}

// report writes the profile's status, if it differs, and tells once why nothing is done.
func (r *reconciler) report(ctx context.Context, s *state, outcome phase.Outcome) error {
	if s.deleting() || s.released {
		return nil
	}
	now := statusOf(*s.status, s, outcome)
	before := *s.status
	if equality.Semantic.DeepEqual(before, now) {
		return nil
	}
	written := s.profile.DeepCopyObject().(client.Object)
	_, status := r.kind.parts(written)
	*status = now
	patch := client.MergeFromWithOptions(s.profile, client.MergeFromWithOptimisticLock{})
	if err := r.Hub.Status().Patch(ctx, written, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return client.IgnoreNotFound(fmt.Errorf("report on %s %s: %w", r.kind.name, client.ObjectKeyFromObject(s.profile), err))
	}
	s.profile = written
	s.spec, s.status = r.kind.parts(written)
	if now.SuspensionReason != "" && now.SuspensionReason != before.SuspensionReason {
		r.Events.Eventf(r.kind.reference(s.profile), nil, corev1.EventTypeWarning, "Suspended", r.kind.name, "%s", now.SuspensionReason)
	}
	return nil
}
