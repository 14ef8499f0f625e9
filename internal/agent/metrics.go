package agent

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
)

// metrics of one agent, in a registry of its own: several agents may live in one process.
type metrics struct {
	registry  *prometheus.Registry
	connected prometheus.Gauge
	lastBeat  prometheus.Gauge
	passes    *prometheus.CounterVec
	drifts    *prometheus.CounterVec
	// pulse turns with every heartbeat, taken or not.
	pulse *pulse
}

func newMetrics(o Options) *metrics {
	labels := prometheus.Labels{"cluster_namespace": o.Namespace, "cluster_name": o.Name}
	m := &metrics{
		registry: prometheus.NewRegistry(),
		pulse:    newPulse(o.Clock, o.Heartbeat),
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
			ConstLabels: prometheus.Labels{"cluster_type": string(fleet.TypeSveltos), "cluster_namespace": o.Namespace, "cluster_name": o.Name},
		}, []string{"feature"}),
	}
	m.registry.MustRegister(m.connected, m.lastBeat, m.passes, m.drifts, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *metrics) beat(err error) {
	m.pulse.turned()
	if err != nil {
		m.connected.Set(0)
		return
	}
	m.connected.Set(1)
	m.lastBeat.Set(float64(time.Now().UnixMilli()) / float64(time.Second/time.Millisecond))
}

func (m *metrics) converged(err error) {
	result := "applied"
	if err != nil {
		result = "failed"
	}
	m.passes.WithLabelValues(result).Inc()
}

// healed counts what the engine put back.
func (m *metrics) healed(id bundle.ID, changes bundle.ChangeSet) {
	if changes.Count(bundle.Created)+changes.Count(bundle.Configured)+changes.Count(bundle.Deleted) > 0 {
		m.drifts.WithLabelValues(id.Feature).Inc()
	}
}
