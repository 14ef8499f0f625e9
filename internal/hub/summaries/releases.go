package summaries

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"helm.sh/helm/v4/pkg/release/common"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/metadata"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/release"
	"github.com/towline/towline/internal/source"
)

// contenders returns summary and all summaries of its cluster, with their releases named as they are there.
func (c *Controller) contenders(ctx context.Context, summary *configv1beta1.ClusterSummary) (*configv1beta1.ClusterSummary, []configv1beta1.ClusterSummary, error) {
	cluster := match.Target(summary)
	all, err := c.siblings(ctx, cluster)
	if err != nil {
		return nil, nil, err
	}
	if all, err = c.named(ctx, cluster, append(all, *summary)); err != nil {
		return nil, nil, fmt.Errorf("name the releases of cluster %s: %w", cluster, err)
	}
	last := len(all) - 1
	return &all[last], all[:last], nil
}

// named returns summaries of one cluster with their releases named as they are on it, without templates.
func (c *Controller) named(ctx context.Context, cluster fleet.ID, summaries []configv1beta1.ClusterSummary) ([]configv1beta1.ClusterSummary, error) {
	if !slices.ContainsFunc(summaries, namedByTemplate) {
		return summaries, nil
	}
	_, found, err := fleet.Get(ctx, c.Hub, cluster.Type, cluster.Namespace, cluster.Name)
	if apierrors.IsNotFound(err) {
		return summaries, nil // nothing is deployed to a cluster that is not there
	}
	if err != nil {
		return nil, err
	}
	subject, err := subjectOf(found)
	if err != nil {
		return nil, err
	}
	all := make([]configv1beta1.ClusterSummary, 0, len(summaries))
	for _, summary := range summaries {
		// The charts come from a cache: they are exchanged, not changed.
		summary.Spec.ClusterProfileSpec.HelmCharts = namedCharts(summary.Spec.ClusterProfileSpec.HelmCharts, subject)
		all = append(all, summary)
	}
	return all, nil
}

func namedByTemplate(summary configv1beta1.ClusterSummary) bool {
	return slices.ContainsFunc(summary.Spec.ClusterProfileSpec.HelmCharts, func(chart configv1beta1.HelmChart) bool {
		return strings.Contains(chart.ReleaseName+chart.ReleaseNamespace, "{{")
	})
}

// namedCharts leaves out a chart whose release cannot be named: it is not deployed either, and composing says why.
func namedCharts(charts []configv1beta1.HelmChart, subject source.Subject) []configv1beta1.HelmChart {
	all := make([]configv1beta1.HelmChart, 0, len(charts))
	for _, chart := range charts {
		var nameErr, namespaceErr error
		chart.ReleaseName, nameErr = subject.Expand("releaseName", chart.ReleaseName)
		chart.ReleaseNamespace, namespaceErr = subject.Expand("releaseNamespace", chart.ReleaseNamespace)
		if nameErr == nil && namespaceErr == nil {
			all = append(all, chart)
		}
	}
	return all
}

// restoreIncumbents gives the summaries of a cluster that lost their status the releases that their bundle on the member has, but for those that
// others have by their status: who holds a release must not change because a status did. The summaries must be the caller's to change.
func (c *Controller) restoreIncumbents(ctx context.Context, m fleet.Member, all []*configv1beta1.ClusterSummary) error {
	taken := map[match.Release]bool{}
	for _, summary := range all {
		for _, release := range summary.Status.HelmReleaseSummaries {
			if release.Status == configv1beta1.HelmChartStatusManaging {
				taken[match.Release{Namespace: release.ReleaseNamespace, Name: release.ReleaseName}] = true
			}
		}
	}
	for _, summary := range all {
		if len(summary.Spec.ClusterProfileSpec.HelmCharts) == 0 || len(summary.Status.HelmReleaseSummaries) > 0 {
			continue
		}
		_, ok, err := c.Transport.FindDeployed(ctx, m, idOf(summary, libv1beta1.FeatureHelm))
		if err != nil {
			return err
		}
		if ok {
			summary.Status.HelmReleaseSummaries = slices.DeleteFunc(managed(summary), func(r configv1beta1.HelmChartSummary) bool {
				return taken[match.Release{Namespace: r.ReleaseNamespace, Name: r.ReleaseName}]
			})
		}
	}
	return nil
}

// managed lists the releases of a summary whose bundle is on the member: as its status has them, or else as its spec names them.
func managed(summary *configv1beta1.ClusterSummary) []configv1beta1.HelmChartSummary {
	if len(summary.Status.HelmReleaseSummaries) > 0 {
		return summary.Status.HelmReleaseSummaries
	}
	var all []configv1beta1.HelmChartSummary
	for _, release := range match.Installed(summary) {
		all = append(all, configv1beta1.HelmChartSummary{
			ReleaseNamespace: release.Namespace, ReleaseName: release.Name, Status: configv1beta1.HelmChartStatusManaging,
		})
	}
	return all
}

// withUninstalled adds an entry to releases for each one that is to be uninstalled. Towline takes away only what it brought: people are
// told that there is nothing of that, once there is not.
func withUninstalled(releases []configv1beta1.HelmChartSummary, charts []configv1beta1.HelmChart) []configv1beta1.HelmChartSummary {
	all := slices.Clone(releases)
	for _, chart := range charts {
		release := match.Release{Namespace: chart.ReleaseNamespace, Name: chart.ReleaseName}
		listed := slices.ContainsFunc(all, func(r configv1beta1.HelmChartSummary) bool {
			return r.ReleaseNamespace == release.Namespace && r.ReleaseName == release.Name
		})
		if chart.HelmChartAction != configv1beta1.HelmChartActionUninstall || listed {
			continue
		}
		all = append(all, configv1beta1.HelmChartSummary{
			ReleaseNamespace: release.Namespace, ReleaseName: release.Name,
			ConflictMessage: "nothing of ours to uninstall: release " + release.String(),
		})
	}
	return all
}

// nextRevision returns the revision and the operation that templates of a release see: those of the release as it was deployed, as long as
// its inputs are the same, so that looking at them changes nothing.
func (c *Composer) nextRevision(ctx context.Context, r Request, of match.Release, inputs string) (revision int, isUpgrade bool, err error) {
	for _, former := range r.Deployed {
		switch {
		case former.Namespace != of.Namespace || former.Name != of.Name:
		case former.Inputs == inputs:
			return former.Revision, former.IsUpgrade, nil
		default:
			return max(1, former.Revision) + 1, true, nil
		}
	}
	return c.nextRecorded(ctx, r.Member, of)
}

// nextListed is nextRecorded for a member that the hub cannot read: it finds the release in the bundles of other profiles.
func (c *Composer) nextListed(ctx context.Context, m fleet.Member, of match.Release) (revision int, isUpgrade bool, err error) {
	deployed, err := c.ListDeployed(ctx, m)
	if err != nil {
		return 0, false, err
	}
	for _, d := range deployed {
		for _, former := range d.Releases {
			if former.Namespace == of.Namespace && former.Name == of.Name {
				return max(1, former.Revision) + 1, true, nil
			}
		}
	}
	return 1, false, nil
}

// nextRecorded returns the revision and the operation that come after the release records on a member: helm or another
// profile may have deployed the release.
func (c *Composer) nextRecorded(ctx context.Context, m fleet.Member, of match.Release) (revision int, isUpgrade bool, err error) {
	if c.Dial[m.Mode] == nil {
		return c.nextListed(ctx, m, of)
	}
	config, err := c.dial(ctx, m)
	if err != nil {
		return 0, false, err
	}
	objects, err := metadata.NewForConfig(config)
	if err != nil {
		return 0, false, fmt.Errorf("make client for the member: %w", err)
	}
	entries, err := release.Store{Metadata: objects}.List(ctx, release.Key{Namespace: of.Namespace, Name: of.Name})
	if err != nil {
		return 0, false, err
	}
	for _, entry := range entries {
		revision = entry.Revision // they are sorted
		isUpgrade = isUpgrade || entry.Status == common.StatusDeployed
	}
	return revision + 1, isUpgrade, nil
}
