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

// loadObjects is how many objects an agent gets.
const loadObjects = 500

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
		bd.provisioned()
	}
	b.ReportMetric(bd.rss(pid), fmt.Sprintf("after-%d-objects-MiB", loadObjects))
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

// provisioned waits until the only summary is provisioned.
func (b *bed) provisioned() {
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
