package summaries

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
	"github.com/towline/towline/internal/status"
)

// The messages of Sveltos, with which other tools compare the status.
const (
	clusterNotReady = "cluster is not ready"
	agentNotHealthy = "agent in managed cluster is not healthy."
)

// setHashKey sets the key of the hashes in the status, in both states.
func (s *state) setHashKey(key status.HashKey) {
	s.result.HashKey = key
	if s.local != nil {
		s.local.setHashKey(key)
	}
}

// unreachableReason returns the reason why the hub cannot deliver to m or withdraw from it, "" if it can.
func unreachableReason(m fleet.Member) string {
	switch {
	case m.Refused != "" && !m.Deleting:
		return fmt.Sprintf("cluster %s: %s", m.Key(), m.Refused)
	case !m.Ready:
		return clusterNotReady
	case m.Down && (m.DownMessage == libv1beta1.AgentReportTooOld || m.Deleting && m.Mode == fleet.Pull):
		return agentNotHealthy
	case m.Down && m.Deleting:
		// DownMessage is the reason why the deregistration waits, not the reason why the cluster is down.
		return "cluster is down"
	case m.Down:
		// DownMessage can be the result of a liveness check.
		return "cluster is down: " + m.DownMessage
	default:
		return ""
	}
}

// unreachableStatus returns the status of a feature while its member is unreachable. old is the status before.
func unreachableStatus(old libv1beta1.FeatureStatus, m fleet.Member) libv1beta1.FeatureStatus {
	switch {
	case !m.Ready || m.Refused != "":
		return libv1beta1.FeatureStatusFailed
	case old == "" || old == libv1beta1.FeatureStatusFailedNonRetriable:
		return libv1beta1.FeatureStatusProvisioning
	default:
		return old
	}
}

// removingStatus returns the status of a feature that the hub (push) or the agent (pull) is withdrawing.
func removingStatus(m fleet.Member) libv1beta1.FeatureStatus {
	return map[fleet.Mode]libv1beta1.FeatureStatus{
		fleet.Push:  libv1beta1.FeatureStatusRemoving,
		fleet.Pull:  libv1beta1.FeatureStatusAgentRemoving,
		fleet.Local: libv1beta1.FeatureStatusRemoving,
	}[m.Mode]
}

// hasDeliveryBegun returns whether the delivery of a feature with this status has begun.
func hasDeliveryBegun(s libv1beta1.FeatureStatus) bool {
	return s == libv1beta1.FeatureStatusProvisioning || s == libv1beta1.FeatureStatusProvisioned || s == libv1beta1.FeatureStatusFailed
}

// conflictError is the error for releases that other summaries manage.
type conflictError struct{ conflicts []match.Conflict }

// Error returns one sentence per release, with the summary that manages it.
func (e *conflictError) Error() string {
	texts := make([]string, 0, len(e.conflicts))
	for _, conflict := range e.conflicts {
		texts = append(texts, conflict.Message())
	}
	return strings.Join(texts, "; ")
}

// Unwrap returns a phase.TerminalError, so that the reconcile is not retried: a watch event of the other summary
// triggers it.
func (e *conflictError) Unwrap() error { return phase.TerminalError{Err: errors.New("conflict")} }

// markConflicts returns releases with the status Conflict for each conflict. It adds an entry if there is none.
func markConflicts(releases []configv1beta1.HelmChartSummary, conflicts []match.Conflict) []configv1beta1.HelmChartSummary {
	marked := slices.Clone(releases)
	for _, conflict := range conflicts {
		index := slices.IndexFunc(marked, func(r configv1beta1.HelmChartSummary) bool {
			return r.ReleaseNamespace == conflict.Release.Namespace && r.ReleaseName == conflict.Release.Name
		})
		if index < 0 {
			index = len(marked)
			marked = append(marked, configv1beta1.HelmChartSummary{ReleaseNamespace: conflict.Release.Namespace, ReleaseName: conflict.Release.Name})
		}
		marked[index].Status = configv1beta1.HelmChartStatusConflict
		marked[index].ConflictMessage = conflict.Message()
	}
	return marked
}

// eventReasonOfError returns the event reason for the error of a bundle that could not be built.
func eventReasonOfError(err error) string {
	var conflict *conflictError
	var composeErr *ComposeError
	switch {
	case errors.As(err, &conflict):
		return status.ReasonConflict
	case errors.Is(err, source.ErrNotFound):
		return status.ReasonNotFound
	case errors.As(err, &composeErr):
		return composeErr.Reason
	default:
		return status.ReasonSource
	}
}

// eventReasonOfReport returns the event reason for a report of a member, "" for the default reason. The engine's
// message about an object of another profile contains "conflict was detected".
func eventReasonOfReport(report bundle.Report) string {
	if report.State == bundle.StateFailed && strings.Contains(report.Message, "conflict was detected") {
		return status.ReasonConflict
	}
	return ""
}

// report writes the status if it differs, and records events for the changes.
func (c *Controller) report(ctx context.Context, s *state, outcome phase.Outcome) error {
	if outcome.Kind == phase.Retriable {
		// A request to the hub's API server failed, so the results are incomplete.
		return nil
	}
	updated := status.ComputeStatus(s.summary.Status, s.result)
	if outcome.Kind != phase.Done || !s.isStartOnly(updated) {
		c.starts.forget(client.ObjectKeyFromObject(s.summary))
		return c.writeStatus(ctx, s, updated)
	}
	if remaining := c.starts.remaining(client.ObjectKeyFromObject(s.summary), c.Clock.Now()); remaining > 0 {
		s.requeueWithin(remaining)
		return nil
	}
	return c.writeStatus(ctx, s, updated)
}

// isStartOnly returns whether updated differs from the current status only by started deliveries to a pull member. It
// is false with syncMode OneTime, since isOneTimeDone reads the status, and for the feature Helm, since
// match.FindConflicts reads the releases in the status.
func (s *state) isStartOnly(updated configv1beta1.ClusterSummaryStatus) bool {
	if s.member.Mode != fleet.Pull || s.isDeleting() || s.spec().SyncMode == configv1beta1.SyncModeOneTime {
		return false
	}
	before := s.summary.Status
	started := 0
	for _, feature := range updated.FeatureSummaries {
		old := status.FeatureOf(before, feature.FeatureID)
		if equality.Semantic.DeepEqual(old, feature) {
			continue
		}
		if feature.Status != libv1beta1.FeatureStatusProvisioning || feature.FailureMessage != "" || feature.FeatureID == libv1beta1.FeatureHelm {
			return false
		}
		started++
	}
	return started > 0 && updated.FailureMessage == before.FailureMessage && updated.ReconciliationSuspended == before.ReconciliationSuspended
}

// writeStatus patches the status if updated differs, and records the events. It ignores a summary that is deleted.
func (c *Controller) writeStatus(ctx context.Context, s *state, updated configv1beta1.ClusterSummaryStatus) error {
	before := s.summary.Status
	if equality.Semantic.DeepEqual(before, updated) {
		return nil
	}
	patched := s.summary.DeepCopy()
	patched.Status = updated
	// The optimistic lock prevents a reconcile with a stale cache from overwriting a newer status.
	patch := client.MergeFromWithOptions(s.summary, client.MergeFromWithOptimisticLock{})
	name := client.ObjectKeyFromObject(patched)
	c.ownWrites.begin(name)
	if err := c.Hub.Status().Patch(ctx, patched, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		c.ownWrites.end(name, "", c.Clock.Now())
		return client.IgnoreNotFound(fmt.Errorf("patch status of summary %s: %w", client.ObjectKeyFromObject(s.summary), err))
	}
	s.summary = patched
	s.isStatusEdited = c.ownWrites.end(name, patched.ResourceVersion, c.Clock.Now())
	events := status.Events(before, updated, s.member)
	for _, composition := range s.compositions {
		if !s.result.HashKey.IsHashOf(status.FeatureOf(before, composition.Feature).Hash, composition.Digest) {
			events = append(events, lookupEvents(before, composition, s.member)...)
		}
	}
	for _, event := range events {
		c.recordEvent(patched, event)
	}
	return nil
}

func newEventLimiter() *rate.Limiter {
	return rate.NewLimiter(normalEventsPerSecond, normalEventsBurst)
}

// recordEvent records an event on a summary. As in Sveltos, its action is the kind. It drops Normal events beyond the
// limit of normalEvents: otherwise a change on a thousand clusters would delay the deliveries by a thousand requests.
// The status has the same information.
func (c *Controller) recordEvent(summary *configv1beta1.ClusterSummary, event status.Event) {
	if event.Type == corev1.EventTypeNormal && !c.normalEvents.AllowN(c.Clock.Now(), 1) {
		return
	}
	c.Events.Eventf(summary, nil, event.Type, event.Reason, configv1beta1.ClusterSummaryKind, "%s", event.Note)
}

// lookupEvents returns an event for each release whose chart looks up objects that the hub cannot read. It omits a
// release whose chart and version are in the old status, so that each chart has one event.
func lookupEvents(old configv1beta1.ClusterSummaryStatus, c Composition, m fleet.Member) []status.Event {
	var events []status.Event
	for _, release := range c.UnansweredLookups {
		if chartOf(old.HelmReleaseSummaries, release) != chartOf(c.Releases, release) {
			events = append(events, status.LookupEvent(release.String(), m))
		}
	}
	return events
}

// chartOf returns the name and version of the chart of a release, "" if it is not in releases.
func chartOf(releases []configv1beta1.HelmChartSummary, release match.Release) string {
	for _, listed := range releases {
		if listed.ReleaseNamespace == release.Namespace && listed.ReleaseName == release.Name {
			return listed.ChartName + " " + listed.ChartVersion
		}
	}
	return ""
}
