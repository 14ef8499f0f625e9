package clusters

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
	now := *old.DeepCopy()
	now.Version, now.APIVersions = facts.Version, facts.APIVersions
	return now
}

// fitsStatus returns whether the status of a member can have these APIs.
func fitsStatus(apis []string) bool {
	text := 0
	for _, api := range apis {
		text += len(api)
	}
	return len(apis) <= kube.MaxAPIs && text <= kube.MaxAPIText
}

// afterPushCheck returns the status of a push member that answered and whose checks had the given result. threshold
// is the number of failures that make the member Down; zero means defaultThreshold.
func afterPushCheck(old libv1beta1.SveltosClusterStatus, threshold int32, result check.Result) libv1beta1.SveltosClusterStatus {
	now := withHealthyConnection(old)
	if result.Failure != "" {
		now = contactFailed(old, threshold, result.Failure)
	}
	now.Ready = old.Ready || result.Ready
	return now
}

// withHealthyConnection returns old without connection failures.
func withHealthyConnection(old libv1beta1.SveltosClusterStatus) libv1beta1.SveltosClusterStatus {
	now := *old.DeepCopy()
	now.ConnectionStatus, now.FailureMessage, now.ConnectionFailures = libv1beta1.ConnectionHealthy, "", 0
	return now
}

// contactFailed returns old with one more connection failure. The count stops at threshold, so that the status of a
// member that stays Down does not change.
func contactFailed(old libv1beta1.SveltosClusterStatus, threshold int32, message string) libv1beta1.SveltosClusterStatus {
	threshold = cmp.Or(threshold, defaultThreshold)
	now := *old.DeepCopy()
	now.FailureMessage = kube.Truncate(message, kube.MaxMessage)
	now.ConnectionFailures = min(max(old.ConnectionFailures, 0)+1, threshold)
	if now.ConnectionFailures >= threshold {
		now.ConnectionStatus = libv1beta1.ConnectionDown
	}
	return now
}

// afterPullCheck returns the status of a pull member by the liveness of its agent, and the time after which the agent
// must be evaluated again; zero means that only a heartbeat or a report can change the status.
func afterPullCheck(old libv1beta1.SveltosClusterStatus, threshold int32, liveness heartbeats.Liveness) (libv1beta1.SveltosClusterStatus, time.Duration) {
	threshold = cmp.Or(threshold, defaultThreshold)
	switch {
	case !liveness.HasReported:
		// An agent is not Down before its first contact.
		return old, 0
	case liveness.State == heartbeats.Silent:
		silent := contactFailed(old, threshold, libv1beta1.AgentReportTooOld)
		silent.ConnectionFailures, silent.ConnectionStatus = threshold, libv1beta1.ConnectionDown
		return silent, 0
	case liveness.State == heartbeats.Unknown && old.ConnectionStatus == libv1beta1.ConnectionDown && old.AgentCheckFailures < threshold:
		// The hub has restarted and has seen no heartbeat yet, so Down stays.
		return old, liveness.Remaining
	case !old.Ready && old.AgentCheckFailures == 0 && old.ConnectionStatus != libv1beta1.ConnectionDown:
		// The agent has renewed its Lease and has not reported yet.
		return old, liveness.Remaining
	default:
		return afterAgentChecks(old, threshold), liveness.Remaining
	}
}

// afterAgentChecks returns the status of a pull member whose agent is alive, by the results of the checks that the
// agent wrote to old.
func afterAgentChecks(old libv1beta1.SveltosClusterStatus, threshold int32) libv1beta1.SveltosClusterStatus {
	now := withHealthyConnection(old)
	if old.AgentCheckFailures <= 0 {
		return now
	}
	threshold = cmp.Or(threshold, defaultThreshold)
	now.FailureMessage = old.AgentCheckMessage
	now.ConnectionFailures = min(old.AgentCheckFailures, threshold)
	if now.ConnectionFailures >= threshold {
		now.ConnectionStatus = libv1beta1.ConnectionDown
	}
	return now
}

// withFailureMessage returns old with another message. It is for members that the hub must not manage.
func withFailureMessage(old libv1beta1.SveltosClusterStatus, message string) libv1beta1.SveltosClusterStatus {
	now := *old.DeepCopy()
	now.FailureMessage = message
	return now
}

// finalStatus returns the status to write: s.status with the times of the active window and with s.problems. A failure
// of the connection is the first part of the message. AgentReportTooOld is the complete message, because clients
// compare it. The message of a cluster that is being deregistered does not change: it is the reason why the
// deregistration waits.
func finalStatus(s *state) libv1beta1.SveltosClusterStatus {
	now := *s.status.DeepCopy()
	now.LastReconciledTokenRequestAt = s.cluster.Status.LastReconciledTokenRequestAt
	if s.window != nil {
		now.NextUnpause, now.NextPause, now.ActiveWindowHash = s.window.unpause, s.window.pause, s.window.hash
	}
	// Remove what an earlier reconcile has appended.
	now.FailureMessage, _, _ = strings.Cut(now.FailureMessage, messageSeparator+windowFieldPrefix)
	if isSpecMessage(now.FailureMessage) && s.member.Refused == "" {
		now.FailureMessage = ""
	}
	switch {
	case s.member.Deleting:
		now.FailureMessage = s.cluster.Status.FailureMessage
	case s.problems == "" || now.FailureMessage == libv1beta1.AgentReportTooOld:
	case now.FailureMessage != "" && (now.ConnectionFailures > 0 || s.member.Refused != ""):
		now.FailureMessage += messageSeparator + s.problems
	default:
		now.FailureMessage = s.problems
	}
	return now
}

// isSpecMessage returns whether message is about an error in the spec. Such a message is removed and, if the error
// still exists, added again.
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
