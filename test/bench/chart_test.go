package bench

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/source"
)

const (
	// definitions and others are how many CustomResourceDefinitions and other objects the chart has, and definitionFields makes it render to
	// 5 MiB: Kyverno's chart is like that.
	definitions      = 20
	others           = 40
	definitionFields = 1500
)

// BenchmarkChartInstall compares `helm install` of a chart of the size of Kyverno's with an installation by the engine, rendering included, on
// the same API server. Neither waits for readiness.
func BenchmarkChartInstall(b *testing.B) {
	plane := localkube.ForTest(b, localkube.Named("member"))
	bd := &bed{B: b, dir: b.TempDir(), plane: plane}
	archive := bd.packageChart()
	objects := dynamic.NewForConfigOrDie(plane.Config)
	var byHelm, byEngine time.Duration
	for b.Loop() {
		begin := time.Now()
		bd.run(plane, "", "helm", "install", "large", archive, "--namespace=helm", "--create-namespace")
		byHelm += time.Since(begin)
		bd.run(plane, "", "helm", "uninstall", "large", "--namespace=helm")
		bd.withoutDefinitions(objects)

		begin = time.Now()
		bd.installByEngine(plane, archive)
		byEngine += time.Since(begin)
		bd.withoutDefinitions(objects)
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(byHelm.Seconds()/float64(b.N), "helm-s")
	b.ReportMetric(byEngine.Seconds()/float64(b.N), "engine-s")
	b.ReportMetric(byEngine.Seconds()/byHelm.Seconds(), "engine/helm")
}

func (b *bed) installByEngine(plane *localkube.Plane, archive string) {
	b.Helper()
	e, err := engine.New(plane.Config, engine.Options{})
	if err != nil {
		b.Fatal(err)
	}
	rendered, err := render.NewCharts().Render(b.Context(), render.ChartRequest{
		Chart: source.Chart{Path: archive, Digest: "large", Name: "large", Version: "0.1.0"}, Name: "large", Namespace: "engine", KubeVersion: "v1.36.0",
	})
	if err != nil {
		b.Fatal(err)
	}
	id := bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "bench", Feature: "Helm"}
	report, err := e.Converge(b.Context(), bundle.Bundle{
		ID: id, Owner: bundle.Owner{Kind: "ClusterProfile", Name: "bench"},
		Items: []bundle.Item{{Objects: rendered.Objects, Release: &bundle.Release{
			Name: "large", Namespace: "engine", ChartName: "large", ChartVersion: "0.1.0",
			Data: bundle.ReleaseData{Chart: rendered.Chart, Notes: rendered.Notes, Paths: rendered.Paths},
		}}},
	})
	if err != nil || report.State != bundle.StateApplied {
		b.Fatalf("%s %q: %v", report.State, report.Message, err)
	}
	b.StopTimer()
	defer b.StartTimer()
	b.eventually("the release is uninstalled", func(ctx context.Context) error {
		if done, err := e.Withdraw(ctx, bundle.Withdrawal{ID: id}); err != nil || !done {
			return fmt.Errorf("not done: %w", err)
		}
		return nil
	})
}

// withoutDefinitions waits until the definitions of the chart are deleted.
func (b *bed) withoutDefinitions(objects dynamic.Interface) {
	b.Helper()
	gvr := schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	b.eventually("the definitions are deleted", func(ctx context.Context) error {
		for i := range definitions {
			name := fmt.Sprintf("kind%ds.bench.example.com", i)
			if _, err := objects.Resource(gvr).Get(ctx, name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				return fmt.Errorf("%s exists, or: %w", name, err)
			}
		}
		return nil
	})
}

// packageChart writes the chart and returns the path of its archive.
func (b *bed) packageChart() string {
	b.Helper()
	chart := filepath.Join(b.dir, "large")
	write := func(name, text string) {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(chart, name)), 0o700); err != nil {
			b.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(chart, name), []byte(text), 0o600); err != nil {
			b.Fatal(err)
		}
	}
	write("Chart.yaml", "apiVersion: v2\nname: large\nversion: 0.1.0\n")
	for i := range definitions {
		write(fmt.Sprintf("templates/crd-%d.yaml", i), definition(i))
	}
	for i := range others / 4 {
		write(fmt.Sprintf("templates/others-%d.yaml", i), fmt.Sprintf(otherObjects, i))
	}
	b.run(b.plane, "", "helm", "package", chart, "--destination="+b.dir)
	return filepath.Join(b.dir, "large-0.1.0.tgz")
}

func definition(i int) string {
	var fields strings.Builder
	for k := range definitionFields {
		fmt.Fprintf(&fields, "              field%d:\n                type: string\n                description: %s\n", k,
			fmt.Sprintf("Field %d of kind %d says how much of what is where, in one line of text, as schemas of real charts do.", k, i))
	}
	return fmt.Sprintf(`apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: kind%[1]ds.bench.example.com
spec:
  group: bench.example.com
  names: {kind: Kind%[1]d, plural: kind%[1]ds}
  scope: Namespaced
  versions:
  - name: v1
    served: true
    storage: true
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec:
            type: object
            properties:
%[2]s`, i, fields.String())
}

// otherObjects are four objects; the index of the file goes in.
const otherObjects = `apiVersion: v1
kind: ServiceAccount
metadata: {name: "{{ .Release.Name }}-%[1]d"}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: "{{ .Release.Name }}-%[1]d"}
data: {key: "{{ .Release.Namespace }}"}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: "{{ .Release.Namespace }}-%[1]d"}
rules: [{apiGroups: [bench.example.com], resources: ["*"], verbs: [get, list, watch]}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: "{{ .Release.Name }}-%[1]d"}
spec:
  selector: {matchLabels: {app: "{{ .Release.Name }}-%[1]d"}}
  template:
    metadata: {labels: {app: "{{ .Release.Name }}-%[1]d"}}
    spec: {containers: [{name: main, image: example.com/main:1}]}
`
