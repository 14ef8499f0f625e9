package clusters

import (
	"cmp"
	"maps"
	"time"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
)

// SilenceLimit is how long the agent of a pull member may stay silent before the member counts as Down: three heartbeats of 30 s.
const SilenceLimit = 90 * time.Second

// defaultThreshold is the number of failed contacts that make a member Down unless its spec says otherwise: that of the Sveltos surface.
const defaultThreshold = 3

// reached returns the status of a member that answered with facts.
func reached(old libv1beta1.SveltosClusterStatus, facts fleet.Facts) libv1beta1.SveltosClusterStatus {
	now := healthy(old)
	now.Ready = true
	now.Version = facts.Version
	// A list with gaps would make charts render as if an API had gone.
	if facts.Complete || len(old.APIVersions) == 0 {
		now.APIVersions = facts.APIVersions
	}
	return now
}

func healthy(old libv1beta1.SveltosClusterStatus) libv1beta1.SveltosClusterStatus {
	now := *old.DeepCopy()
	now.ConnectionStatus, now.FailureMessage, now.ConnectionFailures = libv1beta1.ConnectionHealthy, "", 0
	return now
}

// missed returns the status of a member that could not be contacted, once more. The count stops at threshold: nothing is written about
// a member that stays Down.
func missed(old libv1beta1.SveltosClusterStatus, threshold int32, message string) libv1beta1.SveltosClusterStatus {
	threshold = cmp.Or(threshold, defaultThreshold)
	now := *old.DeepCopy()
	now.FailureMessage = message
	now.ConnectionFailures = min(old.ConnectionFailures+1, threshold)
	if now.ConnectionFailures >= threshold {
		now.ConnectionStatus = libv1beta1.ConnectionDown
	}
	return now
}

// heard returns the status of a pull member whose agent was last heard of at last, and when to look again if nothing is heard until
// then; zero means that only news can change it.
func heard(old libv1beta1.SveltosClusterStatus, threshold int32, last, now time.Time) (libv1beta1.SveltosClusterStatus, time.Duration) {
	if !old.Ready || last.IsZero() {
		// Nobody is missed before the first contact.
		return old, 0
	}
	if left := SilenceLimit - now.Sub(last); left > 0 {
		return healthy(old), left
	}
	silent := missed(old, threshold, libv1beta1.AgentReportTooOld)
	silent.ConnectionFailures = cmp.Or(threshold, defaultThreshold)
	silent.ConnectionStatus = libv1beta1.ConnectionDown
	return silent, 0
}

// refused returns the status of a member that nothing may be done to.
func refused(old libv1beta1.SveltosClusterStatus, message string) libv1beta1.SveltosClusterStatus {
	now := *old.DeepCopy()
	now.FailureMessage = message
	return now
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
