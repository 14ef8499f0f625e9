package profiles

import (
	"cmp"
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
)

// statusOf returns the status of a profile after a reconcile: the suspension and the matching clusters. If the step
// match did not run, the matching clusters of old stay, and after a retriable error also its suspension.
func (r *reconciler) statusOf(old configv1beta1.ProfileStatus, s *state, outcome phase.Outcome) configv1beta1.ProfileStatus {
	updated := *old.DeepCopy()
	switch {
	case outcome.Kind == phase.Waiting || outcome.Kind == phase.Terminal:
		updated.SuspensionReason = outcome.Message()
	case s.matched:
		// After a retriable error the outcome has no reason for a suspension, so it is computed here.
		updated.SuspensionReason = cmp.Or(s.unsupported, r.terminatingReason(s))
	}
	updated.ReconciliationSuspended = updated.SuspensionReason != ""
	if s.matched {
		updated.MatchingClusters = match.Refs(s.members)
	}
	return updated
}

// report patches the profile's status if it differs, and records an event if the reason of the suspension differs.
func (r *reconciler) report(ctx context.Context, s *state, outcome phase.Outcome) error {
	if s.isDeleting() {
		return nil
	}
	updated := r.statusOf(*s.status, s, outcome)
	before := *s.status
	if equality.Semantic.DeepEqual(before, updated) {
		return nil
	}
	changed := s.profile.DeepCopyObject().(client.Object)
	_, status := r.kind.specAndStatus(changed)
	*status = updated
	patch := client.MergeFromWithOptions(s.profile, client.MergeFromWithOptimisticLock{})
	if err := r.Hub.Status().Patch(ctx, changed, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return client.IgnoreNotFound(fmt.Errorf("report on %s %s: %w", r.kind.name, client.ObjectKeyFromObject(s.profile), err))
	}
	if !equality.Semantic.DeepEqual(before.MatchingClusters, updated.MatchingClusters) {
		r.matchTimes.record(client.ObjectKeyFromObject(s.profile), time.Now())
	}
	s.profile = changed
	s.spec, s.status = r.kind.specAndStatus(changed)
	if updated.SuspensionReason != "" && updated.SuspensionReason != before.SuspensionReason {
		r.Events.Eventf(r.kind.reference(s.profile), nil, corev1.EventTypeWarning, "Suspended", r.kind.name, "%s", updated.SuspensionReason)
	}
	return nil
}
