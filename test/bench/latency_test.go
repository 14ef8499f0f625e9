package bench

import (
	"context"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// edits is how many changes are measured in a row.
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

// BenchmarkChangeToApplied measures the time from a change of a ConfigMap on the hub, which a profile points at, to the
// changed object on the member.
func BenchmarkChangeToApplied(b *testing.B) {
	for mode, member := range map[string]func(*bed) *localkube.Plane{
		"pull": func(b *bed) *localkube.Plane { return b.pull("member", "env=latency") },
		"push": func(b *bed) *localkube.Plane { return b.push("member", "env=latency") },
	} {
		b.Run(mode, func(b *testing.B) {
			bd := newBed(b)
			texts := bd.follow(member(bd))
			source := &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "latency"},
				Data:       map[string]string{"object.yaml": latencyObject(0)},
			}
			if err := bd.hub.Create(b.Context(), source); err != nil {
				b.Fatal(err)
			}
			bd.apply(latencyProfile)
			bd.await(texts, latencyText(0))
			b.ResetTimer()
			b.ReportMetric(0, "ns/op") // how long all edits take together says nothing
			for range b.N {
				bd.reportQuantiles(bd.edit(source, texts))
			}
		})
	}
}

// edit changes the source time and again and returns how long each change took to arrive.
func (b *bed) edit(source *corev1.ConfigMap, texts <-chan string) []time.Duration {
	b.Helper()
	var times []time.Duration
	for i := range edits {
		source.Data["object.yaml"] = latencyObject(i + 1)
		began := time.Now()
		if err := b.hub.Update(b.Context(), source); err != nil {
			b.Fatal(err)
		}
		b.await(texts, latencyText(i+1))
		times = append(times, time.Since(began))
	}
	return times
}

func latencyText(i int) string { return fmt.Sprintf("edition %d", i) }

func latencyObject(i int) string {
	return fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: default, name: measured}\ndata: {text: %q}\n", latencyText(i))
}

// follow returns the texts of the measured object on a member, as they appear.
func (b *bed) follow(plane *localkube.Plane) <-chan string {
	b.Helper()
	watcher, err := client.NewWithWatch(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(b.Context()))
	events, err := watcher.Watch(ctx, &corev1.ConfigMapList{}, client.InNamespace("default"),
		client.MatchingFieldsSelector{Selector: fields.OneTermEqualSelector("metadata.name", "measured")})
	if err != nil {
		cancel()
		b.Fatal(err)
	}
	texts := make(chan string, edits)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for event := range events.ResultChan() {
			object, ok := event.Object.(*corev1.ConfigMap)
			if !ok {
				continue
			}
			select {
			case texts <- object.Data["text"]:
			case <-ctx.Done():
				return
			}
		}
	}()
	b.Cleanup(func() {
		cancel()
		events.Stop()
		<-ended
	})
	return texts
}

// await waits for a text.
func (b *bed) await(texts <-chan string, want string) {
	b.Helper()
	deadline := time.After(waitTimeout)
	for {
		select {
		case text := <-texts:
			if text == want {
				return
			}
		case <-deadline:
			b.Fatalf("%q did not arrive within %s:\n%s", want, waitTimeout, b.run(b.plane, "", "kubectl", "get", "clustersummaries", "-A", "-o", "yaml"))
		}
	}
}
