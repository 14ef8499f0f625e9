package hub

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/status"
)

// tally counts what happens to the features of the clusters of a shard while this hub leads. It learns of outcomes as everybody does, from
// the status of summaries, so that they mean the same in both modes.
type tally struct {
	hub   client.Reader
	shard fleet.Shard
	leads <-chan struct{}
	clock clock.PassiveClock

	durations  *prometheus.HistogramVec
	operations *prometheus.CounterVec
	outcomes   *prometheus.CounterVec
	drifts     *prometheus.CounterVec

	// mu guards began.
	mu sync.Mutex
	// began is when what is under way was seen to begin.
	began map[work]time.Time
}

// work is one feature of one summary.
type work struct {
	summary types.NamespacedName
	feature libv1beta1.FeatureID
}

// durationBuckets reach from an apply on a member nearby to a big chart on one behind a bad line, in seconds.
func durationBuckets() []float64 {
	return []float64{0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600}
}

func newTally(hub client.Reader, shard fleet.Shard, leads <-chan struct{}, clock clock.PassiveClock) *tally {
	counter := func(name, help string, labels []string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: metricsNamespace, Name: name, Help: help}, labels)
	}
	return &tally{
		hub: hub, shard: shard, leads: leads, clock: clock, began: map[work]time.Time{},
		durations: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: metricsNamespace, Name: "reconcile_duration_seconds", Buckets: durationBuckets(),
			Help: "How long a change of a feature took on a cluster, from being announced to being done or having failed.",
		}, clusterLabels("feature")),
		operations: counter("reconcile_operations_total", "Attempts to deliver or withdraw a feature.", clusterLabels("feature")),
		outcomes: counter("reconcile_outcome_total", "Deliveries and withdrawals of a feature that ended, by status: success or failure.",
			append(clusterLabels("feature", "status"), profileLabels()...)),
		drifts: counter("total_drifts", "Times that objects of a feature were put back on a cluster in push mode; agents count their own.",
			append(clusterLabels("feature"), profileLabels()...)),
	}
}

func (t *tally) register(registry *prometheus.Registry) error {
	for _, collector := range []prometheus.Collector{t.durations, t.operations, t.outcomes, t.drifts} {
		if err := registry.Register(collector); err != nil {
			return fmt.Errorf("register metrics: %w", err)
		}
	}
	return nil
}

// follow makes the tally listen to summaries and clusters.
func (t *tally) follow(ctx context.Context, informers cache.Informers) error {
	handlers := map[client.Object]toolscache.ResourceEventHandler{
		&configv1beta1.ClusterSummary{}: toolscache.ResourceEventHandlerFuncs{UpdateFunc: t.summaryChanged, DeleteFunc: t.summaryGone},
	}
	for _, cluster := range fleet.Kinds() {
		handlers[cluster] = toolscache.ResourceEventHandlerFuncs{UpdateFunc: t.clusterChanged, DeleteFunc: t.clusterGone}
	}
	for obj, handler := range handlers {
		informer, err := informers.GetInformer(ctx, obj, cache.BlockUntilSynced(false))
		if err != nil {
			return fmt.Errorf("count what happens to %T: %w", obj, err)
		}
		if _, err := informer.AddEventHandler(handler); err != nil {
			return fmt.Errorf("count what happens to %T: %w", obj, err)
		}
	}
	return nil
}

// counts says whether what happens to a cluster is counted here.
func (t *tally) counts(summary *configv1beta1.ClusterSummary) bool {
	select {
	case <-t.leads:
	default:
		return false
	}
	of := match.Target(summary)
	_, cluster, err := fleet.Get(context.Background(), t.hub, of.Type, of.Namespace, of.Name)
	return err == nil && t.shard.Serves(cluster)
}

func (t *tally) summaryChanged(before, after any) {
	old, isOld := before.(*configv1beta1.ClusterSummary)
	now, isNow := after.(*configv1beta1.ClusterSummary)
	if !isOld || !isNow || old.ResourceVersion == now.ResourceVersion || !t.counts(now) {
		return
	}
	for _, feature := range now.Status.FeatureSummaries {
		at := work{summary: client.ObjectKeyFromObject(now), feature: feature.FeatureID}
		result, ended := outcome(status.FeatureOf(old.Status, feature.FeatureID), feature)
		if !ended {
			t.begins(at, feature.Status)
			continue
		}
		of := featureOf(now, feature.FeatureID)
		t.outcomes.WithLabelValues(append(append(of, result), profileOf(now)...)...).Inc()
		if took, ok := t.ends(at); ok {
			t.durations.WithLabelValues(of...).Observe(took.Seconds())
		}
	}
}

// outcome says how the work on a feature ended between two states of it; ended is false if it did not.
func outcome(old, now configv1beta1.FeatureSummary) (result string, ended bool) {
	news := old.Status != now.Status || !bytes.Equal(old.Hash, now.Hash)
	switch now.Status {
	case libv1beta1.FeatureStatusProvisioned, libv1beta1.FeatureStatusRemoved:
		return "success", news
	case libv1beta1.FeatureStatusFailed, libv1beta1.FeatureStatusFailedNonRetriable:
		return "failure", news || now.ConsecutiveFailures > old.ConsecutiveFailures
	default:
		return "", false
	}
}

func (t *tally) begins(at work, status libv1beta1.FeatureStatus) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch status {
	case libv1beta1.FeatureStatusProvisioning, libv1beta1.FeatureStatusRemoving, libv1beta1.FeatureStatusAgentRemoving:
		if _, running := t.began[at]; !running {
			t.began[at] = t.clock.Now()
		}
	default:
	}
}

func (t *tally) ends(at work) (took time.Duration, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	began, ok := t.began[at]
	delete(t.began, at)
	return t.clock.Since(began), ok
}

func (t *tally) summaryGone(obj any) {
	if last, ok := obj.(toolscache.DeletedFinalStateUnknown); ok {
		obj = last.Obj
	}
	if summary, ok := obj.(*configv1beta1.ClusterSummary); ok {
		for _, feature := range summary.Status.FeatureSummaries {
			t.ends(work{summary: client.ObjectKeyFromObject(summary), feature: feature.FeatureID})
		}
	}
}

func (t *tally) clusterChanged(_, after any) {
	if cluster, ok := after.(client.Object); ok && !t.shard.Serves(cluster) {
		t.forget(cluster)
	}
}

func (t *tally) clusterGone(obj any) {
	if last, ok := obj.(toolscache.DeletedFinalStateUnknown); ok {
		obj = last.Obj
	}
	if cluster, ok := obj.(client.Object); ok {
		t.forget(cluster)
	}
}

// forget drops the counts of a cluster that is gone or another shard's.
func (t *tally) forget(cluster client.Object) {
	member := fleet.FromObject(cluster)
	of := prometheus.Labels{"cluster_type": string(member.Type), "cluster_namespace": member.Namespace, "cluster_name": member.Name}
	t.durations.DeletePartialMatch(of)
	t.operations.DeletePartialMatch(of)
	t.outcomes.DeletePartialMatch(of)
	t.drifts.DeletePartialMatch(of)
}

// healed counts what an engine put back on m.
func (t *tally) healed(m fleet.Member, id bundle.ID, changes bundle.ChangeSet) {
	if changes.Count(bundle.Created)+changes.Count(bundle.Configured)+changes.Count(bundle.Deleted) == 0 {
		return
	}
	summary := &configv1beta1.ClusterSummary{}
	if err := t.hub.Get(context.Background(), types.NamespacedName{Namespace: m.Namespace, Name: id.RequestorName}, summary); err != nil {
		// Nobody wants that bundle any more.
		return
	}
	t.drifts.WithLabelValues(append([]string{string(m.Type), m.Namespace, m.Name, id.Feature}, profileOf(summary)...)...).Inc()
}

// counted is a transport whose operations are counted.
type counted struct {
	deliver.Transport
	operations *prometheus.CounterVec
}

var _ deliver.Transport = counted{}

// Deliver counts and delivers.
func (c counted) Deliver(ctx context.Context, m fleet.Member, b bundle.Bundle) (bundle.Report, error) {
	c.operations.WithLabelValues(string(m.Type), m.Namespace, m.Name, b.ID.Feature).Inc()
	return c.Transport.Deliver(ctx, m, b)
}

// Withdraw counts and withdraws.
func (c counted) Withdraw(ctx context.Context, m fleet.Member, w bundle.Withdrawal) (bool, error) {
	c.operations.WithLabelValues(string(m.Type), m.Namespace, m.Name, w.ID.Feature).Inc()
	return c.Transport.Withdraw(ctx, m, w)
}
