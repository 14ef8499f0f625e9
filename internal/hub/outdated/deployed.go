package outdated

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/summaries"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
	"github.com/towline/towline/internal/status"
)

// query is the request to one repository for the charts of all releases, and its result.
type query struct {
	repository source.Repository
	// charts maps each release to the name of its chart in the repository.
	charts map[release]string

	versions map[string]string
	err      error
}

// names returns the sorted names of the charts without duplicates.
func (q *query) names() []string {
	return slices.Compact(slices.Sorted(maps.Values(q.charts)))
}

// queries returns the query for each repository, by source.Repository.Key.
func (c *Checker) queries(ctx context.Context) (map[string]*query, error) {
	clusters, deployed, err := c.listDeployed(ctx)
	if err != nil {
		return nil, err
	}
	queries := map[string]*query{}
	for _, summary := range deployed {
		tmplCtx, err := summaries.TemplateContextFor(summary, clusters[match.MemberID(summary)], c.Sandbox)
		if err != nil {
			continue // its profile is being deleted
		}
		charts, expandErr := c.expandedCharts(ctx, summary, tmplCtx)
		for rel := range releasesOf(summary) {
			chart, ok := charts[rel.namespace+"/"+rel.name]
			if !ok && expandErr != nil {
				// The release may be of a chart whose template cannot be expanded now: it keeps its earlier result.
				queryOf(queries, "not expanded "+rel.repository, source.Repository{URL: rel.repository}, expandErr).charts[rel] = ""
				continue
			}
			if !ok || chart.RepositoryURL != rel.repository {
				continue // the spec has changed, and the new chart is not provisioned yet
			}
			if source.IsFluxURL(chart.RepositoryURL) {
				continue // a Flux source has only one version
			}
			login, err := source.LoginFor(ctx, c.Secrets, chart, tmplCtx)
			repository, name := source.RepositoryOf(chart, login)
			key := repository.Key()
			if err != nil {
				key = "no login " + key
			}
			queryOf(queries, key, repository, err).charts[rel] = name
		}
	}
	return queries, nil
}

// queryOf returns the query with a key, and adds it if there is none. A query with an error is not sent.
func queryOf(queries map[string]*query, key string, repository source.Repository, err error) *query {
	if queries[key] == nil {
		queries[key] = &query{repository: repository, charts: map[release]string{}}
	}
	if err != nil {
		queries[key].err = err
	}
	return queries[key]
}

// listDeployed returns the clusters of the shard, and their summaries with provisioned charts, in a stable order.
func (c *Checker) listDeployed(ctx context.Context) (map[fleet.ID]client.Object, []*configv1beta1.ClusterSummary, error) {
	members, err := fleet.Objects(ctx, c.Hub)
	if err != nil {
		return nil, nil, err
	}
	clusters := map[fleet.ID]client.Object{}
	for _, cluster := range members {
		if c.Shard.Serves(cluster) {
			clusters[fleet.FromObject(cluster).ID()] = cluster
		}
	}
	var list configv1beta1.ClusterSummaryList
	if err := c.Hub.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, nil, fmt.Errorf("list summaries: %w", err)
	}
	var deployed []*configv1beta1.ClusterSummary
	for i := range list.Items {
		summary := &list.Items[i]
		provisioned := status.FeatureOf(summary.Status, libv1beta1.FeatureHelm).Status == libv1beta1.FeatureStatusProvisioned
		if provisioned && clusters[match.MemberID(summary)] != nil {
			deployed = append(deployed, summary)
		}
	}
	return clusters, deployed, nil
}

// releasesOf returns the deployed releases of a summary with their chart versions.
func releasesOf(summary *configv1beta1.ClusterSummary) map[release]string {
	versions := map[release]string{}
	for _, r := range summary.Status.HelmReleaseSummaries {
		if r.Status != configv1beta1.HelmChartStatusManaging || r.ChartVersion == "" {
			continue
		}
		versions[release{
			cluster: match.MemberID(summary), namespace: r.ReleaseNamespace, name: r.ReleaseName, repository: r.RepoURL, chart: r.ChartName,
		}] = r.ChartVersion
	}
	return versions
}

// expandedCharts returns the charts of a summary by release. It omits charts with an invalid template, which are not
// deployed. Another error, for example a sandbox.LimitError, is returned together with the other charts.
func (c *Checker) expandedCharts(ctx context.Context, summary *configv1beta1.ClusterSummary, tmplCtx source.TemplateContext) (charts map[string]configv1beta1.HelmChart, err error) {
	if tmplCtx, err = summaries.WithResources(ctx, c.Resources, summary, tmplCtx); err != nil {
		return nil, err
	}
	charts = map[string]configv1beta1.HelmChart{}
	for _, chart := range summary.Spec.ClusterProfileSpec.HelmCharts {
		expanded, expandErr := source.ExpandChart(chart, tmplCtx)
		if expandErr == nil {
			charts[expanded.ReleaseNamespace+"/"+expanded.ReleaseName] = expanded
		} else if _, isInvalid := errors.AsType[phase.TerminalError](expandErr); !isInvalid {
			err = errors.Join(err, expandErr)
		}
	}
	return charts, err
}

// withoutCredentials returns the URL without user and password, for logs and metrics.
func withoutCredentials(repositoryURL string) string {
	parsed, err := url.Parse(repositoryURL)
	if err != nil {
		return "not a URL"
	}
	parsed.User = nil
	return parsed.String()
}
