package summaries

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// TestMemberChanged updates clusters. The periodic updates of an agent must not cause reconciles.
func TestMemberChanged(t *testing.T) {
	t.Parallel()
	sveltos := func(change func(*libv1beta1.SveltosCluster)) client.Object {
		c := &libv1beta1.SveltosCluster{Status: libv1beta1.SveltosClusterStatus{Version: "v1.34.0", APIVersions: []string{"v1"}, Ready: true}}
		change(c)
		return c
	}
	karmada := func(change func(*clusterv1alpha1.Cluster)) client.Object {
		c := &clusterv1alpha1.Cluster{Status: clusterv1alpha1.ClusterStatus{KubernetesVersion: "v1.34.0"}}
		change(c)
		return c
	}
	for name, c := range map[string]struct {
		after client.Object
		want  bool
	}{
		"resource version": {sveltos(func(c *libv1beta1.SveltosCluster) { c.ResourceVersion = "2" }), false},
		"heartbeat":        {sveltos(func(c *libv1beta1.SveltosCluster) { c.Status.AgentLastReportTime = ptr.To(metav1.Now()) }), false},
		"failed contacts":  {sveltos(func(c *libv1beta1.SveltosCluster) { c.Status.ConnectionFailures = 2 }), false},
		"message of a check": {sveltos(func(c *libv1beta1.SveltosCluster) {
			c.Status.AgentCheckFailures, c.Status.AgentCheckMessage = 1, "attack"
		}), false},
		"conditions":  {sveltos(func(c *libv1beta1.SveltosCluster) { c.Status.Conditions = []metav1.Condition{{Type: "Ready"}} }), false},
		"version":     {sveltos(func(c *libv1beta1.SveltosCluster) { c.Status.Version = "v1.35.0" }), true},
		"apiVersions": {sveltos(func(c *libv1beta1.SveltosCluster) { c.Status.APIVersions = []string{"apps/v1", "v1"} }), true},
		"ready":       {sveltos(func(c *libv1beta1.SveltosCluster) { c.Status.Ready = false }), true},
		"labels":      {sveltos(func(c *libv1beta1.SveltosCluster) { c.Labels = map[string]string{"env": "test"} }), true},
		"paused":      {sveltos(func(c *libv1beta1.SveltosCluster) { c.Spec.Paused = true }), true},
	} {
		if got := memberChanged().Update(event.UpdateEvent{ObjectOld: sveltos(func(*libv1beta1.SveltosCluster) {}), ObjectNew: c.after}); got != c.want {
			t.Errorf("SveltosCluster, %s: got %v, want %v", name, got, c.want)
		}
	}
	for name, c := range map[string]struct {
		after client.Object
		want  bool
	}{
		"nodes":   {karmada(func(c *clusterv1alpha1.Cluster) { c.Status.NodeSummary = &clusterv1alpha1.NodeSummary{TotalNum: 3} }), false},
		"version": {karmada(func(c *clusterv1alpha1.Cluster) { c.Status.KubernetesVersion = "v1.35.0" }), true},
		"labels":  {karmada(func(c *clusterv1alpha1.Cluster) { c.Labels = map[string]string{"env": "test"} }), true},
	} {
		if got := memberChanged().Update(event.UpdateEvent{ObjectOld: karmada(func(*clusterv1alpha1.Cluster) {}), ObjectNew: c.after}); got != c.want {
			t.Errorf("Cluster, %s: got %v, want %v", name, got, c.want)
		}
	}
}

// TestReportChanged updates a group. Only the hub writes its metadata.
func TestReportChanged(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(*libv1beta1.ConfigurationGroup)
		want   bool
	}{
		"annotation": {func(g *libv1beta1.ConfigurationGroup) { g.Annotations = map[string]string{"a": "b"} }, false},
		"spec":       {func(g *libv1beta1.ConfigurationGroup) { g.Generation = 2 }, true},
		"status":     {func(g *libv1beta1.ConfigurationGroup) { g.Status.DeploymentStatus = libv1beta1.FeatureStatusFailed }, true},
	} {
		after := &libv1beta1.ConfigurationGroup{ObjectMeta: metav1.ObjectMeta{Generation: 1, ResourceVersion: "2"}}
		c.change(after)
		before := &libv1beta1.ConfigurationGroup{ObjectMeta: metav1.ObjectMeta{Generation: 1, ResourceVersion: "1"}}
		if got := reportChanged().Update(event.UpdateEvent{ObjectOld: before, ObjectNew: after}); got != c.want {
			t.Errorf("%s: got %v, want %v", name, got, c.want)
		}
	}
}
