package stories

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"

	"github.com/towline/towline/internal/localkube"
)

const seed001Kyverno = `
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata:
  name: deploy-kyverno
spec:
  clusterSelector:
    matchLabels:
      env: test
  syncMode: Continuous
  helmCharts:
  - repositoryURL:    %s
    repositoryName:   kyverno
    chartName:        kyverno/kyverno
    chartVersion:     v3.5.1
    releaseName:      kyverno-latest
    releaseNamespace: kyverno
    helmChartAction:  Install
`

const seed001Tetragon = `
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata:
  name: tetragon-rke2-deploy
spec:
  clusterSelector:
    matchLabels:
      req: tetragon
  helmCharts:
  - chartName: cilium/tetragon
    chartVersion: 1.5.0
    helmChartAction: Install
    releaseName: tetragon
    releaseNamespace: kube-system
    repositoryName: cilium
    repositoryURL: %s
`

// TestSeed001PullAndPush has one pull and one push cluster, one profile on both, and a second one on the cluster with
// its label.
func TestSeed001PullAndPush(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	w.registerSelf()
	rke2, aks := w.member("cluster01"), w.member("cluster02")

	if err := wantFields(w.tableRow(w.kubectl(w.hub, "get", "sveltoscluster", "-A"), "mgmt"), "mgmt", "mgmt", "true", "v1.36.3", "*"); err != nil {
		t.Error(err)
	}
	manifest := w.run(w.hub, "sveltosctl", "register", "cluster", "--namespace=rke2", "--cluster=cluster01", "--pullmode", "--labels=env=test")
	if err := wantFields(w.tableRow(w.kubectl(w.hub, "get", "sveltosclusters", "-A"), "cluster01"), "rke2", "cluster01", "*"); err != nil {
		t.Error(err)
	}
	applied := w.kubectl(rke2, "apply", "-f", w.save("rke2_reg.yaml", manifest))
	if diff := cmp.Diff(appliedManifest+"secret/cluster01-sveltos-kubeconfig created\n", applied); diff != "" {
		t.Errorf("kubectl apply (-want +got):\n%s", diff)
	}
	w.awaitReady("rke2", "cluster01")

	w.kubectl(w.hub, "create", "namespace", "aks")
	printed := w.run(w.hub, "sveltosctl", "register", "cluster", "--namespace=aks", "--cluster=cluster02", "--kubeconfig="+aks.Kubeconfig, "--labels=env=test")
	if want := "cluster cluster02 successfully registered/updated in namespace aks."; strings.TrimSuffix(printed, "\n") != want {
		t.Errorf("register printed %q, want %q", printed, want)
	}
	w.awaitReady("aks", "cluster02")
	w.wantClusterTable()

	kyverno := []*kyvernoRelease{w.newKyvernoRelease(rke2, "rke2", "cluster01"), w.newKyvernoRelease(aks, "aks", "cluster02")}
	w.deployToBoth()
	for _, release := range kyverno {
		w.wantDeployments(release.plane, "kyverno", "deployment.apps/kyverno-latest")
		release.wantComplete()
	}
	w.deployToLabelled()
	w.wantDeployments(rke2, "kube-system", "deployment.apps/tetragon")
	w.wantDeployments(aks, "kube-system")
	w.withdrawFromUnlabelled()
	w.wantDeployments(rke2, "kube-system")
	w.wantDeployments(rke2, "kyverno", "deployment.apps/kyverno-latest")

	w.kubectl(w.hub, "patch", "clusterprofile", "deploy-kyverno", "--type=json",
		`-p=[{"op": "replace", "path": "/spec/helmCharts/0/chartVersion", "value": "3.3.3"}]`)
	for _, release := range kyverno {
		release.wantHooks("an upgrade", "prepare", "prepare", "migrate-resources")
	}
	w.kubectl(w.hub, "delete", "clusterprofile", "deploy-kyverno")
	for _, release := range kyverno {
		release.awaitUninstalled()
	}
}

// kyvernoRelease is the kyverno release of the seed on one member.
type kyvernoRelease struct {
	*world
	plane              *localkube.Plane
	namespace, cluster string
	hooks              *hookLog
}

func (w *world) newKyvernoRelease(plane *localkube.Plane, namespace, cluster string) *kyvernoRelease {
	w.t.Helper()
	w.kubectl(plane, "create", "namespace", "kyverno")
	return &kyvernoRelease{world: w, plane: plane, namespace: namespace, cluster: cluster, hooks: w.watchHooks(plane, "kyverno")}
}

// wantHooks waits until these Jobs of hooks have ended, in this order.
func (r *kyvernoRelease) wantHooks(event string, want ...string) {
	r.t.Helper()
	r.eventually("the hooks have ended", func() error {
		var ended []string
		for _, line := range r.hooks.list(0) {
			if name, ok := strings.CutPrefix(line, "ended kyverno-latest-"); ok {
				ended = append(ended, strings.Fields(name)[0])
			}
		}
		if diff := cmp.Diff(want, ended); diff != "" {
			return fmt.Errorf("hooks on %s after %s (-want +got):\n%s", r.cluster, event, diff)
		}
		return nil
	})
}

// wantComplete checks the objects that make the chart hard to deploy.
func (r *kyvernoRelease) wantComplete() {
	r.t.Helper()
	r.wantHooks("the installation", "prepare")
	for _, object := range [][]string{
		{"crd", "clusterpolicies.kyverno.io"}, {"validatingwebhookconfiguration", "kyverno-latest-policy"},
		{"configmap", "kyverno-latest-config", "-n", "kyverno"},
	} {
		r.kubectl(r.plane, append([]string{"get"}, object...)...)
	}
	r.eventually("the roles are aggregated", func() error {
		for role, resource := range map[string]string{"kyverno-latest:admission-controller": "clusterpolicies/status", "admin": "clusterpolicies"} {
			rules, err := r.try(r.plane, "kubectl", "get", "clusterrole", role, "-o", "jsonpath={.rules[*].resources}")
			if err != nil {
				return err
			}
			if !strings.Contains(rules, resource) {
				return fmt.Errorf("ClusterRole %s on %s has no rule for %s: %s", role, r.cluster, resource, rules)
			}
		}
		return nil
	})
}

// awaitUninstalled waits until the release is uninstalled. Only the ConfigMap with the annotation keep stays.
func (r *kyvernoRelease) awaitUninstalled() {
	r.t.Helper()
	r.wantHooks("the uninstallation", "prepare", "prepare", "migrate-resources", "scale-to-zero")
	r.eventually("kyverno is uninstalled", func() error {
		return errors.Join(
			r.wantMissing(r.plane, &apiextensionsv1.CustomResourceDefinition{}, "clusterpolicies.kyverno.io", ""),
			r.wantMissing(r.plane, &admissionv1.ValidatingWebhookConfiguration{}, "kyverno-latest-policy", ""),
			r.wantMissing(r.plane, &rbacv1.ClusterRole{}, "kyverno-latest:admission-controller", ""),
			r.wantMissing(r.plane, &appsv1.Deployment{}, "kyverno-latest", "kyverno"),
		)
	})
	r.kubectl(r.plane, "get", "configmap", "kyverno-latest-config", "-n", "kyverno")
}

// wantDeployments checks the names of the deployments in a namespace of a member.
func (w *world) wantDeployments(plane *localkube.Plane, namespace string, want ...string) {
	w.t.Helper()
	got := strings.Fields(w.kubectl(plane, "get", "deployments", "-n", namespace, "-o", "name"))
	if !slices.Equal(got, want) {
		w.t.Errorf("deployments of %s in %s: got %q, want %q", plane.Name, namespace, got, want)
	}
}

// wantClusterTable compares the table of clusters with labels with the seed's.
func (w *world) wantClusterTable() {
	w.t.Helper()
	const version = "v1.36.3"
	w.eventually("the table of clusters is the seed's", func() error {
		lines := strings.Split(strings.TrimSpace(w.kubectl(w.hub, "get", "sveltosclusters", "-A", "--show-labels")), "\n")
		want := [][]string{
			{"NAMESPACE", "NAME", "READY", "VERSION", "AGE", "LABELS"},
			{"aks", "cluster02", "true", version, "*", "env=test,projectsveltos.io/k8s-version=" + version + ",sveltos-agent=present"},
			{"mgmt", "mgmt", "true", version, "*", "projectsveltos.io/k8s-version=" + version + ",sveltos-agent=present"},
			{"rke2", "cluster01", "true", version, "*", "env=test"},
		}
		if len(lines) != len(want) {
			return fmt.Errorf("got %d lines, want %d: %q", len(lines), len(want), lines)
		}
		for i, fields := range want {
			if err := wantFields(lines[i], fields...); err != nil {
				return err
			}
		}
		return nil
	})
}

func (w *world) deployToBoth() {
	w.t.Helper()
	bundles := w.start("watch of bundles", w.hub, "kubectl", "get", "configurationbundle", "-A", "--watch")
	w.kubectlApply(w.hub, fmt.Sprintf(seed001Kyverno, w.Charts))
	w.eventually("deploy-kyverno has its summaries", func() error {
		_, err := w.try(w.hub, "kubectl", "get", "clustersummary", "-A", "-o", "name")
		if err != nil {
			return err
		}
		return w.wantNames("clusterprofile,clustersummary",
			"clusterprofile.config.projectsveltos.io/deploy-kyverno",
			"clustersummary.config.projectsveltos.io/deploy-kyverno-sveltos-cluster02",
			"clustersummary.config.projectsveltos.io/deploy-kyverno-sveltos-cluster01")
	})
	w.awaitProvisioned("rke2", "deploy-kyverno-sveltos-cluster01")
	w.awaitProvisioned("aks", "deploy-kyverno-sveltos-cluster02")
	seen := bundles.out.String()
	if !regexp.MustCompile(`(?m)^rke2\s+config-[a-z0-9]{20}\s`).MatchString(seen) || strings.Contains(seen, "aks") {
		w.t.Errorf("the watch must show bundles in rke2 only:\n%s", seen)
	}
	w.awaitNoBundles()
}

func (w *world) deployToLabelled() {
	w.t.Helper()
	w.kubectl(w.hub, "label", "sveltosclusters", "cluster01", "-n", "rke2", "req=tetragon")
	w.kubectlApply(w.hub, fmt.Sprintf(seed001Tetragon, w.Charts))
	w.eventually("only cluster01 gets tetragon", func() error {
		return w.wantNames("clusterprofile,clustersummary",
			"clusterprofile.config.projectsveltos.io/deploy-kyverno",
			"clusterprofile.config.projectsveltos.io/tetragon-rke2-deploy",
			"clustersummary.config.projectsveltos.io/deploy-kyverno-sveltos-cluster02",
			"clustersummary.config.projectsveltos.io/deploy-kyverno-sveltos-cluster01",
			"clustersummary.config.projectsveltos.io/tetragon-rke2-deploy-sveltos-cluster01")
	})
	w.awaitProvisioned("rke2", "tetragon-rke2-deploy-sveltos-cluster01")
}

func (w *world) withdrawFromUnlabelled() {
	w.t.Helper()
	w.kubectl(w.hub, "label", "sveltosclusters", "cluster01", "-n", "rke2", "req-")
	w.eventually("tetragon is withdrawn", func() error {
		return w.wantNames("clustersummary",
			"clustersummary.config.projectsveltos.io/deploy-kyverno-sveltos-cluster02",
			"clustersummary.config.projectsveltos.io/deploy-kyverno-sveltos-cluster01")
	})
	w.awaitProvisioned("rke2", "deploy-kyverno-sveltos-cluster01")
}

// wantNames returns an error unless `kubectl get <kinds> -A -o name` prints exactly these names.
func (w *world) wantNames(kinds string, want ...string) error {
	out, err := w.try(w.hub, "kubectl", "get", kinds, "-A", "-o", "name")
	if err != nil {
		return err
	}
	if diff := cmp.Diff(want, strings.Fields(out)); diff != "" {
		return fmt.Errorf("names (-want +got):\n%s", diff)
	}
	return nil
}
