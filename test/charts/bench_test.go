package charts

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"testing"
	"time"

	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/source"
)

// chartVariable is the environment variable with the path of a chart archive.
const chartVariable = "TOWLINE_CHART"

// BenchmarkInstall measures `helm install` of a chart and an installation by the engine alone, alternately on one
// control plane. The engine runs the chart's hooks and writes the release record, like helm; its time does not include
// the rendering.
func BenchmarkInstall(b *testing.B) {
	archive := os.Getenv(chartVariable)
	if archive == "" {
		b.Skipf("%s names no chart archive", chartVariable)
	}
	plane := localkube.ForTest(b, localkube.Named("member"))
	loaded, err := loader.LoadFile(archive)
	if err != nil {
		b.Fatal(err)
	}
	name := loaded.Name()
	wanted := renderBundle(b, plane, archive, name, loaded.Metadata.Version)
	byHelm := func() time.Duration {
		began := time.Now()
		runHelm(b, plane, "install", name, archive, "-n", namespace, "--create-namespace")
		took := time.Since(began)
		runHelm(b, plane, "uninstall", name, "-n", namespace, "--wait")
		return took
	}
	byEngine := func() time.Duration {
		e, err := engine.New(rest.CopyConfig(plane.Config), engine.Options{})
		if err != nil {
			b.Fatal(err)
		}
		began := time.Now()
		for {
			report, err := e.Converge(b.Context(), wanted)
			if err != nil {
				b.Fatal(err)
			}
			if report.State == bundle.StateApplied {
				break
			}
			pause(b)
		}
		took := time.Since(began)
		for {
			done, err := e.Withdraw(b.Context(), bundle.Withdrawal{ID: wanted.ID})
			if err != nil {
				b.Fatal(err)
			}
			if done {
				break
			}
			pause(b)
		}
		return took
	}
	byHelm() // the API server compiles the schemas of CRDs the first time
	var helmTime, engineTime time.Duration
	for b.Loop() {
		h, e := byHelm(), byEngine()
		b.Logf("helm install %.2f s, engine %.2f s", h.Seconds(), e.Seconds())
		helmTime, engineTime = helmTime+h, engineTime+e
	}
	b.ReportMetric(helmTime.Seconds()/float64(b.N), "s/helm")
	b.ReportMetric(engineTime.Seconds()/float64(b.N), "s/engine")
	b.ReportMetric(engineTime.Seconds()/helmTime.Seconds(), "engine/helm")
}

// renderBundle renders a chart as the hub does.
func renderBundle(b *testing.B, plane *localkube.Plane, archive, name, version string) bundle.Bundle {
	b.Helper()
	raw, err := os.ReadFile(archive)
	if err != nil {
		b.Fatal(err)
	}
	sum := sha256.Sum256(raw)
	client := discovery.NewDiscoveryClientForConfigOrDie(plane.Config)
	server, err := client.ServerVersion()
	if err != nil {
		b.Fatal(err)
	}
	_, lists, err := client.ServerGroupsAndResources()
	if err != nil {
		b.Fatal(err)
	}
	var apis []string
	for _, list := range lists {
		apis = append(apis, list.GroupVersion)
		for _, resource := range list.APIResources {
			apis = append(apis, list.GroupVersion+"/"+resource.Kind)
		}
	}
	rendered, err := render.NewCharts(nil).Render(b.Context(), render.ChartRequest{
		Chart: source.Chart{Name: name, Version: version, Path: archive, Digest: hex.EncodeToString(sum[:])},
		Name:  name, Namespace: namespace, KubeVersion: server.GitVersion, APIVersions: apis,
	})
	if err != nil {
		b.Fatal(err)
	}
	return bundle.Bundle{
		ID:      bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "bench", Feature: "Helm"},
		Owner:   bundle.Owner{Kind: "ClusterProfile", Name: "bench", Tier: bundle.DefaultTier},
		Options: bundle.Options{CorrectDrift: true},
		Items: []bundle.Item{{
			Objects: rendered.Objects,
			Release: &bundle.Release{
				Name: name, Namespace: namespace, ChartName: name, ChartVersion: version,
				Data: bundle.ReleaseData{Chart: rendered.Chart, Notes: rendered.Notes, Paths: rendered.Paths},
			},
		}},
	}
}

func runHelm(b *testing.B, plane *localkube.Plane, args ...string) {
	b.Helper()
	if _, err := run(b.Context(), plane, "", "helm", args...); err != nil {
		b.Fatal(err)
	}
}

// pause waits before the next check of a release that is not deployed yet.
func pause(b *testing.B) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), poll/2)
	defer cancel()
	<-ctx.Done()
}
