package summaries

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

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

// Texts of Sveltos, which other tools look for.
const (
	clusterNotReady = "cluster is not ready"
	agentNotHealthy = "agent in managed cluster is not healthy."
)

// unreachableReason returns why m cannot be changed now, "" if it can be.
func unreachableReason(m fleet.Member) string {
	switch {
	case m.Refused != "" && !m.Deleting:
		return fmt.Sprintf("cluster %s: %s", m.Key(), m.Refused)
	case !m.Ready:
		return clusterNotReady
	case m.Down && (m.DownMessage == libv1beta1.AgentReportTooOld || m.Deleting && m.Mode == fleet.Pull):
		return agentNotHealthy
	case m.Down && m.Deleting:
		// The message says what the deregistration waits for.
		return "cluster is down"
	case m.Down:
		// It may be reached, and one of its liveness checks fails.
		return "cluster is down: " + m.DownMessage
	default:
		return ""
	}
}

// unreachableStatus returns the status of a feature while its member is unreachable.
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
		fleet.Push: libv1beta1.FeatureStatusRemoving,
		fleet.Pull: libv1beta1.FeatureStatusAgentRemoving,
	}[m.Mode]
}

// isDelivered returns whether the delivery of a feature with this status has begun.
func isDelivered(s libv1beta1.FeatureStatus) bool {
	return s == libv1beta1.FeatureStatusProvisioning || s == libv1beta1.FeatureStatusProvisioned || s == libv1beta1.FeatureStatusFailed
}

// conflictError names the releases that other profiles manage.
type conflictError struct{ lost []match.Contest }

// Error names every release and the profile that manages it.
func (e *conflictError) Error() string {
	texts := make([]string, 0, len(e.lost))
	for _, contest := range e.lost {
		texts = append(texts, contest.Message())
	}
	return strings.Join(texts, "; ")
}

// Unwrap prevents retries: a watch reports when another summary gives a release up.
func (e *conflictError) Unwrap() error { return phase.Invalid{Err: errors.New("conflict")} }

// markConflicts returns releases with the status Conflict on those that other profiles manage.
func markConflicts(releases []configv1beta1.HelmChartSummary, lost []match.Contest) []configv1beta1.HelmChartSummary {
	marked := slices.Clone(releases)
	for _, contest := range lost {
		at := slices.IndexFunc(marked, func(r configv1beta1.HelmChartSummary) bool {
			return r.ReleaseNamespace == contest.Release.Namespace && r.ReleaseName == contest.Release.Name
		})
		if at < 0 {
			at = len(marked)
			marked = append(marked, configv1beta1.HelmChartSummary{ReleaseNamespace: contest.Release.Namespace, ReleaseName: contest.Release.Name})
		}
		marked[at].Status = configv1beta1.HelmChartStatusConflict
		marked[at].ConflictMessage = contest.Message()
	}
	return marked
}

// reasonOf returns the event reason for the error of a bundle that could not be built.
func reasonOf(err error) string {
	var contest *conflictError
	var stage *ComposeError
	switch {
	case errors.As(err, &contest):
		return status.ReasonConflict
	case errors.Is(err, source.ErrNotFound):
		return status.ReasonMissing
	case errors.As(err, &stage):
		return stage.Reason
	default:
		return status.ReasonSource
	}
}

// reportReason returns the event reason for a report of a member, "" for the default one.
func reportReason(report bundle.Report) string {
	if report.State == bundle.StateFailed && strings.Contains(report.Message, "conflict was detected") {
		return status.ReasonConflict
	}
	return ""
}

// report writes the status if it differs, and records events for the changes.
func (c *Controller) report(ctx context.Context, s *state, outcome phase.Outcome) error {
	if outcome.Kind == phase.Retriable {
		// The hub's own requests failed: nothing new is known of the member.
		return nil
	}
	return c.writeStatus(ctx, s, status.Fold(s.summary.Status, s.pass))
}

func (c *Controller) writeStatus(ctx context.Context, s *state, now configv1beta1.ClusterSummaryStatus) error {
	before := s.summary.Status
	if equality.Semantic.DeepEqual(before, now) {
		return nil
	}
	written := s.summary.DeepCopy()
	written.Status = now
	// The lock prevents a reconcile with a stale cache from overwriting a newer status.
	patch := client.MergeFromWithOptions(s.summary, client.MergeFromWithOptimisticLock{})
	name := client.ObjectKeyFromObject(written)
	c.ownWrites.begin(name)
	if err := c.Hub.Status().Patch(ctx, written, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		c.ownWrites.end(name, "", c.Clock.Now())
		return client.IgnoreNotFound(fmt.Errorf("report on summary %s: %w", client.ObjectKeyFromObject(s.summary), err))
	}
	s.summary = written
	s.statusEdited = c.ownWrites.end(name, written.ResourceVersion, c.Clock.Now())
	for _, event := range status.Events(before, now, s.member) {
		c.recordEvent(written, event)
	}
	return nil
}

// recordEvent records an event on a summary, with the same action as Sveltos: the kind.
func (c *Controller) recordEvent(summary *configv1beta1.ClusterSummary, event status.Event) {
	c.Events.Eventf(summary, nil, event.Type, event.Reason, configv1beta1.ClusterSummaryKind, "%s", event.Note)
}

// lookupEvents returns an event for each release whose chart looks up objects that the hub cannot read, once for each
// version of the chart.
func lookupEvents(old configv1beta1.ClusterSummaryStatus, c Composition, m fleet.Member) []status.Event {
	var events []status.Event
	for _, release := range c.Unanswered {
		if chartOf(old.HelmReleaseSummaries, release) != chartOf(c.Releases, release) {
			events = append(events, status.LookupUnanswered(release.String(), m))
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
