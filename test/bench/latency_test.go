package bench

import (
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/localkube"
)

// edits is the number of measured changes, one after the other.
const edits = 50

const latencyProfile = `
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: latency}
spec:
  clusterSelector: {matchLabels: {env: latency}}
  policyRefs:
  - {kind: ConfigMap, namespace: default, name: latency}
`

// latencyKind is a kind of object whose changes are measured.
type latencyKind struct {
	list client.ObjectList
	// manifest is the object, with a verb for its text.
	manifest string
}

func configMapLatency() latencyKind {
	return latencyKind{&corev1.ConfigMapList{}, `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: measured, annotations: {text: %[1]q}}
data: {text: %[1]q}
`}
}

func deploymentLatency() latencyKind {
	return latencyKind{&appsv1.DeploymentList{}, `
apiVersion: apps/v1
kind: Deployment
metadata: {namespace: default, name: measured, annotations: {text: %[1]q}}
spec:
  selector: {matchLabels: {app: measured}}
  template:
    metadata: {labels: {app: measured}}
    spec: {containers: [{name: main, image: "example.com/measured:1", env: [{name: TEXT, value: %[1]q}]}]}
`}
}

// BenchmarkChangeToApplied measures the time from a change of a ConfigMap on the hub, which a profile refers to, to the
// changed object on the member.
func BenchmarkChangeToApplied(b *testing.B) {
	for mode, member := range map[string]func(*testBench) *localkube.Plane{
		"pull": func(b *testBench) *localkube.Plane { return b.startPullMember("member", "env=latency") },
		"push": func(b *testBench) *localkube.Plane { return b.startPushMember("member", "env=latency") },
	} {
		b.Run(mode, func(b *testing.B) {
			bd := newTestBench(b)
			times := bd.measureEdits(configMapLatency(), []*localkube.Plane{member(bd)}) // once, and not b.N times
			b.ReportMetric(0, "ns/op")
			bd.reportQuantiles(times)
		})
	}
}

// BenchmarkChangeOnTenMembers measures the same with ten pull members, each with an agent. It also counts the requests
// to the hub for each change and member: Towline's requests that change objects, and all reads, without heartbeats.
func BenchmarkChangeOnTenMembers(b *testing.B) {
	bd := newTestBench(b)
	var members []*localkube.Plane
	for i := range 10 {
		members = append(members, bd.startPullMember(fmt.Sprintf("member%d", i), "env=latency"))
	}
	for name, kind := range map[string]latencyKind{"ConfigMap": configMapLatency(), "Deployment": deploymentLatency()} {
		before, err := bd.plane.CountRequests(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		times := bd.measureEdits(kind, members)
		after, err := bd.plane.CountRequests(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		writes := after.Since(before).Select(func(r localkube.Request) bool {
			return r.IsWrite() && (r.Resource == "events" || strings.HasSuffix(r.Group, ".projectsveltos.io"))
		})
		reads := after.Since(before).Select(func(r localkube.Request) bool { return r.IsRead() && r.Resource != "leases" })
		b.Run(name, func(b *testing.B) {
			measured := *bd
			measured.B = b
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(writes.Total())/float64(len(times)), "writes/change")
			b.ReportMetric(float64(reads.Total())/float64(len(times)), "reads/change")
			b.Logf("reads of %d changes:\n%s", len(times), reads)
			measured.reportQuantiles(times)
		})
	}
}

// measureEdits deploys an object of kind to all members, changes it repeatedly, and returns the times from each change
// until it was on each member. At the end it deletes the profile and the content.
func (b *testBench) measureEdits(kind latencyKind, members []*localkube.Plane) []time.Duration {
	b.Helper()
	texts := make(chan string, len(members))
	for _, member := range members {
		var last string
		b.watch(texts, member, kind.list, "default", func(event watch.Event) string {
			obj, ok := event.Object.(client.Object)
			if !ok || obj.GetName() != "measured" || obj.GetAnnotations()["text"] == last {
				return ""
			}
			last = obj.GetAnnotations()["text"]
			return last
		})
	}
	source := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "latency"}}
	content := func(i int) string {
		text := fmt.Sprintf("revision %d", i)
		source.Data = map[string]string{"object.yaml": fmt.Sprintf(kind.manifest, text)}
		return text
	}
	text := content(0)
	if err := b.hub.Create(b.Context(), source); err != nil {
		b.Fatal(err)
	}
	b.apply(latencyProfile)
	b.awaitTexts(texts, text, len(members), time.Now())
	var times []time.Duration
	for i := range edits {
		text := content(i + 1)
		began := time.Now()
		if err := b.hub.Update(b.Context(), source); err != nil {
			b.Fatal(err)
		}
		times = append(times, b.awaitTexts(texts, text, len(members), began)...)
	}
	b.run(b.plane, "", "kubectl", "delete", "clusterprofile", "latency")
	b.run(b.plane, "", "kubectl", "delete", "configmap", "latency")
	return times
}

// awaitTexts waits until a text has come from n members, and returns the times since began.
func (b *testBench) awaitTexts(texts <-chan string, want string, n int, began time.Time) []time.Duration {
	b.Helper()
	deadline := time.After(waitTimeout)
	var times []time.Duration
	for len(times) < n {
		select {
		case text := <-texts:
			if text == want {
				times = append(times, time.Since(began))
			}
		case <-deadline:
			b.Fatalf("%q arrived on %d of %d members within %s:\n%s", want, len(times), n, waitTimeout,
				b.run(b.plane, "", "kubectl", "get", "clustersummaries", "-A", "-o", "yaml"))
		}
	}
	return times
}
