package hub

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/match"
)

// metricsNamespace is the prefix of the names of Sveltos metrics.
const metricsNamespace = "projectsveltos"

// scrapeTimeout is the timeout of a scrape, which only reads caches.
const scrapeTimeout = 5 * time.Second

// clusterLabels and profileLabels return the label names of Sveltos metrics, in the order that featureLabelValues and
// profileLabelValues use.
func clusterLabels(more ...string) []string {
	return append([]string{"cluster_type", "cluster_namespace", "cluster_name"}, more...)
}

func profileLabels() []string { return []string{"profile_kind", "profile_namespace", "profile_name"} }

func newDesc(name, help string, labels []string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(metricsNamespace, "", name), help, labels, nil)
}

// metricsCollector computes metrics from the objects in the cache when it is scraped. So deleted objects have no
// metrics.
type metricsCollector struct {
	hub   client.Reader
	shard fleet.Shard
	// elected is closed when this hub becomes the leader. Before that, the collector sends no metrics.
	elected <-chan struct{}
	// failedContacts returns the number of consecutive failed requests to a Cluster in push mode; ok is false if there was
	// no request. addKarmadaControllers sets it before the manager starts.
	failedContacts func(cluster string) (failed int, ok bool)

	connectivity, version, failures, heartbeat *prometheus.Desc
	matching, consecutive, success             *prometheus.Desc
}

var _ prometheus.Collector = (*metricsCollector)(nil)

func newMetricsCollector(hub client.Reader, shard fleet.Shard, elected <-chan struct{}) *metricsCollector {
	perFeature := append(clusterLabels("feature"), profileLabels()...)
	return &metricsCollector{
		hub: hub, shard: shard, elected: elected,
		connectivity: newDesc("cluster_connectivity_status", "Whether a cluster is connected: 0 if it is, 1 if not.", clusterLabels()),
		version:      newDesc("kubernetes_version_info", "The Kubernetes version of a cluster, always 1.", clusterLabels("kubernetes_version")),
		failures:     newDesc("connection_failures", "Number of consecutive failed requests to a cluster.", clusterLabels()),
		heartbeat:    newDesc("agent_last_heartbeat_timestamp_seconds", "Unix time of the last report of a pull-mode cluster's agent.", clusterLabels()),
		matching:     newDesc("matching_clusters", "Number of clusters that match a profile.", profileLabels()),
		consecutive:  newDesc("reconcile_consecutive_failures", "Number of consecutive failed attempts to deploy a feature on a cluster.", perFeature),
		success:      newDesc("reconcile_last_success_timestamp_seconds", "Unix time when a feature of a profile was last in sync on a cluster.", perFeature),
	}
}

// Describe implements prometheus.Collector.
func (c *metricsCollector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.connectivity, c.version, c.failures, c.heartbeat, c.matching, c.consecutive, c.success} {
		to <- d
	}
}

// Collect implements prometheus.Collector.
func (c *metricsCollector) Collect(to chan<- prometheus.Metric) {
	select {
	case <-c.elected:
	default:
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	clusters, err := fleet.Objects(ctx, c.hub)
	if err != nil {
		to <- prometheus.NewInvalidMetric(c.connectivity, err)
		return
	}
	served := make(map[fleet.ID]bool, len(clusters))
	for _, cluster := range clusters {
		if c.shard.Serves(cluster) {
			served[c.collectCluster(ctx, to, cluster)] = true
		}
	}
	var summaries configv1beta1.ClusterSummaryList
	if err := c.hub.List(ctx, &summaries, client.UnsafeDisableDeepCopy); err != nil {
		to <- prometheus.NewInvalidMetric(c.consecutive, err)
		return
	}
	for i := range summaries.Items {
		if served[match.MemberID(&summaries.Items[i])] {
			c.collectSummary(to, &summaries.Items[i])
		}
	}
	if c.shard.IsDefault() {
		c.collectProfiles(ctx, to)
	}
}

func sendGauge(to chan<- prometheus.Metric, d *prometheus.Desc, value float64, labels ...string) {
	to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
}

// collectCluster sends the metrics of one cluster and returns its ID.
func (c *metricsCollector) collectCluster(ctx context.Context, to chan<- prometheus.Metric, cluster client.Object) fleet.ID {
	member := fleet.FromObject(cluster)
	labels := []string{string(member.Type), member.Namespace, member.Name}
	if version := fleet.PlainVersion(member.KubernetesVersion); version != "" {
		sendGauge(to, c.version, 1, append(labels, version)...)
	}
	connected := member.Ready && !member.Down
	switch cluster := cluster.(type) {
	case *libv1beta1.SveltosCluster:
		connected = cluster.Status.ConnectionStatus == libv1beta1.ConnectionHealthy
		c.collectSveltosStatus(to, cluster.Status, labels)
	case *clusterv1alpha1.Cluster:
		c.collectKarmadaContact(ctx, to, member, labels)
	}
	disconnected := 1.0
	if connected {
		disconnected = 0
	}
	sendGauge(to, c.connectivity, disconnected, labels...)
	return member.ID()
}

// collectSveltosStatus sends the metrics from the status of a SveltosCluster.
func (c *metricsCollector) collectSveltosStatus(to chan<- prometheus.Metric, status libv1beta1.SveltosClusterStatus, labels []string) {
	sendGauge(to, c.failures, float64(status.ConnectionFailures), labels...)
	if last := status.AgentLastReportTime; last != nil {
		sendGauge(to, c.heartbeat, float64(last.Unix()), labels...)
	}
}

// collectKarmadaContact sends the metrics that are not in the status of a Cluster: the number of failed requests (push
// mode), or the time when the agent renewed its Lease (pull mode).
func (c *metricsCollector) collectKarmadaContact(ctx context.Context, to chan<- prometheus.Metric, member fleet.Member, labels []string) {
	if member.Mode == fleet.Push {
		if failed, ok := c.failedContacts(member.Name); ok {
			sendGauge(to, c.failures, float64(failed), labels...)
		}
		return
	}
	lease := &coordinationv1.Lease{}
	if err := c.hub.Get(ctx, client.ObjectKey{Namespace: member.DeliveryNamespace, Name: member.Name}, lease); client.IgnoreNotFound(err) != nil {
		to <- prometheus.NewInvalidMetric(c.heartbeat, err)
		return
	}
	if renewed := lease.Spec.RenewTime; renewed != nil {
		sendGauge(to, c.heartbeat, float64(renewed.Unix()), labels...)
	}
}

func (c *metricsCollector) collectSummary(to chan<- prometheus.Metric, summary *configv1beta1.ClusterSummary) {
	for _, feature := range summary.Status.FeatureSummaries {
		labels := append(featureLabelValues(summary, feature.FeatureID), profileLabelValues(summary)...)
		sendGauge(to, c.consecutive, float64(feature.ConsecutiveFailures), labels...)
		if feature.LastAppliedTime != nil {
			sendGauge(to, c.success, float64(feature.LastAppliedTime.Unix()), labels...)
		}
	}
}

func (c *metricsCollector) collectProfiles(ctx context.Context, to chan<- prometheus.Metric) {
	var clusterProfiles configv1beta1.ClusterProfileList
	var namespacedProfiles configv1beta1.ProfileList
	for _, list := range []client.ObjectList{&clusterProfiles, &namespacedProfiles} {
		if err := c.hub.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			to <- prometheus.NewInvalidMetric(c.matching, err)
			return
		}
	}
	for i := range clusterProfiles.Items {
		profile := &clusterProfiles.Items[i]
		sendGauge(to, c.matching, float64(len(profile.Status.MatchingClusters)), configv1beta1.ClusterProfileKind, "", profile.Name)
	}
	for i := range namespacedProfiles.Items {
		profile := &namespacedProfiles.Items[i]
		sendGauge(to, c.matching, float64(len(profile.Status.MatchingClusters)), configv1beta1.ProfileKind, profile.Namespace, profile.Name)
	}
}

// featureLabelValues returns the values for clusterLabels("feature").
func featureLabelValues(summary *configv1beta1.ClusterSummary, feature libv1beta1.FeatureID) []string {
	spec := summary.Spec
	return []string{string(spec.ClusterType), spec.ClusterNamespace, spec.ClusterName, string(feature)}
}

// profileLabelValues returns the values for profileLabels. They are "" if summary has no owner.
func profileLabelValues(summary *configv1beta1.ClusterSummary) []string {
	owner := metav1.GetControllerOf(summary)
	switch {
	case owner == nil:
		return []string{"", "", ""}
	case owner.Kind == configv1beta1.ProfileKind:
		return []string{owner.Kind, summary.Namespace, owner.Name}
	default:
		return []string{owner.Kind, "", owner.Name}
	}
}
