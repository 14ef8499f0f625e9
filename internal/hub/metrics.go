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

// metricsNamespace begins the names of the metrics of the Sveltos surface.
const metricsNamespace = "projectsveltos"

// scrapeLimit is how long one look at the fleet may take; it only reads caches.
const scrapeLimit = 5 * time.Second

// clusterLabels and profileLabels are those of the Sveltos surface, in the order in which values are given.
func clusterLabels(more ...string) []string {
	return append([]string{"cluster_type", "cluster_namespace", "cluster_name"}, more...)
}

func profileLabels() []string { return []string{"profile_kind", "profile_namespace", "profile_name"} }

func desc(name, help string, labels []string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(metricsNamespace, "", name), help, labels, nil)
}

// census tells how the fleet is at the moment of a scrape, from what the API server knows: it keeps nothing itself, so that what is gone
// from the hub is gone from the metrics.
type census struct {
	hub   client.Reader
	shard fleet.Shard
	// leads is closed while this hub has the lead; one that waits for it tells nothing, or everything would be counted twice.
	leads <-chan struct{}
	// contacts returns how many looks at a Cluster in push mode have failed in a row; ok is false if nobody has looked. It is set before the
	// hub leads.
	contacts func(cluster string) (failed int, ok bool)

	connectivity, version, failures, heartbeat *prometheus.Desc
	matching, consecutive, success             *prometheus.Desc
}

var _ prometheus.Collector = (*census)(nil)

func newCensus(hub client.Reader, shard fleet.Shard, leads <-chan struct{}) *census {
	perFeature := append(clusterLabels("feature"), profileLabels()...)
	return &census{
		hub: hub, shard: shard, leads: leads,
		connectivity: desc("cluster_connectivity_status", "Whether a cluster is connected: 0 if it is, 1 if it is not.", clusterLabels()),
		version:      desc("kubernetes_version_info", "The Kubernetes version of a cluster, always 1.", clusterLabels("kubernetes_version")),
		failures:     desc("connection_failures", "Contacts with a cluster that failed in a row.", clusterLabels()),
		heartbeat:    desc("agent_last_heartbeat_timestamp_seconds", "When the agent of a pull-mode cluster last reported, in Unix time.", clusterLabels()),
		matching:     desc("matching_clusters", "How many clusters match a profile.", profileLabels()),
		consecutive:  desc("reconcile_consecutive_failures", "Attempts at a feature on a cluster that failed in a row.", perFeature),
		success:      desc("reconcile_last_success_timestamp_seconds", "When a cluster last equalled what a profile wants of a feature, in Unix time.", perFeature),
	}
}

// Describe names the metrics.
func (c *census) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.connectivity, c.version, c.failures, c.heartbeat, c.matching, c.consecutive, c.success} {
		to <- d
	}
}

// Collect looks at the fleet.
func (c *census) Collect(to chan<- prometheus.Metric) {
	select {
	case <-c.leads:
	default:
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), scrapeLimit)
	defer cancel()
	clusters, err := fleet.Objects(ctx, c.hub)
	if err != nil {
		to <- prometheus.NewInvalidMetric(c.connectivity, err)
		return
	}
	known := make(map[fleet.ID]bool, len(clusters))
	for _, cluster := range clusters {
		if c.shard.Serves(cluster) {
			known[c.cluster(ctx, to, cluster)] = true
		}
	}
	var summaries configv1beta1.ClusterSummaryList
	if err := c.hub.List(ctx, &summaries, client.UnsafeDisableDeepCopy); err != nil {
		to <- prometheus.NewInvalidMetric(c.consecutive, err)
		return
	}
	for i := range summaries.Items {
		if known[match.Target(&summaries.Items[i])] {
			c.summary(to, &summaries.Items[i])
		}
	}
	if c.shard.IsDefault() {
		c.profiles(ctx, to)
	}
}

func gauge(to chan<- prometheus.Metric, d *prometheus.Desc, value float64, labels ...string) {
	to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
}

// cluster tells how one cluster is, and returns which one that is.
func (c *census) cluster(ctx context.Context, to chan<- prometheus.Metric, cluster client.Object) fleet.ID {
	member := fleet.FromObject(cluster)
	of := []string{string(member.Type), member.Namespace, member.Name}
	if version := fleet.PlainVersion(member.KubernetesVersion); version != "" {
		gauge(to, c.version, 1, append(of, version)...)
	}
	connected := member.Ready && !member.Down
	switch cluster := cluster.(type) {
	case *libv1beta1.SveltosCluster:
		connected = cluster.Status.ConnectionStatus == libv1beta1.ConnectionHealthy
		c.sveltos(to, cluster.Status, of)
	case *clusterv1alpha1.Cluster:
		c.karmada(ctx, to, member, of)
	}
	disconnected := 1.0
	if connected {
		disconnected = 0
	}
	gauge(to, c.connectivity, disconnected, of...)
	return member.ID()
}

// sveltos tells what the status of a SveltosCluster counts.
func (c *census) sveltos(to chan<- prometheus.Metric, status libv1beta1.SveltosClusterStatus, of []string) {
	gauge(to, c.failures, float64(status.ConnectionFailures), of...)
	if last := status.AgentLastReportTime; last != nil {
		gauge(to, c.heartbeat, float64(last.Unix()), of...)
	}
}

// karmada tells the same of a Cluster, whose status does not: the hub counts its own contacts, and an agent renews its Lease.
func (c *census) karmada(ctx context.Context, to chan<- prometheus.Metric, member fleet.Member, of []string) {
	if member.Mode == fleet.Push {
		if failed, ok := c.contacts(member.Name); ok {
			gauge(to, c.failures, float64(failed), of...)
		}
		return
	}
	lease := &coordinationv1.Lease{}
	if err := c.hub.Get(ctx, client.ObjectKey{Namespace: member.DeliveryNamespace, Name: member.Name}, lease); client.IgnoreNotFound(err) != nil {
		to <- prometheus.NewInvalidMetric(c.heartbeat, err)
		return
	}
	if renewed := lease.Spec.RenewTime; renewed != nil {
		gauge(to, c.heartbeat, float64(renewed.Unix()), of...)
	}
}

func (c *census) summary(to chan<- prometheus.Metric, summary *configv1beta1.ClusterSummary) {
	for _, feature := range summary.Status.FeatureSummaries {
		of := append(featureOf(summary, feature.FeatureID), profileOf(summary)...)
		gauge(to, c.consecutive, float64(feature.ConsecutiveFailures), of...)
		if feature.LastAppliedTime != nil {
			gauge(to, c.success, float64(feature.LastAppliedTime.Unix()), of...)
		}
	}
}

func (c *census) profiles(ctx context.Context, to chan<- prometheus.Metric) {
	var everywhere configv1beta1.ClusterProfileList
	var confined configv1beta1.ProfileList
	for _, list := range []client.ObjectList{&everywhere, &confined} {
		if err := c.hub.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			to <- prometheus.NewInvalidMetric(c.matching, err)
			return
		}
	}
	for i := range everywhere.Items {
		profile := &everywhere.Items[i]
		gauge(to, c.matching, float64(len(profile.Status.MatchingClusters)), configv1beta1.ClusterProfileKind, "", profile.Name)
	}
	for i := range confined.Items {
		profile := &confined.Items[i]
		gauge(to, c.matching, float64(len(profile.Status.MatchingClusters)), configv1beta1.ProfileKind, profile.Namespace, profile.Name)
	}
}

// featureOf returns the values of clusterLabels("feature").
func featureOf(summary *configv1beta1.ClusterSummary, feature libv1beta1.FeatureID) []string {
	spec := summary.Spec
	return []string{string(spec.ClusterType), spec.ClusterNamespace, spec.ClusterName, string(feature)}
}

// profileOf returns the values of profileLabels; they are empty where nobody owns summary.
func profileOf(summary *configv1beta1.ClusterSummary) []string {
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
