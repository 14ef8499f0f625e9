package hub

import (
	"bytes"
	"context"
	"fmt"
	"maps"
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

// metricsRecorder has the metrics about events: the deployments, withdrawals and drift corrections of features on the
// clusters of a shard while this hub is the leader. It derives the results from changes of the status of summaries, in
// the same way for push and pull mode. metricsCollector has the metrics about the current state.
type metricsRecorder struct {
	hub     client.Reader
	shard   fleet.Shard
	elected <-chan struct{}
	clock   clock.PassiveClock
	// hashKey is the key of the bundle hashes in the status of summaries.
	hashKey status.HashKey

	durations  *prometheus.HistogramVec
	operations *prometheus.CounterVec
	outcomes   *prometheus.CounterVec
	drifts     *prometheus.CounterVec

	// mu guards started.
	mu sync.Mutex
	// started has the start times of deployments and withdrawals in progress.
	started map[featureKey]time.Time
}

// featureKey identifies one feature of one summary.
type featureKey struct {
	summary types.NamespacedName
	feature libv1beta1.FeatureID
}

// durationBuckets returns the buckets in seconds. They range from an apply on a nearby member to a large chart over a
// slow connection.
func durationBuckets() []float64 {
	return []float64{0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600}
}

func newMetricsRecorder(hub client.Reader, shard fleet.Shard, elected <-chan struct{}, clock clock.PassiveClock) *metricsRecorder {
	counter := func(name, help string, labels []string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: metricsNamespace, Name: name, Help: help}, labels)
	}
	return &metricsRecorder{
		hub: hub, shard: shard, elected: elected, clock: clock, started: map[featureKey]time.Time{},
		durations: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: metricsNamespace, Name: "reconcile_duration_seconds", Buckets: durationBuckets(),
			Help: "Duration of a change of a feature on a cluster, from its start to its success or failure.",
		}, clusterLabels("feature")),
		operations: counter("reconcile_operations_total", "Number of attempts to deliver or withdraw a feature.", clusterLabels("feature")),
		outcomes: counter("reconcile_outcome_total", "Number of ended deliveries and withdrawals of a feature, by status: success or failure.",
			append(clusterLabels("feature", "status"), profileLabels()...)),
		drifts: counter("total_drifts", "Number of drift corrections for a feature on a cluster in push mode; agents report their own.",
			append(clusterLabels("feature"), profileLabels()...)),
	}
}

func (t *metricsRecorder) register(registry *prometheus.Registry) error {
	for _, collector := range []prometheus.Collector{t.durations, t.operations, t.outcomes, t.drifts} {
		if err := registry.Register(collector); err != nil {
			return fmt.Errorf("register metrics: %w", err)
		}
	}
	return nil
}

// watch adds the event handlers for summaries and clusters.
func (t *metricsRecorder) watch(ctx context.Context, informers cache.Informers) error {
	handlers := map[client.Object]toolscache.ResourceEventHandler{
		&configv1beta1.ClusterSummary{}: toolscache.ResourceEventHandlerFuncs{UpdateFunc: t.summaryChanged, DeleteFunc: t.summaryDeleted},
	}
	for _, cluster := range fleet.NewObjects() {
		handlers[cluster] = toolscache.ResourceEventHandlerFuncs{UpdateFunc: t.clusterChanged, DeleteFunc: t.clusterDeleted}
	}
	for obj, handler := range handlers {
		informer, err := informers.GetInformer(ctx, obj, cache.BlockUntilSynced(false))
		if err != nil {
			return fmt.Errorf("watch %T for metrics: %w", obj, err)
		}
		if _, err := informer.AddEventHandler(handler); err != nil {
			return fmt.Errorf("watch %T for metrics: %w", obj, err)
		}
	}
	return nil
}

// isCounted returns whether this hub counts the events of a summary.
func (t *metricsRecorder) isCounted(summary *configv1beta1.ClusterSummary) bool {
	select {
	case <-t.elected:
	default:
		return false
	}
	cluster, err := fleet.Object(context.Background(), t.hub, match.MemberID(summary))
	return err == nil && t.shard.Serves(cluster)
}

// summaryChanged handles an update of a summary: it counts the deployments and withdrawals that have ended, and records
// the start of others.
func (t *metricsRecorder) summaryChanged(before, after any) {
	old, okOld := before.(*configv1beta1.ClusterSummary)
	current, okCurrent := after.(*configv1beta1.ClusterSummary)
	if !okOld || !okCurrent || old.ResourceVersion == current.ResourceVersion || !t.isCounted(current) {
		return
	}
	for _, feature := range current.Status.FeatureSummaries {
		key := featureKey{summary: client.ObjectKeyFromObject(current), feature: feature.FeatureID}
		result, ended := outcomeOf(status.FeatureOf(old.Status, feature.FeatureID), feature, t.hashKey)
		if !ended {
			if isInProgress(feature.Status) {
				t.recordStart(key.summary, key.feature)
			}
			continue
		}
		labels := featureLabelValues(current, feature.FeatureID)
		t.outcomes.WithLabelValues(append(append(labels, result), profileLabelValues(current)...)...).Inc()
		if duration, ok := t.takeDuration(key); ok {
			t.durations.WithLabelValues(labels...).Observe(duration.Seconds())
		}
	}
}

// outcomeOf returns the result, success or failure, of a deployment or withdrawal that ended between two states of a
// feature. ended is false if none ended.
func outcomeOf(old, current configv1beta1.FeatureSummary, key status.HashKey) (result string, ended bool) {
	// Earlier versions wrote the digest of the bundle itself. After an upgrade its keyed hash replaces it.
	isSameBundle := bytes.Equal(old.Hash, current.Hash) || key.IsHashOf(current.Hash, bundle.DigestFromBytes(old.Hash))
	changed := old.Status != current.Status || !isSameBundle
	switch current.Status {
	case libv1beta1.FeatureStatusProvisioned, libv1beta1.FeatureStatusRemoved:
		return "success", changed
	case libv1beta1.FeatureStatusFailed, libv1beta1.FeatureStatusFailedNonRetriable:
		return "failure", changed || current.ConsecutiveFailures > old.ConsecutiveFailures
	default:
		return "", false
	}
}

// isInProgress returns whether s is the status of a deployment or withdrawal in progress.
func isInProgress(s libv1beta1.FeatureStatus) bool {
	return s == libv1beta1.FeatureStatusProvisioning || s == libv1beta1.FeatureStatusRemoving || s == libv1beta1.FeatureStatusAgentRemoving
}

// recordStart records the start of a deployment or withdrawal, unless one is in progress. summaries.Controller also
// calls it, because in pull mode the status shows the start late or never.
func (t *metricsRecorder) recordStart(summary client.ObjectKey, feature libv1beta1.FeatureID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	key := featureKey{summary, feature}
	if _, running := t.started[key]; !running {
		t.started[key] = t.clock.Now()
	}
}

// takeDuration returns the time since recordStart and deletes the start. ok is false if no start was recorded.
func (t *metricsRecorder) takeDuration(key featureKey) (duration time.Duration, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	startTime, ok := t.started[key]
	delete(t.started, key)
	return t.clock.Since(startTime), ok
}

func (t *metricsRecorder) summaryDeleted(obj any) {
	if last, ok := obj.(toolscache.DeletedFinalStateUnknown); ok {
		obj = last.Obj
	}
	if summary, ok := obj.(*configv1beta1.ClusterSummary); ok {
		t.mu.Lock()
		defer t.mu.Unlock()
		maps.DeleteFunc(t.started, func(key featureKey, _ time.Time) bool { return key.summary == client.ObjectKeyFromObject(summary) })
	}
}

func (t *metricsRecorder) clusterChanged(_, after any) {
	if cluster, ok := after.(client.Object); ok && !t.shard.Serves(cluster) {
		t.forget(cluster)
	}
}

func (t *metricsRecorder) clusterDeleted(obj any) {
	if last, ok := obj.(toolscache.DeletedFinalStateUnknown); ok {
		obj = last.Obj
	}
	if cluster, ok := obj.(client.Object); ok {
		t.forget(cluster)
	}
}

// forget deletes the metrics of a cluster that was deleted, or that has moved to another shard.
func (t *metricsRecorder) forget(cluster client.Object) {
	member := fleet.FromObject(cluster)
	labels := prometheus.Labels{"cluster_type": string(member.Type), "cluster_namespace": member.Namespace, "cluster_name": member.Name}
	t.durations.DeletePartialMatch(labels)
	t.operations.DeletePartialMatch(labels)
	t.outcomes.DeletePartialMatch(labels)
	t.drifts.DeletePartialMatch(labels)
}

// recordDrift counts a drift correction on m. It ignores corrections without a change, and deleted summaries.
func (t *metricsRecorder) recordDrift(m fleet.Member, id bundle.ID, changes bundle.ChangeSet) {
	if changes.Count(bundle.Created)+changes.Count(bundle.Configured)+changes.Count(bundle.Deleted) == 0 {
		return
	}
	summary := &configv1beta1.ClusterSummary{}
	if err := t.hub.Get(context.Background(), types.NamespacedName{Namespace: m.Namespace, Name: id.RequestorName}, summary, client.UnsafeDisableDeepCopy); err != nil {
		// The summary is deleted.
		return
	}
	t.drifts.WithLabelValues(append([]string{string(m.Type), m.Namespace, m.Name, id.Feature}, profileLabelValues(summary)...)...).Inc()
}

// countingTransport counts the calls of Deliver and Withdraw.
type countingTransport struct {
	deliver.Transport
	operations *prometheus.CounterVec
}

var _ deliver.Transport = countingTransport{}

// Deliver counts the operation and calls Deliver.
func (c countingTransport) Deliver(ctx context.Context, m fleet.Member, b bundle.Bundle) (bundle.Report, error) {
	c.operations.WithLabelValues(string(m.Type), m.Namespace, m.Name, b.ID.Feature).Inc()
	return c.Transport.Deliver(ctx, m, b)
}

// Withdraw counts the operation and calls Withdraw.
func (c countingTransport) Withdraw(ctx context.Context, m fleet.Member, w bundle.Withdrawal) (bool, error) {
	c.operations.WithLabelValues(string(m.Type), m.Namespace, m.Name, w.ID.Feature).Inc()
	return c.Transport.Withdraw(ctx, m, w)
}
