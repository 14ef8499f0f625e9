package session

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
)

// Metrics of one agent, in a registry of its own: several agents may live in one process.
type Metrics struct {
	// Registry holds them.
	Registry  *prometheus.Registry
	connected prometheus.Gauge
	lastBeat  prometheus.Gauge
	passes    *prometheus.CounterVec
	drifts    *prometheus.CounterVec
	// Pulse turns with every heartbeat, taken or not.
	Pulse *Pulse
}

// NewMetrics returns the metrics of the agent of a cluster, which has that name on the hub.
func NewMetrics(kind fleet.Type, cluster types.NamespacedName, pulse *Pulse) *Metrics {
	labels := prometheus.Labels{"cluster_namespace": cluster.Namespace, "cluster_name": cluster.Name}
	m := &Metrics{
		Registry: prometheus.NewRegistry(),
		Pulse:    pulse,
		connected: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "towline_agent_hub_connected", Help: "1 if the hub took the last heartbeat, else 0.", ConstLabels: labels,
		}),
		lastBeat: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "towline_agent_last_heartbeat_timestamp_seconds", Help: "When the hub last took a heartbeat, in Unix time.", ConstLabels: labels,
		}),
		passes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "towline_agent_converge_total", Help: "Passes over bundles that the hub delivered, by result.", ConstLabels: labels,
		}, []string{"result"}),
		drifts: prometheus.NewCounterVec(prometheus.CounterOpts{
			// The name and the labels of the Sveltos surface.
			Name: "projectsveltos_total_drifts", Help: "Times that objects of a feature were put back.",
			ConstLabels: prometheus.Labels{"cluster_type": string(kind), "cluster_namespace": cluster.Namespace, "cluster_name": cluster.Name},
		}, []string{"feature"}),
	}
	m.Registry.MustRegister(m.connected, m.lastBeat, m.passes, m.drifts, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Beat says how the hub took a heartbeat.
func (m *Metrics) Beat(err error) {
	m.Pulse.Turned()
	if err != nil {
		m.connected.Set(0)
		return
	}
	m.connected.Set(1)
	m.lastBeat.Set(float64(time.Now().UnixMilli()) / float64(time.Second/time.Millisecond))
}

// Converged counts a pass by how it ended.
func (m *Metrics) Converged(err error) {
	result := "applied"
	if err != nil {
		result = "failed"
	}
	m.passes.WithLabelValues(result).Inc()
}

// Healed counts what the engine put back.
func (m *Metrics) Healed(id bundle.ID, changes bundle.ChangeSet) {
	if changes.Count(bundle.Created)+changes.Count(bundle.Configured)+changes.Count(bundle.Deleted) > 0 {
		m.drifts.WithLabelValues(id.Feature).Inc()
	}
}
