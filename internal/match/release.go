package match

import (
	"cmp"
	"fmt"
	"slices"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
)

// Release identifies one Helm release on a member.
type Release struct{ Namespace, Name string }

// String returns namespace/name.
func (r Release) String() string { return r.Namespace + "/" + r.Name }

// Conflict is a release of a summary that another summary of the same member manages.
type Conflict struct {
	Release Release
	// Manager is the name of the other summary.
	Manager string
}

// Message names the summary that manages the release.
func (c Conflict) Message() string {
	return fmt.Sprintf("helm release %s is managed by ClusterSummary %s", c.Release, c.Manager)
}

// FindConflicts returns the releases of summary that another summary of the same member manages, in the order of the
// charts. others may contain summary. The summary with the lowest tier manages a release; of equal tiers, the current
// manager, and otherwise the oldest summary. A summary that is being deleted still manages its releases. The caller
// must expand the templates in the names of releases.
func FindConflicts(summary *configv1beta1.ClusterSummary, others []configv1beta1.ClusterSummary) []Conflict {
	var conflicts []Conflict
	for _, release := range WantedReleases(summary) {
		var manager *configv1beta1.ClusterSummary
		for i := range others {
			other := &others[i]
			if other.UID == summary.UID || !hasChart(other, release) || !precedes(other, summary, release) {
				continue
			}
			if manager == nil || precedes(other, manager, release) {
				manager = other
			}
		}
		if manager != nil {
			conflicts = append(conflicts, Conflict{Release: release, Manager: manager.Name})
		}
	}
	return conflicts
}

// WantedReleases returns the releases of a summary's charts, in their order, except charts with the action Uninstall.
func WantedReleases(summary *configv1beta1.ClusterSummary) []Release {
	var releases []Release
	for _, chart := range summary.Spec.ClusterProfileSpec.HelmCharts {
		if chart.HelmChartAction != configv1beta1.HelmChartActionUninstall {
			releases = append(releases, Release{Namespace: chart.ReleaseNamespace, Name: chart.ReleaseName})
		}
	}
	return releases
}

func hasChart(summary *configv1beta1.ClusterSummary, release Release) bool {
	return slices.Contains(WantedReleases(summary), release)
}

// precedes returns whether a manages release rather than b, if both have it.
func precedes(a, b *configv1beta1.ClusterSummary, release Release) bool {
	return cmp.Or(
		cmp.Compare(a.Spec.ClusterProfileSpec.Tier, b.Spec.ClusterProfileSpec.Tier),
		compareBools(isManaging(b, release), isManaging(a, release)),
		a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
		cmp.Compare(a.Name, b.Name),
	) < 0
}

// isManaging returns whether summary manages release according to its status.
func isManaging(summary *configv1beta1.ClusterSummary, release Release) bool {
	return slices.ContainsFunc(summary.Status.HelmReleaseSummaries, func(r configv1beta1.HelmChartSummary) bool {
		return r.ReleaseName == release.Name && r.ReleaseNamespace == release.Namespace && r.Status == configv1beta1.HelmChartStatusManaging
	})
}

// compareBools orders false before true.
func compareBools(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	default:
		return -1
	}
}
