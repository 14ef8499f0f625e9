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
)

// defaultThreshold is the number of failed contacts that make a member Down unless its spec says otherwise: that of the
// Sveltos surface.
const defaultThreshold = 3

// alsoWrong separates the parts of a message.
const alsoWrong = "; "

// learned returns the status of a member that answered with facts, whatever else is to be said of it.
func learned(old libv1beta1.SveltosClusterStatus, facts fleet.Facts) libv1beta1.SveltosClusterStatus {
	now := *old.DeepCopy()
	now.Version, now.APIVersions = facts.Version, facts.APIVersions
	return now
}

// afterPushCheck returns the status of a push member that was reached and whose liveness checks had this result.
func afterPushCheck(old libv1beta1.SveltosClusterStatus, threshold int32, liveness check.Result) libv1beta1.SveltosClusterStatus {
	now := healthy(old)
	if liveness.Failure != "" {
		now = missed(old, threshold, liveness.Failure)
	}
	now.Ready = old.Ready || liveness.Ready
	return now
}

func healthy(old libv1beta1.SveltosClusterStatus) libv1beta1.SveltosClusterStatus {
	now := *old.DeepCopy()
	now.ConnectionStatus, now.FailureMessage, now.ConnectionFailures = libv1beta1.ConnectionHealthy, "", 0
	return now
}

// missed returns the status of a member that could not be contacted, once more. The count stops at threshold: nothing
// is written about a member that stays Down.
func missed(old libv1beta1.SveltosClusterStatus, threshold int32, message string) libv1beta1.SveltosClusterStatus {
	threshold = cmp.Or(threshold, defaultThreshold)
	now := *old.DeepCopy()
	now.FailureMessage = message
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
		silent := missed(old, threshold, libv1beta1.AgentReportTooOld)
		silent.ConnectionFailures, silent.ConnectionStatus = threshold, libv1beta1.ConnectionDown
		return silent, 0
	case liveness.State == heartbeats.Unknown && old.ConnectionStatus == libv1beta1.ConnectionDown && old.AgentCheckFailures < threshold:
		// It was silent before. Only a heartbeat ends that.
		return old, liveness.Remaining
	case !old.Ready && old.AgentCheckFailures == 0 && old.ConnectionStatus != libv1beta1.ConnectionDown:
		// The agent has renewed its Lease and has not reported yet.
		return old, liveness.Remaining
	default:
		return reported(old, threshold), liveness.Remaining
	}
}

// reported returns the status of a pull member whose agent is at work and says of its checks what is in old.
func reported(old libv1beta1.SveltosClusterStatus, threshold int32) libv1beta1.SveltosClusterStatus {
	now := healthy(old)
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

// refused returns the status of a member that nothing may be done to.
func refused(old libv1beta1.SveltosClusterStatus, message string) libv1beta1.SveltosClusterStatus {
	now := *old.DeepCopy()
	now.FailureMessage = message
	return now
}

// complete adds what does not depend on the contact: where the active window stands, and what is wrong in spite of a
// healthy connection. Failures of the connection itself come first; the message of a silent agent is compared literally
// by others, and stays alone. The message of a cluster that is being deregistered is left alone: it says what that
// waits for.
func complete(s *state) libv1beta1.SveltosClusterStatus {
	now := *s.status.DeepCopy()
	now.LastReconciledTokenRequestAt = s.cluster.Status.LastReconciledTokenRequestAt
	if s.window != nil {
		now.NextUnpause, now.NextPause, now.ActiveWindowHash = s.window.unpause, s.window.pause, s.window.hash
	}
	now.FailureMessage, _, _ = strings.Cut(now.FailureMessage, alsoWrong+windowField)
	if ours(now.FailureMessage) && s.member.Refused == "" {
		now.FailureMessage = ""
	}
	switch {
	case s.member.Deleting:
		now.FailureMessage = s.cluster.Status.FailureMessage
	case s.remarks == "" || now.FailureMessage == libv1beta1.AgentReportTooOld:
	case now.FailureMessage != "" && (now.ConnectionFailures > 0 || s.member.Refused != ""):
		now.FailureMessage += alsoWrong + s.remarks
	default:
		now.FailureMessage = s.remarks
	}
	return now
}

// ours says whether message is of the kind that holds as long as something in the spec is wrong, and is said anew each
// time.
func ours(message string) bool {
	return strings.HasPrefix(message, windowField) || fleet.IsRefusal(message)
}

// labelled returns the labels of a push member of the given version, and whether they differ from what it has.
func labelled(have map[string]string, version string) (map[string]string, bool) {
	want := maps.Clone(have)
	if want == nil {
		want = map[string]string{}
	}
	want[libv1beta1.AgentLabel] = libv1beta1.AgentLabelPresent
	if plain := fleet.PlainVersion(version); plain != "" {
		want[libv1beta1.KubernetesVersionLabel] = plain
	}
	return want, !maps.Equal(have, want)
}
