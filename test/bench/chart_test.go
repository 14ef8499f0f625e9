package bench

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/metadata"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/source"
)

const (
	// definitions and others are the numbers of CustomResourceDefinitions and of other objects in the chart.
	// With definitionFields fields each, the chart renders to 5 MiB, as Kyverno's chart does.
	definitions      = 20
	others           = 40
	definitionFields = 1500
)

// BenchmarkChartInstall compares `helm install` of a chart of the size of Kyverno's with an installation by the engine,
// including the rendering, on the same API server: until the release record has the status deployed, and until the
// kinds of the chart are served. `helm install` does not wait for the latter.
func BenchmarkChartInstall(b *testing.B) {
	log.SetLogger(logr.Discard())
	plane := localkube.ForTest(b, localkube.Named("member"))
	bd := &testBench{B: b, dir: b.TempDir(), plane: plane}
	archive := bd.packageChart()
	objects := metadata.NewForConfigOrDie(plane.Config)
	var helm, deployed, served time.Duration
	byHelm := func() { helm += bd.installByHelm(plane, archive) }
	byEngine := func() {
		untilDeployed, untilServed := bd.installByEngine(plane, objects, archive)
		deployed, served = deployed+untilDeployed, served+untilServed
	}
	for b.Loop() {
		// The first installation on an API server is slower than later ones, so both kinds have the same mean position.
		for _, install := range []func(){byHelm, byEngine, byEngine, byHelm} {
			install()
			bd.awaitNoDefinitions(objects)
			<-time.After(pauseTime)
		}
	}
	installs := 2 * float64(b.N)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(helm.Seconds()/installs, "helm-s")
	b.ReportMetric(deployed.Seconds()/installs, "engine-s")
	b.ReportMetric(served.Seconds()/installs, "engine-served-s")
	b.ReportMetric(deployed.Seconds()/helm.Seconds(), "engine/helm")
}

func (b *testBench) installByHelm(plane *localkube.Plane, archive string) time.Duration {
	b.Helper()
	begin := time.Now()
	b.run(plane, "", "helm", "install", "large", archive, "--namespace=helm", "--create-namespace")
	took := time.Since(begin)
	// The API server can keep a definition for minutes if it is deleted while its status still changes.
	<-time.After(pauseTime)
	b.run(plane, "", "helm", "uninstall", "large", "--namespace=helm")
	return took
}

// installByEngine renders the chart, applies it, and withdraws it again. It returns the time until the release is
// deployed, and until all kinds of the chart are served.
func (b *testBench) installByEngine(plane *localkube.Plane, objects metadata.Interface, archive string) (deployed, served time.Duration) {
	b.Helper()
	begin := time.Now()
	ctx, stop := context.WithCancel(b.Context())
	defer stop()
	recorded := make(chan time.Duration, 1)
	go func() {
		secrets := objects.Resource(schema.GroupVersionResource{Version: "v1", Resource: "secrets"}).Namespace("engine")
		// The loop ends without a result if the installation fails, which is reported below.
		_ = wait.PollUntilContextCancel(ctx, pollInterval, true, func(ctx context.Context) (bool, error) {
			record, err := secrets.Get(ctx, "sh.helm.release.v1.large.v1", metav1.GetOptions{})
			return err == nil && record.Labels["status"] == "deployed", nil
		})
		recorded <- time.Since(begin)
	}()
	e, err := engine.New(plane.Config, engine.Options{})
	if err != nil {
		b.Fatal(err)
	}
	rendered, err := render.NewCharts(nil).Render(b.Context(), render.ChartRequest{
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
	served = time.Since(begin)
	deployed = <-recorded
	<-time.After(pauseTime) // as in installByHelm
	changed := time.Now()
	b.eventually("the release is uninstalled", func(ctx context.Context) error {
		if done, err := e.Withdraw(ctx, bundle.Withdrawal{ID: id}); err != nil || !done {
			b.changeDefinitions(objects, &changed)
			return fmt.Errorf("not done: %w", err)
		}
		return nil
	})
	return deployed, served
}

// awaitNoDefinitions waits until the definitions of the chart are deleted.
func (b *testBench) awaitNoDefinitions(objects metadata.Interface) {
	b.Helper()
	changed := time.Now()
	b.eventually("the definitions are deleted", func(context.Context) error {
		if left := b.changeDefinitions(objects, &changed); left > 0 {
			return fmt.Errorf("%d are left", left)
		}
		return nil
	})
}

// changeDefinitions changes the definitions of the chart, if the last change was some time ago, and returns their
// number. After a conflict the API server can pause for minutes before it tries again to delete a definition, unless
// the definition changes.
func (b *testBench) changeDefinitions(objects metadata.Interface, changed *time.Time) (left int) {
	b.Helper()
	definitions := objects.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"})
	list, err := definitions.List(b.Context(), metav1.ListOptions{})
	if err != nil {
		b.Fatal(err)
	}
	if time.Since(*changed) < pauseTime {
		return len(list.Items)
	}
	*changed = time.Now()
	for i := range list.Items {
		patch := fmt.Appendf(nil, `{"metadata":{"annotations":{"changed":%q}}}`, *changed)
		_, err := definitions.Patch(b.Context(), list.Items[i].Name, types.MergePatchType, patch, metav1.PatchOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			b.Fatal(err)
		}
	}
	return len(list.Items)
}

// packageChart writes the chart and returns the path of its archive.
func (b *testBench) packageChart() string {
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

// otherObjects are four objects; the verb is replaced by the index of the file.
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
