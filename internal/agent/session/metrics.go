package session

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
)

// Metrics are the metrics of one agent. Each agent has its own registry, because several agents may run in one process.
type Metrics struct {
	// Registry contains all metrics.
	Registry      *prometheus.Registry
	connected     prometheus.Gauge
	lastHeartbeat prometheus.Gauge
	converges     *prometheus.CounterVec
	corrections   *prometheus.CounterVec
	// Watchdog is reset by RecordHeartbeat, whether or not the hub accepts the heartbeat, and by the agents at each
	// attempt to connect.
	Watchdog *Watchdog
}

// NewMetrics returns the metrics of the agent of the given cluster.
func NewMetrics(kind fleet.Type, cluster types.NamespacedName, watchdog *Watchdog) *Metrics {
	labels := prometheus.Labels{"cluster_namespace": cluster.Namespace, "cluster_name": cluster.Name}
	m := &Metrics{
		Registry: prometheus.NewRegistry(),
		Watchdog: watchdog,
		connected: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "towline_agent_hub_connected", Help: "1 if the hub accepted the last heartbeat, else 0.", ConstLabels: labels,
		}),
		lastHeartbeat: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "towline_agent_last_heartbeat_timestamp_seconds", Help: "Time at which the hub last accepted a heartbeat, in Unix time.", ConstLabels: labels,
		}),
		converges: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "towline_agent_converge_total", Help: "Attempts to apply bundles, by result.", ConstLabels: labels,
		}, []string{"result"}),
		corrections: prometheus.NewCounterVec(prometheus.CounterOpts{
			// Sveltos defines this name and these labels.
			Name: "projectsveltos_total_drifts", Help: "Drift corrections that changed objects, by feature.",
			ConstLabels: prometheus.Labels{"cluster_type": string(kind), "cluster_namespace": cluster.Namespace, "cluster_name": cluster.Name},
		}, []string{"feature"}),
	}
	m.Registry.MustRegister(m.connected, m.lastHeartbeat, m.converges, m.corrections, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// RecordHeartbeat records a heartbeat. err is nil if the hub accepted it.
func (m *Metrics) RecordHeartbeat(err error) {
	m.Watchdog.Reset()
	if err != nil {
		m.connected.Set(0)
		return
	}
	m.connected.Set(1)
	m.lastHeartbeat.Set(float64(time.Now().UnixMilli()) / float64(time.Second/time.Millisecond))
}

// RecordConverge counts an attempt to apply a bundle.
func (m *Metrics) RecordConverge(err error) {
	result := "applied"
	if err != nil {
		result = "failed"
	}
	m.converges.WithLabelValues(result).Inc()
}

// RecordCorrection counts a drift correction if it changed objects.
func (m *Metrics) RecordCorrection(id bundle.ID, changes bundle.ChangeSet) {
	if changes.Count(bundle.Created)+changes.Count(bundle.Configured)+changes.Count(bundle.Deleted) > 0 {
		m.corrections.WithLabelValues(id.Feature).Inc()
	}
}
