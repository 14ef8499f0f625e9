package sveltosclusters

import (
	"cmp"
	"maps"
	"strings"
	"time"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/check"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/kube"
)

// defaultThreshold is the number of failed contacts that make a member Down unless its spec has another number. Sveltos
// has the same default.
const defaultThreshold = 3

// messageSeparator separates the problems in a failureMessage.
const messageSeparator = "; "

// withFacts returns old with the version and the APIs of the member.
func withFacts(old libv1beta1.SveltosClusterStatus, facts fleet.Facts) libv1beta1.SveltosClusterStatus {
	updated := *old.DeepCopy()
	updated.Version, updated.APIVersions = facts.Version, facts.APIVersions
	return updated
}

// fitsStatus returns whether the list of APIs is small enough for the status.
func fitsStatus(apis []string) bool {
	text := 0
	for _, api := range apis {
		text += len(api)
	}
	return len(apis) <= kube.MaxAPIs && text <= kube.MaxAPIText
}

// statusOfPush returns the status of a push member that answered, by the result of its checks. threshold is the number
// of failures that make the member Down; zero means defaultThreshold.
func statusOfPush(old libv1beta1.SveltosClusterStatus, threshold int32, result check.Result) libv1beta1.SveltosClusterStatus {
	updated := withHealthyConnection(old)
	if result.Failure != "" {
		updated = withContactFailure(old, threshold, result.Failure)
	}
	updated.Ready = old.Ready || result.Ready
	return updated
}

// withHealthyConnection returns old with a healthy connection and without a failure.
func withHealthyConnection(old libv1beta1.SveltosClusterStatus) libv1beta1.SveltosClusterStatus {
	updated := *old.DeepCopy()
	updated.ConnectionStatus, updated.FailureMessage, updated.ConnectionFailures = libv1beta1.ConnectionHealthy, "", 0
	return updated
}

// withContactFailure returns old with one more connection failure, and with Down if there are threshold failures. The
// count stops there, so that the status of a member that stays Down does not change.
func withContactFailure(old libv1beta1.SveltosClusterStatus, threshold int32, message string) libv1beta1.SveltosClusterStatus {
	threshold = cmp.Or(threshold, defaultThreshold)
	updated := *old.DeepCopy()
	updated.FailureMessage = kube.Truncate(message, kube.MaxMessage)
	updated.ConnectionFailures = min(max(old.ConnectionFailures, 0)+1, threshold)
	if updated.ConnectionFailures >= threshold {
		updated.ConnectionStatus = libv1beta1.ConnectionDown
	}
	return updated
}

// statusOfPull returns the status of a pull member by the liveness of its agent, and the time until the agent must be
// evaluated again. Zero means that only a heartbeat or a report can change the status.
func statusOfPull(old libv1beta1.SveltosClusterStatus, threshold int32, liveness heartbeats.Liveness) (libv1beta1.SveltosClusterStatus, time.Duration) {
	threshold = cmp.Or(threshold, defaultThreshold)
	switch {
	case !liveness.HasReported:
		// An agent is not Down before its first contact.
		return old, 0
	case liveness.State == heartbeats.Silent:
		silent := withContactFailure(old, threshold, libv1beta1.AgentReportTooOld)
		silent.ConnectionFailures, silent.ConnectionStatus = threshold, libv1beta1.ConnectionDown
		return silent, 0
	case liveness.State == heartbeats.Unknown && old.ConnectionStatus == libv1beta1.ConnectionDown && old.AgentCheckFailures < threshold:
		// The hub has restarted and has seen no heartbeat of the agent yet, so Down stays.
		return old, liveness.Remaining
	case !old.Ready && old.AgentCheckFailures == 0 && old.ConnectionStatus != libv1beta1.ConnectionDown:
		// The agent has renewed its Lease and has not reported yet.
		return old, liveness.Remaining
	default:
		return withAgentChecks(old, threshold), liveness.Remaining
	}
}

// withAgentChecks returns the status of a pull member whose agent is alive, by the results of the checks in old, which
// the agent has written.
func withAgentChecks(old libv1beta1.SveltosClusterStatus, threshold int32) libv1beta1.SveltosClusterStatus {
	updated := withHealthyConnection(old)
	if old.AgentCheckFailures <= 0 {
		return updated
	}
	threshold = cmp.Or(threshold, defaultThreshold)
	updated.FailureMessage = old.AgentCheckMessage
	updated.ConnectionFailures = min(old.AgentCheckFailures, threshold)
	if updated.ConnectionFailures >= threshold {
		updated.ConnectionStatus = libv1beta1.ConnectionDown
	}
	return updated
}

// withFailureMessage returns old with another message, for a refused member.
func withFailureMessage(old libv1beta1.SveltosClusterStatus, message string) libv1beta1.SveltosClusterStatus {
	updated := *old.DeepCopy()
	updated.FailureMessage = message
	return updated
}

// finalStatus returns the status to write: s.status with the times of the active window, and with s.problems in its
// message. A connection failure comes first in the message. AgentReportTooOld stays the complete message, because
// clients compare it. While the cluster is being deregistered, the message does not change, since package
// deregistration writes it.
func finalStatus(s *state) libv1beta1.SveltosClusterStatus {
	updated := *s.status.DeepCopy()
	updated.LastReconciledTokenRequestAt = s.cluster.Status.LastReconciledTokenRequestAt
	if s.window != nil {
		updated.NextUnpause, updated.NextPause, updated.ActiveWindowHash = s.window.nextUnpause, s.window.nextPause, s.window.hash
	}
	// Remove the problems that an earlier reconcile has appended.
	updated.FailureMessage, _, _ = strings.Cut(updated.FailureMessage, messageSeparator+windowFieldPrefix)
	if isSpecMessage(updated.FailureMessage) && s.member.Refused == "" {
		updated.FailureMessage = ""
	}
	switch {
	case s.member.Deleting:
		updated.FailureMessage = s.cluster.Status.FailureMessage
	case s.problems == "" || updated.FailureMessage == libv1beta1.AgentReportTooOld:
	case updated.FailureMessage != "" && (updated.ConnectionFailures > 0 || s.member.Refused != ""):
		updated.FailureMessage += messageSeparator + s.problems
	default:
		updated.FailureMessage = s.problems
	}
	return updated
}

// isSpecMessage returns whether message is an earlier message about an error in the spec. If the error still exists,
// s.problems or Member.Refused has it.
func isSpecMessage(message string) bool {
	return strings.HasPrefix(message, windowFieldPrefix) || fleet.IsRefusal(message)
}

// desiredLabels returns the labels of a push member with the given Kubernetes version, and whether they differ from
// existing.
func desiredLabels(existing map[string]string, version string) (map[string]string, bool) {
	desired := maps.Clone(existing)
	if desired == nil {
		desired = map[string]string{}
	}
	desired[libv1beta1.AgentLabel] = libv1beta1.AgentLabelPresent
	if plainVersion := fleet.PlainVersion(version); plainVersion != "" {
		desired[libv1beta1.KubernetesVersionLabel] = plainVersion
	}
	return desired, !maps.Equal(existing, desired)
}
