package outdated

import (
	"cmp"
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/towline/towline/internal/source"
)

// metricsNamespace begins the names of the metrics of the Sveltos surface.
const metricsNamespace = "projectsveltos"

// scrapeLimit is how long one look at what is deployed may take; it only reads caches.
const scrapeLimit = 5 * time.Second

func chartDesc() *prometheus.Desc {
	return prometheus.NewDesc(metricsNamespace+"_outdated_helm_chart",
		"Whether the repository of a chart that is deployed has a newer version that is no pre-release: 1 if it has, 0 if it has not.",
		[]string{"cluster_type", "cluster_namespace", "cluster_name", "release_namespace", "release_name", "chart", "version", "latest"}, nil)
}

func lookedDesc() *prometheus.Desc {
	return prometheus.NewDesc(metricsNamespace+"_outdated_helm_chart_check_last_run_timestamp_seconds",
		"When repositories were last asked for newer charts, in Unix time.", nil, nil)
}

// Describe names the metrics.
func (w *Watch) Describe(to chan<- *prometheus.Desc) {
	to <- chartDesc()
	to <- lookedDesc()
	w.failures.Describe(to)
}

// Collect compares what is deployed now with what was learned last, so that what was upgraded or is gone is told at once.
func (w *Watch) Collect(to chan<- prometheus.Metric) {
	select {
	case <-w.Leads:
	default:
		return
	}
	w.failures.Collect(to)
	w.mu.Lock()
	newest, looked := w.newest, w.looked
	w.mu.Unlock()
	if looked.IsZero() {
		return
	}
	to <- prometheus.MustNewConstMetric(lookedDesc(), prometheus.GaugeValue, float64(looked.Unix()))
	ctx, cancel := context.WithTimeout(context.Background(), scrapeLimit)
	defer cancel()
	_, deployed, err := w.deployed(ctx)
	if err != nil {
		to <- prometheus.NewInvalidMetric(chartDesc(), err)
		return
	}
	told := map[release]bool{}
	for _, summary := range deployed {
		for of, version := range releasesOf(summary) {
			latest, known := newest[of]
			if !known || told[of] {
				continue
			}
			told[of] = true
			outdated := 0.0
			if source.IsOutdated(version, latest) {
				outdated = 1
			}
			to <- prometheus.MustNewConstMetric(chartDesc(), prometheus.GaugeValue, outdated,
				string(of.cluster.Type), of.cluster.Namespace, of.cluster.Name, of.namespace, of.name, of.chart, version, cmp.Or(latest, version))
		}
	}
}
