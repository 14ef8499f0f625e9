package hub_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/hub"
)

func TestOutdatedChartsAndDefaultAgentPatches(t *testing.T) {
	w := newPrivateWorld(t)
	opts := hub.Options{
		InstallCRDs: true, RegisterSelf: true, CacheDir: t.TempDir(), DiagnosticsAddress: freeAddress(t),
		OutdatedChartInterval: 200 * time.Millisecond, AgentPatchConfigMap: w.ns + "/patches",
	}
	w.start(w.plane.Config, opts)
	reader := w.createToken("reader", "cluster-admin")
	address := w.serveCharts(examples.Chart{Version: "0.1.0"}, examples.Chart{Version: "0.2.0"})
	w.eventually("profile", func() error {
		var clusters libv1beta1.SveltosClusterList
		return w.List(t.Context(), &clusters)
	})
	profile := w.createProfile(func(s *configv1beta1.ProfileSpec) {
		deployChart(address, nil)(s)
		s.ClusterSelector.MatchLabels = map[string]string{"sveltos-agent": "present"}
	})
	wantMetrics := func(want string) func() error {
		return func() error {
			_, body, err := fetch("https://"+opts.DiagnosticsAddress+"/metrics", reader)
			if err != nil {
				return err
			}
			if !strings.Contains(body, "\nprojectsveltos_outdated_helm_chart_check_last_run_timestamp_seconds ") {
				return errors.New("no check yet")
			}
			series := `projectsveltos_outdated_helm_chart{chart="hello",cluster_name="mgmt",cluster_namespace="mgmt",cluster_type="Sveltos",` + want
			if !strings.Contains(body, "\n"+series+"\n") {
				return fmt.Errorf("no series %s in:\n%s", series, body)
			}
			return nil
		}
	}
	w.eventually("outdated", wantMetrics(`latest="0.2.0",release_name="hello",release_namespace="hello",version="0.1.0"} 1`))
	update(w, profile, func(p *configv1beta1.ClusterProfile) { p.Spec.HelmCharts[0].ChartVersion = "0.2.0" })
	w.eventually("up to date", wantMetrics(`latest="0.2.0",release_name="hello",release_namespace="hello",version="0.2.0"} 0`))

	// Clusters without patches for their agent get the default patches.
	one := w.createMember("one", nil)
	w.wantMessage(one, "ConfigMap "+w.ns+"/patches, which --agent-patch-config-map of the hub names, does not exist")
}
