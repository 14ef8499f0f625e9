package bench

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
)

const (
	// loadObjects is how many objects an agent gets.
	loadObjects = 500
	// standIns is how many members without a cluster the hub's memory is measured with.
	standIns = 100
)

// BenchmarkAgentMemory measures the memory and the use of processors of an agent that has nothing to do, and its memory
// after it applied 500 objects.
func BenchmarkAgentMemory(b *testing.B) {
	bd := newBed(b)
	bd.pull("memory", "env=memory")
	pid := bd.agentPID("memory")
	b.ReportMetric(bd.rss(pid), "idle-MiB")
	b.ReportMetric(bd.millicores(pid), "idle-millicores")
	b.ReportMetric(0, "ns/op") // this is not about time
	bd.createSource("load", loadObjects)
	for range b.N {
		bd.apply(profileOf("load", "memory"))
		bd.provisioned(1)
	}
	b.ReportMetric(bd.rss(pid), fmt.Sprintf("after-%d-objects-MiB", loadObjects))
}

// BenchmarkHubMemory measures what a pull member costs the hub's process in memory: members are stand-ins that say at
// once that they have what they should have.
func BenchmarkHubMemory(b *testing.B) {
	bd := newBed(b)
	idle := bd.rss(bd.pid)
	b.ReportMetric(idle, "idle-MiB")
	b.ReportMetric(0, "ns/op") // this is not about time
	bd.createSource("crowd", 10)
	bd.answerGroups()
	for i := range standIns {
		bd.standIn(fmt.Sprintf("stand-in-%03d", i))
	}
	for range b.N {
		bd.apply(profileOf("crowd", "crowd"))
		bd.provisioned(standIns)
	}
	b.ReportMetric((bd.rss(bd.pid)-idle)/standIns, "MiB/member")
}

// createSource creates a ConfigMap on the hub that holds that many objects.
func (b *bed) createSource(name string, objects int) {
	b.Helper()
	var text strings.Builder
	for i := range objects {
		fmt.Fprintf(&text, "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: %s, name: cm-%d}\ndata: {text: object %d}\n", name, i, i)
	}
	source := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Data: map[string]string{"objects.yaml": text.String()}}
	if err := b.hub.Create(b.Context(), source); err != nil {
		b.Fatal(err)
	}
}

func profileOf(source, env string) string {
	return fmt.Sprintf(`
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: %[1]s}
spec:
  clusterSelector: {matchLabels: {env: %[2]s}}
  policyRefs:
  - {kind: ConfigMap, namespace: default, name: %[1]s}
`, source, env)
}

// provisioned waits until that many summaries are provisioned.
func (b *bed) provisioned(want int) {
	b.Helper()
	b.eventually("the profile is provisioned", func(ctx context.Context) error {
		var list configv1beta1.ClusterSummaryList
		if err := b.hub.List(ctx, &list); err != nil {
			return err
		}
		got := 0
		for _, summary := range list.Items {
			if features := summary.Status.FeatureSummaries; len(features) == 1 && features[0].Status == libv1beta1.FeatureStatusProvisioned {
				got++
			}
		}
		if got != want {
			return fmt.Errorf("%d summaries of %d are provisioned", got, want)
		}
		return nil
	})
}

// standIn registers a pull member and says of it what its agent would say.
func (b *bed) standIn(name string) {
	b.Helper()
	request := join.PullRequest{Request: join.Request{Namespace: name, Name: name, Labels: map[string]string{"env": "crowd"}}}
	if err := join.RegisterPull(b.Context(), b.plane.Config, request, &bytes.Buffer{}); err != nil {
		b.Fatal(err)
	}
	key := client.ObjectKey{Namespace: name, Name: name}
	var lease coordinationv1.Lease
	if err := b.hub.Get(b.Context(), key, &lease); err != nil {
		b.Fatal(err)
	}
	// The benchmark is over before the first heartbeat is missed.
	lease.Spec.RenewTime = &metav1.MicroTime{Time: time.Now().Add(waitTimeout)}
	if err := b.hub.Update(b.Context(), &lease); err != nil {
		b.Fatal(err)
	}
	var cluster libv1beta1.SveltosCluster
	if err := b.hub.Get(b.Context(), key, &cluster); err != nil {
		b.Fatal(err)
	}
	before := cluster.DeepCopy()
	cluster.Status.Ready, cluster.Status.Version = true, "v1.36.3"
	cluster.Status.APIVersions = []string{"v1", "v1/ConfigMap", "apps/v1", "apps/v1/Deployment"}
	if err := b.hub.Status().Patch(b.Context(), &cluster, client.MergeFrom(before)); err != nil {
		b.Fatal(err)
	}
}

// answerGroups answers every group as an agent does that has applied it.
func (b *bed) answerGroups() {
	b.Helper()
	b.watch(nil, b.plane, &libv1beta1.ConfigurationGroupList{}, "", func(event watch.Event) string {
		if group, ok := event.Object.(*libv1beta1.ConfigurationGroup); ok && group.Status.ObservedGeneration != group.Generation {
			// A group that changed meanwhile comes again.
			_ = b.hub.Status().Patch(b.Context(), answered(group), client.MergeFrom(group))
		}
		return ""
	})
}

func answered(group *libv1beta1.ConfigurationGroup) *libv1beta1.ConfigurationGroup {
	now := metav1.Now()
	group = group.DeepCopy()
	group.Status.DeploymentStatus = libv1beta1.FeatureStatusProvisioned
	group.Status.ObservedGeneration = group.Generation
	group.Status.ObservedRequestorHash = group.Spec.RequestorHash
	group.Status.DeployedGroupVersionKind = []string{"ConfigMap.v1."}
	group.Status.LastAppliedTime = &now
	return group
}
