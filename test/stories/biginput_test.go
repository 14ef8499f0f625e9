package stories

import (
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/localkube"
)

const (
	// manyConfigMaps is the number of objects of the profile, in manySources ConfigMaps of the hub.
	manyConfigMaps = 2000
	manySources    = 20
	// The big chart renders bigFiles files of bigFile bytes each: 6 MiB.
	bigFiles = 48
	bigFile  = 128 << 10
)

// bigTemplate renders a ConfigMap for each file of the chart.
const bigTemplate = `
{{- range $path, $_ := .Files.Glob "blobs/*" }}
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ base $path }}
  namespace: {{ $.Release.Namespace }}
data:
  blob: {{ $.Files.Get $path | quote }}
{{- end }}
`

// TestBigInput delivers a profile of 2,000 ConfigMaps and a chart whose rendering exceeds 5 MiB to a pull member.
func TestBigInput(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	member := w.pullMember("edge", "edge-1", "env=big")

	t.Run("2000 ConfigMaps", func(t *testing.T) {
		subtest := *w
		subtest.t = t
		subtest.deliverMany(member)
	})
	t.Run("a chart of 6 MiB", func(t *testing.T) {
		subtest := *w
		subtest.t = t
		subtest.deliverBig(member)
	})
}

func (w *world) deliverMany(member *localkube.Plane) {
	w.t.Helper()
	hub := w.client(w.hub)
	var refs strings.Builder
	for source := range manySources {
		name := fmt.Sprintf("many-%02d", source)
		var objects strings.Builder
		for i := range manyConfigMaps / manySources {
			fmt.Fprintf(&objects, "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: many, name: cm-%02d-%03d}\ndata: {text: %q}\n", source, i, noise(uint64(source*1000+i), 60))
		}
		holder := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Data: map[string]string{"objects.yaml": objects.String()}}
		if err := hub.Create(w.t.Context(), holder); err != nil {
			w.t.Fatal(err)
		}
		fmt.Fprintf(&refs, "  - {kind: ConfigMap, namespace: default, name: %s}\n", name)
	}
	began := time.Now()
	w.apply(w.hub, "apiVersion: config.projectsveltos.io/v1beta1\nkind: ClusterProfile\nmetadata: {name: many}\nspec:\n"+
		"  clusterSelector: {matchLabels: {env: big}}\n  policyRefs:\n"+refs.String())
	w.eventually("all ConfigMaps are on the member", func() error { return w.wantCount(member, "many", manyConfigMaps) })
	w.awaitProvisioned("edge", "many-sveltos-edge-1")
	w.t.Logf("%d ConfigMaps provisioned in %.1f s", manyConfigMaps, time.Since(began).Seconds())
}

func (w *world) deliverBig(member *localkube.Plane) {
	w.t.Helper()
	files := map[string]string{"templates/blobs.yaml": bigTemplate}
	for i := range bigFiles {
		files[fmt.Sprintf("blobs/blob-%d", i)] = noise(uint64(i), bigFile)
	}
	repository, err := examples.Repository(examples.Chart{Name: "big", Version: "1.0.0", Files: files})
	if err != nil {
		w.t.Fatal(err)
	}
	server := httptest.NewServer(repository)
	w.t.Cleanup(server.Close)
	began := time.Now()
	w.apply(w.hub, fmt.Sprintf(`
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: big}
spec:
  clusterSelector: {matchLabels: {env: big}}
  helmCharts:
  - repositoryURL: %s
    repositoryName: stories
    chartName: stories/big
    chartVersion: 1.0.0
    releaseName: big
    releaseNamespace: big
    helmChartAction: Install
`, server.URL))
	w.awaitProvisioned("edge", "big-sveltos-edge-1")
	w.t.Logf("a rendering of %d MiB provisioned in %.1f s", bigFiles*bigFile>>20, time.Since(began).Seconds())
	for i := range bigFiles {
		name := fmt.Sprintf("blob-%d", i)
		var got corev1.ConfigMap
		if err := w.client(member).Get(w.t.Context(), client.ObjectKey{Namespace: "big", Name: name}, &got); err != nil {
			w.t.Fatal(err)
		}
		if got.Data["blob"] != files["blobs/"+name] {
			w.t.Errorf("ConfigMap %s has %d bytes that differ from the chart", name, len(got.Data["blob"]))
		}
	}
}

// wantCount returns an error unless a namespace has this number of Towline's ConfigMaps.
func (w *world) wantCount(plane *localkube.Plane, namespace string, want int) error {
	var list metav1.PartialObjectMetadataList
	list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("ConfigMapList"))
	if err := w.client(plane).List(w.t.Context(), &list, client.InNamespace(namespace), client.HasLabels{"projectsveltos.io/reason"}); err != nil {
		return err
	}
	if len(list.Items) != want {
		return fmt.Errorf("namespace %s has %d ConfigMaps, want %d", namespace, len(list.Items), want)
	}
	return nil
}

// noise returns text of a length that compresses to no less than half of it. The same seed gives the same text.
func noise(seed uint64, length int) string {
	source := rand.NewPCG(seed, 1)
	raw := make([]byte, length/2)
	for i := range raw {
		raw[i] = byte(source.Uint64())
	}
	return hex.EncodeToString(raw)
}
