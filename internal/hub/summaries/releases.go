package summaries

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/metadata"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/release"
	"github.com/towline/towline/internal/source"
)

// clusterSummaries are the summaries of one cluster, with expanded templates in the names of their releases.
type clusterSummaries struct {
	// summary is the summary that is reconciled. all are the summaries of the cluster, including it.
	summary *configv1beta1.ClusterSummary
	all     []configv1beta1.ClusterSummary
	// isPartial is true if a name cannot be expanded now. Its summary then has the releases in its status.
	isPartial bool
}

// loadClusterSummaries returns the summaries of the cluster of summary. The caller may modify their status.
func (c *Controller) loadClusterSummaries(ctx context.Context, summary *configv1beta1.ClusterSummary) (clusterSummaries, error) {
	cluster := match.MemberID(summary)
	all, err := c.listSummaries(ctx, cluster)
	if err != nil {
		return clusterSummaries{}, err
	}
	if !hasTemplatedRelease(*summary) && !slices.ContainsFunc(all, hasTemplatedRelease) {
		own := *summary
		return clusterSummaries{summary: &own, all: all}, nil
	}
	expanded, isPartial, err := c.expandNamesOfCluster(ctx, cluster, append(all, *summary))
	if err != nil {
		return clusterSummaries{}, fmt.Errorf("expand release names of cluster %s: %w", cluster, err)
	}
	last := len(expanded) - 1
	return clusterSummaries{summary: &expanded[last], all: expanded[:last], isPartial: isPartial}, nil
}

// expandNamesOfCluster is expandReleaseNames with the data of a cluster.
func (c *Controller) expandNamesOfCluster(
	ctx context.Context, cluster fleet.ID, summaries []configv1beta1.ClusterSummary,
) (all []configv1beta1.ClusterSummary, isPartial bool, err error) {
	found, err := fleet.Object(ctx, c.Hub, cluster)
	if apierrors.IsNotFound(err) {
		return summaries, false, nil // nothing is deployed to a cluster that does not exist
	}
	if err != nil {
		return nil, false, err
	}
	templateContextFor := func(summary *configv1beta1.ClusterSummary) (source.TemplateContext, error) {
		tmplCtx, err := TemplateContextFor(summary, found, c.Composer.Sandbox)
		if err != nil {
			return tmplCtx, err
		}
		tmplCtx.Expansions = c.Composer.Expansions
		return WithResources(ctx, c.Resources, summary, tmplCtx)
	}
	return expandReleaseNames(summaries, templateContextFor)
}

// expandReleaseNames expands the templates in the release names of summaries. The last summary is the reconciled one:
// if one of its names cannot be expanded now, the error is returned, unless the summary is being deleted. If a name of
// any other summary cannot be expanded now, isPartial is true, and that summary also gets the releases in its status:
// otherwise it would lose a release, or block the reconciled summary. Another summary with an invalid template gets
// them, too, since it cannot be deployed and so changes nothing on the cluster.
func expandReleaseNames(
	summaries []configv1beta1.ClusterSummary, templateContextFor func(*configv1beta1.ClusterSummary) (source.TemplateContext, error),
) (all []configv1beta1.ClusterSummary, isPartial bool, err error) {
	for i, summary := range summaries {
		if !hasTemplatedRelease(summary) {
			all = append(all, summary)
			continue
		}
		var charts []configv1beta1.HelmChart
		tmplCtx, err := templateContextFor(&summary)
		if err == nil {
			charts, err = expandChartNames(summary.Spec.ClusterProfileSpec.HelmCharts, tmplCtx)
		}
		isLast := i == len(summaries)-1
		if err != nil && isLast && summary.DeletionTimestamp.IsZero() {
			return nil, false, err
		}
		if len(charts) < len(summary.Spec.ClusterProfileSpec.HelmCharts) && (err != nil || !isLast) {
			charts = append(charts, managedCharts(&summary)...)
		}
		// The charts are in the informer cache: they are replaced and not modified.
		summary.Spec.ClusterProfileSpec.HelmCharts = charts
		all, isPartial = append(all, summary), isPartial || err != nil
	}
	return all, isPartial, nil
}

// managedCharts returns a chart, with a release name only, for each release that a summary manages in its status.
func managedCharts(summary *configv1beta1.ClusterSummary) []configv1beta1.HelmChart {
	var charts []configv1beta1.HelmChart
	for _, r := range summary.Status.HelmReleaseSummaries {
		if r.Status == configv1beta1.HelmChartStatusManaging {
			charts = append(charts, configv1beta1.HelmChart{ReleaseNamespace: r.ReleaseNamespace, ReleaseName: r.ReleaseName})
		}
	}
	return charts
}

func hasTemplatedRelease(summary configv1beta1.ClusterSummary) bool {
	return slices.ContainsFunc(summary.Spec.ClusterProfileSpec.HelmCharts, func(chart configv1beta1.HelmChart) bool {
		return strings.Contains(chart.ReleaseName+chart.ReleaseNamespace, "{{")
	})
}

// canShareRelease returns whether two summaries of a cluster have the same release, or a release whose name is a
// template.
func canShareRelease(a, b *configv1beta1.ClusterSummary) bool {
	inA, inB := match.WantedReleases(a), match.WantedReleases(b)
	if len(inA) == 0 || len(inB) == 0 {
		return false
	}
	return hasTemplatedRelease(*a) || hasTemplatedRelease(*b) ||
		slices.ContainsFunc(inA, func(r match.Release) bool { return slices.Contains(inB, r) })
}

// expandChartNames expands the templates in the release names of charts. It omits a chart with an invalid template
// without an error, since Composer.Compose returns that error. All other errors are temporary, for example a
// sandbox.LimitError: it returns them joined, with the charts that it has expanded.
func expandChartNames(charts []configv1beta1.HelmChart, tmplCtx source.TemplateContext) (expanded []configv1beta1.HelmChart, err error) {
	for _, chart := range charts {
		release := chart.ReleaseNamespace + "/" + chart.ReleaseName
		var expandErr error
		if chart.ReleaseName, expandErr = tmplCtx.Expand("releaseName", chart.ReleaseName); expandErr == nil {
			chart.ReleaseNamespace, expandErr = tmplCtx.Expand("releaseNamespace", chart.ReleaseNamespace)
		}
		if _, isInvalid := errors.AsType[phase.TerminalError](expandErr); isInvalid {
			continue
		}
		if expandErr != nil {
			err = errors.Join(err, fmt.Errorf("helm release %s: %w", release, expandErr))
			continue
		}
		expanded = append(expanded, chart)
	}
	return expanded, err
}

// checkDuplicateReleases returns an error if two charts have the same release: each would replace the objects and the
// stored values of the other one.
func checkDuplicateReleases(charts []configv1beta1.HelmChart) error {
	seen := map[match.Release]bool{}
	for _, chart := range charts {
		release := match.Release{Namespace: chart.ReleaseNamespace, Name: chart.ReleaseName}
		if chart.HelmChartAction == configv1beta1.HelmChartActionUninstall {
			continue
		}
		if seen[release] {
			return phase.TerminalErrorf("helm release %s is listed twice", release)
		}
		seen[release] = true
	}
	return nil
}

// restoreReleaseStatus adds the releases of the spec to the status of each summary that lost its status and still has a
// Helm bundle on the member. Otherwise match.FindConflicts would not count the summary as their manager. It omits
// releases that another summary manages. It changes only the summaries in memory.
func (c *Controller) restoreReleaseStatus(ctx context.Context, m fleet.Member, cluster clusterSummaries) error {
	all := []*configv1beta1.ClusterSummary{cluster.summary}
	for i := range cluster.all {
		all = append(all, &cluster.all[i])
	}
	managed := map[match.Release]bool{}
	for _, summary := range all {
		for _, release := range summary.Status.HelmReleaseSummaries {
			if release.Status == configv1beta1.HelmChartStatusManaging {
				managed[match.Release{Namespace: release.ReleaseNamespace, Name: release.ReleaseName}] = true
			}
		}
	}
	for _, summary := range all {
		if len(summary.Spec.ClusterProfileSpec.HelmCharts) == 0 || len(summary.Status.HelmReleaseSummaries) > 0 {
			continue
		}
		_, ok, err := c.Transport.FindDeployed(ctx, m, bundleIDOf(summary, libv1beta1.FeatureHelm))
		if err != nil {
			return err
		}
		if ok {
			summary.Status.HelmReleaseSummaries = slices.DeleteFunc(managedReleases(summary), func(r configv1beta1.HelmChartSummary) bool {
				return managed[match.Release{Namespace: r.ReleaseNamespace, Name: r.ReleaseName}]
			})
		}
	}
	return nil
}

// managedReleases returns the releases in the status of a summary whose bundle is on the member, or in its spec if the
// status has none.
func managedReleases(summary *configv1beta1.ClusterSummary) []configv1beta1.HelmChartSummary {
	if len(summary.Status.HelmReleaseSummaries) > 0 {
		return summary.Status.HelmReleaseSummaries
	}
	var all []configv1beta1.HelmChartSummary
	for _, release := range match.WantedReleases(summary) {
		all = append(all, configv1beta1.HelmChartSummary{
			ReleaseNamespace: release.Namespace, ReleaseName: release.Name, Status: configv1beta1.HelmChartStatusManaging,
		})
	}
	return all
}

// withUninstallEntries adds an entry to releases for each chart with the action Uninstall that has no entry. Its
// message is that Towline has not deployed the release, and so does not uninstall it.
func withUninstallEntries(releases []configv1beta1.HelmChartSummary, charts []configv1beta1.HelmChart) []configv1beta1.HelmChartSummary {
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
			ConflictMessage: "Towline has not deployed release " + release.String(),
		})
	}
	return all
}

// nextRevision returns the revision and the operation with which to render a release. inputsDigest is
// bundle.Release.Inputs. The first case that applies counts:
//
//   - The member has reported values for the outdated release, and either the inputs are unchanged or the hub cannot
//     read the member: the reported values.
//   - The summary has not delivered the release: the values by the release records.
//   - The inputs are unchanged: the delivered values, since a chart that reads them must not cause a revision by
//     itself.
//   - The inputs are new: values by the release records if the hub can read the member, otherwise by the delivered
//     ones.
func (c *Composer) nextRevision(ctx context.Context, r ComposeRequest, key match.Release, inputsDigest string) (revision int, isUpgrade bool, err error) {
	former, ok := findDeployedRelease(r, key)
	reported, isReported := findReportedRevision(r, key)
	if isReported && (c.MemberConfig[r.Member.Mode] == nil || former.Inputs == inputsDigest) {
		return reported.Revision, reported.IsUpgrade, nil
	}
	if !ok {
		return c.nextRevisionFromRecords(ctx, r, key, inputsDigest)
	}
	if former.Inputs == inputsDigest {
		return former.Revision, former.IsUpgrade, nil
	}
	if c.MemberConfig[r.Member.Mode] == nil && former.Inputs != "" && !r.mayHaveBegun(key) {
		return former.Revision, former.IsUpgrade, nil // the member has not started to deploy this revision
	}
	if c.MemberConfig[r.Member.Mode] != nil {
		// Failed attempts and other clients of Helm may have created further revisions.
		revision, isUpgrade, err = c.nextRevisionFromRecords(ctx, r, key, inputsDigest)
		if err != nil || revision > 1 {
			return revision, isUpgrade, err
		}
		// There are no records, since they were deleted: count from the delivered revision.
	}
	return max(1, former.Revision) + 1, true, nil
}

// findDeployedRelease returns a release of the summary's bundle on the member. ok is false if the bundle lacks it.
func findDeployedRelease(r ComposeRequest, key match.Release) (deployed bundle.DeployedRelease, ok bool) {
	for _, d := range r.Deployed {
		if d.Namespace == key.Namespace && d.Name == key.Name {
			return d, true
		}
	}
	return bundle.DeployedRelease{}, false
}

// mayHaveBegun returns whether the member may have started to deploy the delivered revision of a release. A pull member
// reports the state Applying before it starts.
func (r ComposeRequest) mayHaveBegun(key match.Release) bool {
	return r.State != bundle.StatePending && r.State != bundle.StateMissing &&
		!slices.ContainsFunc(r.Outdated, func(o bundle.OutdatedRelease) bool { return matchesRelease(o, key) })
}

// findReportedRevision returns the outdated release for which the member has reported a revision and an operation.
func findReportedRevision(r ComposeRequest, key match.Release) (reported bundle.OutdatedRelease, ok bool) {
	i := slices.IndexFunc(r.Outdated, func(o bundle.OutdatedRelease) bool { return matchesRelease(o, key) && o.Revision > 0 })
	if i < 0 {
		return bundle.OutdatedRelease{}, false
	}
	return r.Outdated[i], true
}

func matchesRelease(o bundle.OutdatedRelease, key match.Release) bool {
	return o.Namespace == key.Namespace && o.Name == key.Name
}

// isConfirmed returns whether the member can deploy a release without comparing its revision with the release records.
// It is true if the member has reported the revision for the same inputs, or if the delivered release is the same and
// confirmed. If the member compared again, another client of Helm that often writes revisions could block the
// deployment.
func isConfirmed(r ComposeRequest, next bundle.Release) bool {
	key := match.Release{Namespace: next.Namespace, Name: next.Name}
	former, _ := findDeployedRelease(r, key)
	_, isReported := findReportedRevision(r, key)
	return isReported && former.Inputs == next.Inputs || slices.Contains(r.Deployed, bundle.DeployedRelease{
		Namespace: next.Namespace, Name: next.Name, Inputs: next.Inputs, Revision: next.Revision, IsUpgrade: next.IsUpgrade,
	})
}

// nextRevisionFromBundles replaces nextRevisionFromRecords for a member that the hub cannot read. It searches the
// bundles of all profiles for the release, and returns revision 1 and no upgrade if no bundle has it.
func (c *Composer) nextRevisionFromBundles(ctx context.Context, m fleet.Member, key match.Release) (revision int, isUpgrade bool, err error) {
	deployed, err := c.ListDeployed(ctx, m)
	if err != nil {
		return 0, false, err
	}
	for _, d := range deployed {
		for _, former := range d.Releases {
			if former.Namespace == key.Namespace && former.Name == key.Name {
				return max(1, former.Revision) + 1, true, nil
			}
		}
	}
	return 1, false, nil
}

// nextRevisionFromRecords returns the next revision and operation by the release records on a member, which helm or
// another profile may have written. If the last record was written for this summary with the same inputs, it returns
// the revision and the operation of that record: the member has deployed the release, but lost its inventory.
func (c *Composer) nextRevisionFromRecords(ctx context.Context, r ComposeRequest, key match.Release, inputsDigest string) (revision int, isUpgrade bool, err error) {
	if c.MemberConfig[r.Member.Mode] == nil {
		return c.nextRevisionFromBundles(ctx, r.Member, key)
	}
	entries, err := c.listRecords(ctx, r.Member, key)
	if err != nil {
		return 0, false, err
	}
	next := release.NextRendering(entries, inputsDigest, func(secret metav1.ObjectMeta) bool { return isWrittenFor(r, secret) })
	return next.Revision, next.IsUpgrade, nil
}

// isWrittenFor returns whether the Secret of a release record was written for the bundle of the summary.
func isWrittenFor(r ComposeRequest, secret metav1.ObjectMeta) bool {
	scope := inventory.OwnerScope{Hub: r.Member.Hub, Registration: r.Member.Scope}
	written := inventory.LiveMetaOf(&metav1.PartialObjectMetadata{ObjectMeta: secret})
	return written.OwnerKey() == scope.OwnerKey(bundleIDOf(r.Summary, libv1beta1.FeatureHelm))
}

// listRecords lists the records of a release on a member, oldest first.
func (c *Composer) listRecords(ctx context.Context, m fleet.Member, key match.Release) ([]release.Entry, error) {
	config, err := c.memberConfig(ctx, m)
	if err != nil {
		return nil, err
	}
	objects, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("create client for the member: %w", err)
	}
	return release.Store{Metadata: objects}.List(ctx, release.Key{Namespace: key.Namespace, Name: key.Name})
}
