package summaries_test

import (
	"context"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/summaries"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/source"
)

// BenchmarkDeliveries measures the CPU time and the allocations of the hub for one delivery to a pull member: reading,
// rendering, encoding. Each delivery is to another member. The requests cost nothing.
func BenchmarkDeliveries(b *testing.B) {
	for _, test := range []struct {
		name     string
		profiles int
		template string // in each object; "" if the content is no template
	}{
		{"one profile", 1, ""},
		{"100 profiles in turn", 100, ""},
		{"template without cluster", 1, `{{ upper "text" }}`},
		{"template with cluster", 1, "{{ .ClusterName }}"},
	} {
		b.Run(test.name, func(b *testing.B) {
			hub := acceptingHub{contents: map[client.ObjectKey]*corev1.ConfigMap{}}
			for i := range test.profiles {
				hub.addContent(i, test.template)
			}
			d := newDeliverer(b, hub)
			member := 0
			b.ReportAllocs()
			begin := cpuTime(b)
			for b.Loop() {
				request := manifestsRequest(fmt.Sprintf("member-%d", member), fmt.Sprintf("content-%d", member%test.profiles))
				if _, err := d.deliver(b.Context(), request); err != nil {
					b.Fatal(err)
				}
				member++
			}
			b.ReportMetric(float64((cpuTime(b)-begin).Microseconds())/float64(b.N), "cpu-µs/op")
		})
	}
}

// cpuTime returns the CPU time of this process.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// deliverer composes bundles and delivers them to pull members.
type deliverer struct {
	composer  *summaries.Composer
	transport *deliver.PullTransport
}

func newDeliverer(tb testing.TB, hub client.Client) deliverer {
	tb.Helper()
	transport, err := deliver.NewPullTransport(hub, hub, deliver.Key{})
	if err != nil {
		tb.Fatal(err)
	}
	return deliverer{transport: transport, composer: &summaries.Composer{
		Contents: &source.Contents{Hub: hub}, Objects: hub, Hub: hub, Manifests: render.NewManifestRenderer(), HubUID: "hub",
	}}
}

// manifestsRequest returns the request for a bundle of a pull member with one ConfigMap. 1000 members share it.
func manifestsRequest(name, content string) summaries.ComposeRequest {
	summary := &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: content + "-" + name}}
	summary.Spec.ClusterProfileSpec.PolicyRefs = []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Namespace: "fleet", Name: content}}
	return summaries.ComposeRequest{
		Summary: summary,
		Member:  fleet.Member{Type: fleet.TypeKarmada, Namespace: "fleet", Name: name, Mode: fleet.Pull, DeliveryNamespace: name},
		Owner:   bundle.Owner{Kind: "ClusterProfile", Name: content}, SharedBy: 1000,
		TemplateContext: source.TemplateContext{Namespace: "fleet", Name: name},
	}
}

// deliver composes the bundle that r requests, and delivers it to its member, which has no bundle yet.
func (d deliverer) deliver(ctx context.Context, r summaries.ComposeRequest) (bundle.Bundle, error) {
	composition, err := d.composer.Compose(ctx, r, libv1beta1.FeatureResources)
	if err != nil {
		return bundle.Bundle{}, err
	}
	_, err = d.transport.Deliver(ctx, r.Member, composition.Bundle)
	return composition.Bundle, err
}

// acceptingHub is a hub with the contents of profiles and no other object, that accepts all writes.
type acceptingHub struct {
	client.Client
	contents map[client.ObjectKey]*corev1.ConfigMap
}

// addContent adds a ConfigMap with 20 objects, 48 kB in total.
func (h acceptingHub) addContent(i int, template string) {
	var manifest strings.Builder
	for k := range 20 {
		fmt.Fprintf(&manifest, "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: object-%d, namespace: site}\ndata:\n", k)
		for line := range 20 {
			fmt.Fprintf(&manifest, "  key-%d: 'content %d, object %d, line %d: %s some text that is as long as the lines of real manifests are %s'\n",
				line, i, k, line, template, strings.Repeat("=", line))
		}
	}
	name := fmt.Sprintf("content-%d", i)
	found := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: name}, Data: map[string]string{"all.yaml": manifest.String()}}
	if template != "" {
		found.Annotations = map[string]string{libv1beta1.TemplateAnnotation: ""}
	}
	h.contents[client.ObjectKeyFromObject(found)] = found
}

func (h acceptingHub) Get(_ context.Context, key client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	into, isContent := obj.(*corev1.ConfigMap)
	found := h.contents[key]
	if !isContent || found == nil {
		return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
	}
	*into = *found
	return nil
}

func (acceptingHub) Create(context.Context, client.Object, ...client.CreateOption) error { return nil }

func (acceptingHub) Apply(context.Context, runtime.ApplyConfiguration, ...client.ApplyOption) error {
	return nil
}
