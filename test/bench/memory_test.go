package bench

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// loadObjects is the number of objects of an agent under load.
const loadObjects = 500

// BenchmarkAgentMemory measures the memory and the processor use of an idle agent, and its memory after it applied 500
// objects.
func BenchmarkAgentMemory(b *testing.B) {
	bd := newTestBench(b)
	bd.startPullMember("memory", "env=memory")
	pid := bd.agentPID("memory")
	b.ReportMetric(bd.residentMemory(pid), "idle-MiB")
	b.ReportMetric(bd.millicores(pid), "idle-millicores")
	b.ReportMetric(0, "ns/op") // the time has no meaning
	bd.createSource("load", loadObjects)
	for range b.N {
		bd.apply(profileOf("load", "memory"))
		bd.awaitProvisioned()
	}
	b.ReportMetric(bd.residentMemory(pid), fmt.Sprintf("after-%d-objects-MiB", loadObjects))
}

// createSource creates a ConfigMap on the hub with this number of objects.
func (b *testBench) createSource(name string, objects int) {
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

// awaitProvisioned waits until the only summary is provisioned.
func (b *testBench) awaitProvisioned() {
	b.Helper()
	b.eventually("the profile is provisioned", func(ctx context.Context) error {
		var list configv1beta1.ClusterSummaryList
		if err := b.hub.List(ctx, &list); err != nil {
			return err
		}
		if len(list.Items) != 1 {
			return fmt.Errorf("there are %d summaries", len(list.Items))
		}
		if features := list.Items[0].Status.FeatureSummaries; len(features) != 1 || features[0].Status != libv1beta1.FeatureStatusProvisioned {
			return fmt.Errorf("it has the features %v", features)
		}
		return nil
	})
}
