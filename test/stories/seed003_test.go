package stories

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

const kyvernoProfile = `
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata:
  name: kyvernooinstall
spec:
  clusterSelector:
    matchLabels:
      env: staging
  helmCharts:
  - repositoryURL: %s
    repositoryName: kyverno
    chartName: kyverno/kyverno
    chartVersion: v3.3.3
    releaseName: kyverno-latest
    releaseNamespace: kyverno
    helmChartAction: Install
`

// TestSeed003PrivateCluster follows the article: it registers a private cluster, deploys a chart to it and watches the
// rollout.
func TestSeed003PrivateCluster(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	private := w.member("kind-private")

	manifest := w.run(w.hub, "sveltosctl", "register", "cluster", "--namespace=default", "--cluster=kind-private", "--labels=env=staging", "--pullmode")
	table := w.kubectl(w.hub, "get", "sveltosclusters.lib.projectsveltos.io", "-A")
	if err := wantFields(w.tableRow(table, "kind-private"), "default", "kind-private", "*"); err != nil {
		t.Error(err)
	}
	w.kubectl(private, "apply", "-f", w.save("applier.yaml", manifest))
	w.eventually("the agent's pod runs", func() error {
		return wantFields(rowWithPrefix(w.kubectl(private, "get", "pods", "-n", "projectsveltos"), "sveltos-applier-manager-"), "*", "1/1", "Running", "0", "*")
	})
	w.eventually("kind-private is ready", func() error {
		table := w.kubectl(w.hub, "get", "sveltosclusters.lib.projectsveltos.io", "-A")
		return wantFields(w.tableRow(table, "kind-private"), "default", "kind-private", "true", "v1.36.3", "*")
	})

	// A watch also returns states that last a short time.
	summaries := w.start("watch of summaries", w.hub, "kubectl", "get", "clustersummaries.config.projectsveltos.io", "-o", "wide", "--watch")
	bundles := w.start("watch of bundles", w.hub, "kubectl", "get", "configurationbundle", "-A", "--watch")
	w.kubectlApply(w.hub, fmt.Sprintf(kyvernoProfile, w.Charts))

	const summary = "kyvernooinstall-sveltos-kind-private"
	w.eventually("the chart is provisioned", func() error {
		return wantFields(w.tableRow(w.kubectl(w.hub, "get", "clustersummaries.config.projectsveltos.io", "-o", "wide"), summary), summary, "*", "Provisioned")
	})
	w.eventually("the watch returned Provisioning before Provisioned", func() error {
		if !regexp.MustCompile(`(?s)` + summary + `\s+\S+\s+Provisioning\s.*` + summary + `\s+\S+\s+Provisioned\s`).MatchString(summaries.out.String()) {
			return fmt.Errorf("the watch printed:\n%s", summaries.out)
		}
		return nil
	})
	if !regexp.MustCompile(`(?m)^default\s+config-[a-z0-9]{20}\s`).MatchString(bundles.out.String()) {
		t.Errorf("the watch returned no bundle while provisioning:\n%s", bundles.out)
	}
	w.awaitNoBundles()

	description := w.kubectl(w.hub, "describe", "clustersummaries.config.projectsveltos.io/"+summary)
	for _, want := range []string{
		`(?s)Deployed GVKs:.*Deployment\.v1\.apps.*Feature ID:\s+Helm`,
		`(?s)Events:.*Normal\s+Sveltos\s.*Feature: Helm deployed to cluster Sveltos default/kind-private`,
	} {
		if !regexp.MustCompile(want).MatchString(description) {
			t.Errorf("the description does not match %s:\n%s", want, description)
		}
	}
	w.eventually("the chart's Deployment exists", func() error {
		out, err := w.try(private, "kubectl", "get", "deployments", "-n", "kyverno", "-o", "name")
		if err == nil && !strings.Contains(out, "deployment.apps/") {
			return errors.New("no deployment in namespace kyverno")
		}
		return err
	})
}

// awaitNoBundles waits until the hub has no bundle.
func (w *world) awaitNoBundles() {
	w.t.Helper()
	w.eventually("the bundles are removed", func() error {
		found := &libv1beta1.ConfigurationBundleList{}
		err := w.client(w.hub).List(w.t.Context(), found)
		if len(found.Items) > 0 {
			err = fmt.Errorf("%d bundles are left, for example %s", len(found.Items), found.Items[0].Name)
		}
		return err
	})
}
