package bench

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/localkube"
)

const (
	// driftObjects is the number of objects that drift. Each one drifts once per measurement, since the correction of an
	// object that drifts repeatedly is delayed.
	driftObjects   = 50
	driftNamespace = "drift"
)

const driftProfile = `
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: drift}
spec:
  clusterSelector: {matchLabels: {env: drift}}
  policyRefs:
  - {kind: ConfigMap, namespace: default, name: drift}
`

// BenchmarkDriftToCorrected measures the time from the response to an edit or a deletion of an object on a member to
// the watch event of its correction.
func BenchmarkDriftToCorrected(b *testing.B) {
	for mode, member := range map[string]func(*testBench) *localkube.Plane{
		"pull": func(b *testBench) *localkube.Plane { return b.startPullMember("member", "env=drift") },
		"push": func(b *testBench) *localkube.Plane { return b.startPushMember("member", "env=drift") },
	} {
		b.Run(mode, func(b *testing.B) {
			bd := newTestBench(b)
			plane := member(bd)
			source := &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "drift"},
				Data:       map[string]string{"objects.yaml": driftContent()},
			}
			if err := bd.hub.Create(b.Context(), source); err != nil {
				b.Fatal(err)
			}
			corrected := bd.watchCorrections(plane)
			bd.apply(driftProfile)
			for range driftObjects {
				bd.awaitCorrection(corrected)
			}
			for action, drift := range map[string]func(client.Client, *corev1.ConfigMap) error{
				"edit": func(c client.Client, obj *corev1.ConfigMap) error {
					return c.Patch(b.Context(), obj, client.RawPatch("application/merge-patch+json", []byte(`{"data":{"text":"edited"}}`)))
				},
				"delete": func(c client.Client, obj *corev1.ConfigMap) error { return c.Delete(b.Context(), obj) },
			} {
				times := bd.measureCorrections(bd.client(plane), corrected, drift) // once, and not b.N times
				b.Run(action, func(b *testing.B) {
					measured := *bd
					measured.B = b
					b.ReportMetric(0, "ns/op")
					measured.reportQuantiles(times)
				})
			}
		})
	}
}

// measureCorrections makes each object drift once, and returns the times until the corrections.
func (b *testBench) measureCorrections(memberClient client.Client, corrected <-chan string, drift func(client.Client, *corev1.ConfigMap) error) []time.Duration {
	b.Helper()
	var times []time.Duration
	for i := range driftObjects {
		obj := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: driftNamespace, Name: driftName(i)}}
		if err := drift(memberClient, obj); err != nil {
			b.Fatal(err)
		}
		began := time.Now()
		if name := b.awaitCorrection(corrected); name != obj.Name {
			b.Fatalf("%s was corrected, want %s", name, obj.Name)
		}
		times = append(times, time.Since(began))
	}
	return times
}

func driftName(i int) string { return fmt.Sprintf("object-%d", i) }

func driftContent() string {
	var objects strings.Builder
	for i := range driftObjects {
		fmt.Fprintf(&objects, "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: %s, name: %s}\ndata: {text: applied}\n", driftNamespace, driftName(i))
	}
	return objects.String()
}

// watchCorrections returns a channel that gets the name of an object on a member with each event in which it is
// unchanged from the applied one.
func (b *testBench) watchCorrections(plane *localkube.Plane) <-chan string {
	b.Helper()
	names := make(chan string, driftObjects)
	b.watch(names, plane, &corev1.ConfigMapList{}, driftNamespace, func(event watch.Event) string {
		obj, ok := event.Object.(*corev1.ConfigMap)
		if !ok || event.Type == watch.Deleted || obj.Data["text"] != "applied" {
			return ""
		}
		return obj.Name
	})
	return names
}

func (b *testBench) awaitCorrection(corrected <-chan string) string {
	b.Helper()
	select {
	case name := <-corrected:
		return name
	case <-time.After(waitTimeout):
		b.Fatalf("no correction within %s", waitTimeout)
		return ""
	}
}
