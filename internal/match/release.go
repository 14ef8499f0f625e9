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
// charts. The summary with the lowest tier manages a release. Of equal tiers it is the one that manages it already, and
// otherwise the oldest one. Summaries that are being deleted count until they are deleted. The caller must expand the
// templates in the names of releases.
func FindConflicts(summary *configv1beta1.ClusterSummary, others []configv1beta1.ClusterSummary) []Conflict {
	var conflicts []Conflict
	for _, release := range Installed(summary) {
		var manager *configv1beta1.ClusterSummary
		for i := range others {
			other := &others[i]
			if other.UID == summary.UID || !hasChart(other, release) || !hasPriority(other, summary, release) {
				continue
			}
			if manager == nil || hasPriority(other, manager, release) {
				manager = other
			}
		}
		if manager != nil {
			conflicts = append(conflicts, Conflict{Release: release, Manager: manager.Name})
		}
	}
	return conflicts
}

// Installed returns the releases of a summary's charts, except those with the action Uninstall, in the order of the
// charts.
func Installed(summary *configv1beta1.ClusterSummary) []Release {
	var releases []Release
	for _, chart := range summary.Spec.ClusterProfileSpec.HelmCharts {
		if chart.HelmChartAction != configv1beta1.HelmChartActionUninstall {
			releases = append(releases, Release{Namespace: chart.ReleaseNamespace, Name: chart.ReleaseName})
		}
	}
	return releases
}

func hasChart(summary *configv1beta1.ClusterSummary, release Release) bool {
	return slices.Contains(Installed(summary), release)
}

// hasPriority returns whether a manages release if both a and b have it.
func hasPriority(a, b *configv1beta1.ClusterSummary, release Release) bool {
	return cmp.Or(
		cmp.Compare(a.Spec.ClusterProfileSpec.Tier, b.Spec.ClusterProfileSpec.Tier),
		-cmp.Compare(manages(a, release), manages(b, release)),
		a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
		cmp.Compare(a.Name, b.Name),
	) < 0
}

// manages returns 1 if summary manages release according to its status, and 0 otherwise.
func manages(summary *configv1beta1.ClusterSummary, release Release) int {
	for _, managed := range summary.Status.HelmReleaseSummaries {
		if managed.ReleaseName == release.Name && managed.ReleaseNamespace == release.Namespace &&
			managed.Status == configv1beta1.HelmChartStatusManaging {
			return 1
		}
	}
	return 0
}
