package match

import (
	"cmp"
	"fmt"
	"slices"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
)

// Release names one Helm release on a member.
type Release struct{ Namespace, Name string }

// String prints r as namespace/name.
func (r Release) String() string { return r.Namespace + "/" + r.Name }

// Contest is a release that two summaries of one member want, and that the one asking has lost.
type Contest struct {
	Release Release
	// Holder is the summary that keeps the release.
	Holder string
}

// Message says who holds the release.
func (c Contest) Message() string {
	return fmt.Sprintf("helm release %s is managed by ClusterSummary %s", c.Release, c.Holder)
}

// Lost returns the releases of summary that another summary of the same member holds, in the order of the charts: the lowest tier
// wins; of equals the incumbent, then the older one. Summaries that are being deleted hold what they hold until they are gone. Names are
// compared as they are: the caller fills in their templates.
func Lost(summary *configv1beta1.ClusterSummary, others []configv1beta1.ClusterSummary) []Contest {
	var lost []Contest
	for _, release := range Installed(summary) {
		var holder *configv1beta1.ClusterSummary
		for i := range others {
			rival := &others[i]
			if rival.UID == summary.UID || !wants(rival, release) || !beats(rival, summary, release) {
				continue
			}
			if holder == nil || beats(rival, holder, release) {
				holder = rival
			}
		}
		if holder != nil {
			lost = append(lost, Contest{Release: release, Holder: holder.Name})
		}
	}
	return lost
}

// Installed lists the releases that summary wants on its member, in the order of the charts.
func Installed(summary *configv1beta1.ClusterSummary) []Release {
	var releases []Release
	for _, chart := range summary.Spec.ClusterProfileSpec.HelmCharts {
		if chart.HelmChartAction != configv1beta1.HelmChartActionUninstall {
			releases = append(releases, Release{Namespace: chart.ReleaseNamespace, Name: chart.ReleaseName})
		}
	}
	return releases
}

func wants(summary *configv1beta1.ClusterSummary, release Release) bool {
	return slices.Contains(Installed(summary), release)
}

// beats says whether a holds release against b.
func beats(a, b *configv1beta1.ClusterSummary, release Release) bool {
	return cmp.Or(
		cmp.Compare(a.Spec.ClusterProfileSpec.Tier, b.Spec.ClusterProfileSpec.Tier),
		-cmp.Compare(manages(a, release), manages(b, release)),
		a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
		cmp.Compare(a.Name, b.Name),
	) < 0
}

// manages is 1 if summary has release on the member by what its status says, else 0.
func manages(summary *configv1beta1.ClusterSummary, release Release) int {
	for _, have := range summary.Status.HelmReleaseSummaries {
		if have.ReleaseName == release.Name && have.ReleaseNamespace == release.Namespace &&
			have.Status == configv1beta1.HelmChartStatusManaging {
			return 1
		}
	}
	return 0
}
