package outdated

import (
	"cmp"
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/towline/towline/internal/source"
)

// metricsNamespace is the prefix of the names of Sveltos metrics.
const metricsNamespace = "projectsveltos"

// scrapeTimeout is the timeout of a scrape, which only reads caches.
const scrapeTimeout = 5 * time.Second

func chartDesc() *prometheus.Desc {
	return prometheus.NewDesc(metricsNamespace+"_outdated_helm_chart",
		"Whether the repository of a deployed chart has a newer version that is not a pre-release: 1 if it has, 0 if not.",
		[]string{"cluster_type", "cluster_namespace", "cluster_name", "release_namespace", "release_name", "chart", "version", "latest"}, nil)
}

func lastCheckDesc() *prometheus.Desc {
	return prometheus.NewDesc(metricsNamespace+"_outdated_helm_chart_check_last_run_timestamp_seconds",
		"Unix time of the last check for newer charts in all repositories.", nil, nil)
}

// Describe sends the descriptions of the metrics.
func (c *Checker) Describe(to chan<- *prometheus.Desc) {
	to <- chartDesc()
	to <- lastCheckDesc()
	c.failures.Describe(to)
}

// Collect compares the deployed versions at the time of the scrape with the newest versions of the last check.
func (c *Checker) Collect(to chan<- prometheus.Metric) {
	select {
	case <-c.Elected:
	default:
		return
	}
	c.failures.Collect(to)
	c.mu.Lock()
	newest, lastCheck := c.newest, c.lastCheck
	c.mu.Unlock()
	if lastCheck.IsZero() {
		return
	}
	to <- prometheus.MustNewConstMetric(lastCheckDesc(), prometheus.GaugeValue, float64(lastCheck.Unix()))
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	_, deployed, err := c.listDeployed(ctx)
	if err != nil {
		to <- prometheus.NewInvalidMetric(chartDesc(), err)
		return
	}
	reported := map[release]bool{}
	for _, summary := range deployed {
		for rel, version := range releasesOf(summary) {
			latest, known := newest[rel]
			if !known || reported[rel] {
				continue
			}
			reported[rel] = true
			outdated := 0.0
			if source.IsOutdated(version, latest) {
				outdated = 1
			}
			to <- prometheus.MustNewConstMetric(chartDesc(), prometheus.GaugeValue, outdated,
				string(rel.cluster.Type), rel.cluster.Namespace, rel.cluster.Name, rel.namespace, rel.name, rel.chart, version, cmp.Or(latest, version))
		}
	}
}
