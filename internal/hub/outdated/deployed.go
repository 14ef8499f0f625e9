package outdated

import (
	"context"
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
	"github.com/towline/towline/internal/source"
	"github.com/towline/towline/internal/status"
)

// question is what one repository is asked for, on behalf of any number of releases.
type question struct {
	repository source.Repository
	// charts are the names in the repository of what the releases are made of.
	charts map[release]string

	answer  map[string]string
	failure error
}

// names returns the charts to ask for, each once.
func (q *question) names() []string {
	return slices.Compact(slices.Sorted(maps.Values(q.charts)))
}

// questions returns what to ask of each repository, by source.Repository.Key.
func (w *Watch) questions(ctx context.Context) (map[string]*question, error) {
	clusters, deployed, err := w.deployed(ctx)
	if err != nil {
		return nil, err
	}
	questions := map[string]*question{}
	for _, summary := range deployed {
		subject, err := summaries.SubjectFor(summary, clusters[match.Target(summary)])
		if err != nil {
			continue // its profile is on its way out
		}
		wanted := expanded(summary, subject)
		for of := range releasesOf(summary) {
			chart, ok := wanted[of.namespace+"/"+of.name]
			if !ok || chart.RepositoryURL != of.repository {
				continue // it has just been changed, and will be provisioned anew
			}
			login, err := source.LoginFor(ctx, w.Secrets, chart, subject)
			repository, name := source.RepositoryOf(chart, login)
			key := repository.Key()
			if err != nil {
				key = "no login " + key
			}
			if questions[key] == nil {
				questions[key] = &question{repository: repository, charts: map[release]string{}}
			}
			questions[key].charts[of] = name
			if err != nil {
				questions[key].failure = err
			}
		}
	}
	return questions, nil
}

// deployed returns the clusters of the shard, and their summaries whose charts are provisioned, in one order.
func (w *Watch) deployed(ctx context.Context) (map[fleet.ID]client.Object, []*configv1beta1.ClusterSummary, error) {
	members, err := fleet.Objects(ctx, w.Hub)
	if err != nil {
		return nil, nil, err
	}
	clusters := map[fleet.ID]client.Object{}
	for _, cluster := range members {
		if w.Shard.Serves(cluster) {
			clusters[fleet.FromObject(cluster).ID()] = cluster
		}
	}
	var list configv1beta1.ClusterSummaryList
	if err := w.Hub.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, nil, fmt.Errorf("list summaries: %w", err)
	}
	var deployed []*configv1beta1.ClusterSummary
	for i := range list.Items {
		summary := &list.Items[i]
		provisioned := status.FeatureOf(summary.Status, libv1beta1.FeatureHelm).Status == libv1beta1.FeatureStatusProvisioned
		if provisioned && clusters[match.Target(summary)] != nil {
			deployed = append(deployed, summary)
		}
	}
	return clusters, deployed, nil
}

// releasesOf returns the releases that a summary has deployed, with their versions.
func releasesOf(summary *configv1beta1.ClusterSummary) map[release]string {
	versions := map[release]string{}
	for _, r := range summary.Status.HelmReleaseSummaries {
		if r.Status != configv1beta1.HelmChartStatusManaging || r.ChartVersion == "" {
			continue
		}
		versions[release{
			cluster: match.Target(summary), namespace: r.ReleaseNamespace, name: r.ReleaseName, repository: r.RepoURL, chart: r.ChartName,
		}] = r.ChartVersion
	}
	return versions
}

// expanded returns the charts of a summary by release. One that cannot be expanded is not deployed.
func expanded(summary *configv1beta1.ClusterSummary, subject source.Subject) map[string]configv1beta1.HelmChart {
	charts := map[string]configv1beta1.HelmChart{}
	for _, chart := range summary.Spec.ClusterProfileSpec.HelmCharts {
		if chart, err := source.ExpandChart(chart, subject); err == nil {
			charts[chart.ReleaseNamespace+"/"+chart.ReleaseName] = chart
		}
	}
	return charts
}

// plainURL returns address without the login that somebody may have written into it.
func plainURL(address string) string {
	parsed, err := url.Parse(address)
	if err != nil {
		return "not a URL"
	}
	parsed.User = nil
	return parsed.String()
}
