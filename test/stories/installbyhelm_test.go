package stories

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/localkube"
)

// hubOnPlane adapts the hub to a plane: pods share the ports and the loopback addresses of this machine, and mount no
// volumes.
const hubOnPlane = `
image:
  repository: %s
extraArgs:
- --health-address=127.0.0.1:0
- --diagnostics-address=127.0.0.1:0
- --cache-dir=%s/cache
- --denied-networks=
`

// edgeCluster is a cluster that is registered without a command.
const edgeCluster = `
apiVersion: v1
kind: Namespace
metadata: {name: edge}
---
apiVersion: lib.projectsveltos.io/v1beta1
kind: SveltosCluster
metadata: {name: shop, namespace: edge}
spec: {pullMode: true}
`

// helmWorld is a world with a hub that Helm installs, and with a chart repository to install it from.
type helmWorld struct {
	*world
	releases chartRepository
	// image is the image of the hub, without its tag.
	image     string
	values    string
	rke2, aks *localkube.Plane
}

// newHelmWorld starts an empty plane for the hub. Its node runs the images of two releases. The program of the second
// one is from the image that `make image` builds.
func newHelmWorld(t *testing.T) *helmWorld {
	t.Helper()
	charts, err := examples.Repository(charts()...)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(charts)
	t.Cleanup(server.Close)
	w := &helmWorld{world: &world{t: t, dir: t.TempDir(), Charts: server.URL, clients: &sync.Map{}}}
	w.releases = w.newChartRepository()
	var program string
	w.image, program = w.releaseImage(w.releases.dist, "v1.0.2")
	w.hub = localkube.ForTest(t, localkube.Named("hub"),
		localkube.WithExec(w.image+":v1.0.1", w.binary("towline-agent")), localkube.WithExec(w.image+":v1.0.2", program))
	w.values = w.save("values.yaml", fmt.Sprintf(hubOnPlane, w.image, w.dir))
	return w
}

// TestInstallByHelm installs the hub with the commands of seed 001 and the former chart, upgrades it to charts/towline
// and an image of `make image` with members connected, uninstalls and reinstalls it.
func TestInstallByHelm(t *testing.T) {
	awaitSlot(t)
	w := newHelmWorld(t)
	w.publishFormerChart(w.releases, "v1.0.1")
	w.helm(w.hub, "repo", "add", "projectsveltos", w.releases.URL)
	w.helm(w.hub, "repo", "update")
	w.install("1.0.1")
	w.wantRunning("towline-hub")
	w.eventually("the hub registers itself", func() error {
		out, err := w.try(w.hub, "kubectl", "get", "sveltoscluster", "-A")
		return errors.Join(err, wantFields(w.tableRow(out, "mgmt"), "mgmt", "mgmt", "true", "v1.36.3", "*"))
	})

	w.rke2 = w.pullMember("rke2", "cluster01", "env=test")
	w.aks = w.pushMember("aks", "cluster02", "env=test")
	w.kubectlApply(w.hub, fmt.Sprintf(seed001Kyverno, w.Charts))
	w.eventually("both clusters get their summaries", func() error {
		return w.wantNames("clustersummary",
			"clustersummary.config.projectsveltos.io/deploy-kyverno-sveltos-cluster02",
			"clustersummary.config.projectsveltos.io/deploy-kyverno-sveltos-cluster01")
	})
	w.wantKyverno()
	before := w.fleetIdentities()

	members := w.start("watch of the members", w.hub, "kubectl", "get", "sveltosclusters", "-A", "--watch", "--no-headers",
		"-o", "custom-columns=NAME:.metadata.name,READY:.status.ready,CONNECTION:.status.connectionStatus")
	w.upgrade()
	w.wantKyverno()
	w.wantFleet("upgrade", before)
	w.deployAfterUpgrade()
	select {
	case <-members.exited:
		t.Fatalf("the watch of the members has ended: %s", members.out.String())
	default:
	}
	members.stop()
	w.wantConnected(members.out.String())
	before = w.fleetIdentities()

	uninstalled := w.helm(w.hub, "uninstall", "projectsveltos", "-n", "projectsveltos")
	if want := `release "projectsveltos" uninstalled`; !strings.Contains(uninstalled, want) {
		t.Errorf("helm uninstall printed %q, want %q", uninstalled, want)
	}
	w.wantRunning()
	w.awaitLeaseRenewal()
	w.wantFleet("uninstall", before)

	w.install("1.0.2", "--set", "shards={eu}")
	w.wantRunning("towline-hub", "towline-hub-eu")
	w.redeploy()
	w.wantKyverno()
	w.wantFleet("install again", before)
}

// install runs the command of the seed, with the values that the plane needs.
func (w *helmWorld) install(version string, options ...string) {
	w.t.Helper()
	printed := w.helm(w.hub, append([]string{
		"install", "projectsveltos", "projectsveltos/projectsveltos", "-n", "projectsveltos", "--create-namespace", "--version=" + version, "-f", w.values,
	}, options...)...)
	for _, want := range []string{"STATUS: deployed", "The hub of Towline v" + version + " runs in namespace projectsveltos:"} {
		if !strings.Contains(printed, want) {
			w.t.Errorf("helm install printed %q, want it to contain %q", printed, want)
		}
	}
}

// upgrade changes the release and several values while members are connected.
func (w *helmWorld) upgrade() {
	w.t.Helper()
	old := w.hubPods()
	former, err := w.tokenPolicy()
	if err != nil || former == "" {
		w.t.Fatalf("the former chart has no policy that limits tokens: %v", err)
	}
	w.publishChart(w.releases, "v1.0.2")
	w.helm(w.hub, "repo", "update")
	w.helm(w.hub, "upgrade", "projectsveltos", "projectsveltos/projectsveltos", "-n", "projectsveltos", "--version=1.0.2", "--reset-then-reuse-values",
		"--set", "replicas=2", "--set", "shards={eu}", "--set", "crds.install=false", "--set", "managementCluster.url="+w.hub.Config.Host)
	w.wantRunning("towline-hub", "towline-hub", "towline-hub-eu", "towline-hub-eu")
	for _, pod := range w.hubPods() {
		if slices.Contains(old, pod) {
			w.t.Errorf("pod %s was not replaced", pod)
		}
	}
	// The former chart had the policy, so Helm has deleted it.
	w.eventually("the hub limits tokens again, although it does not install CRDs", func() error {
		policy, err := w.tokenPolicy()
		if err == nil && (policy == "" || policy == former) {
			err = fmt.Errorf("the policy has uid %q, before the upgrade %q", policy, former)
		}
		return err
	})
	if out := w.helm(w.hub, "history", "projectsveltos", "-n", "projectsveltos"); !strings.Contains(out, "projectsveltos-1.0.2") {
		w.t.Errorf("helm history printed %q, want release projectsveltos-1.0.2", out)
	}
}

// tokenPolicy returns the uid of the policy that limits the tokens of agents, "" if it does not exist.
func (w *helmWorld) tokenPolicy() (string, error) {
	return w.try(w.hub, "kubectl", "get", "validatingadmissionpolicy", "towline-token-life", "--ignore-not-found", "-o", "jsonpath={.metadata.uid}")
}

// wantConnected checks that both members were connected all the time.
func (w *helmWorld) wantConnected(watched string) {
	w.t.Helper()
	for _, member := range []string{"cluster01", "cluster02"} {
		seen := false
		for line := range strings.Lines(watched) {
			if strings.HasPrefix(line, member) {
				seen = true
				if err := wantFields(line, member, "true", "Healthy"); err != nil {
					w.t.Errorf("during the upgrade: %v", err)
				}
			}
		}
		if !seen {
			w.t.Errorf("the watch does not show %s:\n%s", member, watched)
		}
	}
}

// deployAfterUpgrade checks the values of the upgrade: the hub's address, the image of agents, and the shard.
func (w *helmWorld) deployAfterUpgrade() {
	w.t.Helper()
	w.kubectlApply(w.hub, edgeCluster)
	w.eventually("the hub keeps a manifest for edge/shop", func() error {
		out, err := w.try(w.hub, "kubectl", "get", "secret", join.RegistrationSecret("shop"), "-n", "edge", "-o", `jsonpath={.data.manifest\.yaml}`)
		manifest, errDecode := base64.StdEncoding.DecodeString(out)
		if err := errors.Join(err, errDecode); err != nil {
			return err
		}
		return w.wantManifest(manifest)
	})
	// The hub of shard eu becomes responsible for cluster02.
	w.kubectl(w.hub, "annotate", "sveltosclusters", "cluster02", "-n", "aks", "sharding.projectsveltos.io/key=eu")
	w.kubectl(w.hub, "label", "sveltosclusters", "cluster01", "-n", "rke2", "req=tetragon")
	w.kubectl(w.hub, "label", "sveltosclusters", "cluster02", "-n", "aks", "req=tetragon")
	w.kubectlApply(w.hub, fmt.Sprintf(seed001Tetragon, w.Charts))
	w.wantTetragon()
}

// wantManifest checks that an agent's manifest has the image of the hub, and the address of the chart's values.
func (w *helmWorld) wantManifest(manifest []byte) error {
	if want := "image: " + w.image + ":v1.0.2\n"; !bytes.Contains(manifest, []byte(want)) {
		return fmt.Errorf("the manifest does not contain %q", want)
	}
	encoded := regexp.MustCompile(`(?m)^  kubeconfig: (\S+)$`).FindSubmatch(manifest)
	if encoded == nil {
		return errors.New("the manifest has no kubeconfig")
	}
	kubeconfig, err := base64.StdEncoding.DecodeString(string(encoded[1]))
	if want := "server: " + w.hub.Config.Host + "\n"; err == nil && !bytes.Contains(kubeconfig, []byte(want)) {
		return fmt.Errorf("the kubeconfig in the manifest does not contain %q", want)
	}
	return err
}

func (w *helmWorld) wantTetragon() {
	w.t.Helper()
	w.eventually("both clusters get tetragon", func() error {
		return errors.Join(
			w.wantStatuses("rke2", "tetragon-rke2-deploy-sveltos-cluster01", "Provisioned"),
			w.wantStatuses("aks", "tetragon-rke2-deploy-sveltos-cluster02", "Provisioned"))
	})
	for _, plane := range []*localkube.Plane{w.rke2, w.aks} {
		w.wantDeployments(plane, "kube-system", "deployment.apps/tetragon")
	}
}

// redeploy clears the status of the summaries of tetragon: the hub that was installed again reports that they are
// provisioned.
func (w *helmWorld) redeploy() {
	w.t.Helper()
	for namespace, summary := range map[string]string{
		"rke2": "tetragon-rke2-deploy-sveltos-cluster01", "aks": "tetragon-rke2-deploy-sveltos-cluster02",
	} {
		w.kubectl(w.hub, "patch", "clustersummary", summary, "-n", namespace, "--subresource=status", "--type=merge", "-p", `{"status":null}`)
	}
	w.wantTetragon()
}

// wantKyverno waits until both clusters are ready and have kyverno.
func (w *helmWorld) wantKyverno() {
	w.t.Helper()
	w.awaitReady("rke2", "cluster01")
	w.awaitReady("aks", "cluster02")
	w.awaitProvisioned("rke2", "deploy-kyverno-sveltos-cluster01")
	w.awaitProvisioned("aks", "deploy-kyverno-sveltos-cluster02")
	for _, plane := range []*localkube.Plane{w.rke2, w.aks} {
		w.wantDeployments(plane, "kyverno", "deployment.apps/kyverno-latest")
	}
}

// hubPods returns the names of the pods in namespace projectsveltos of the hub.
func (w *helmWorld) hubPods() []string {
	return strings.Fields(w.kubectl(w.hub, "get", "pods", "-n", "projectsveltos", "-o", "jsonpath={.items[*].metadata.name}"))
}

// wantRunning waits until `kubectl get pods -n projectsveltos` shows exactly one running pod for each Deployment.
func (w *helmWorld) wantRunning(deployments ...string) {
	w.t.Helper()
	w.eventually("the pods of the hub belong to "+strings.Join(deployments, ", "), func() error {
		table := w.kubectl(w.hub, "get", "pods", "-n", "projectsveltos", "--no-headers", "--sort-by=metadata.name")
		var got []string
		for line := range strings.Lines(table) {
			if err := wantFields(line, "*", "1/1", "Running", "*", "*"); err != nil {
				return err
			}
			// <deployment>-<hash of the template>-<random>
			parts := strings.Split(strings.Fields(line)[0], "-")
			got = append(got, strings.Join(parts[:max(0, len(parts)-2)], "-"))
		}
		slices.Sort(got)
		if !slices.Equal(got, deployments) {
			return fmt.Errorf("pods are of %q, want %q", got, deployments)
		}
		return nil
	})
}

// awaitLeaseRenewal waits until the agent of cluster01 has renewed its Lease.
func (w *helmWorld) awaitLeaseRenewal() {
	w.t.Helper()
	since := time.Now()
	hubClient := w.client(w.hub)
	w.eventually("the agent renews its Lease", func() error {
		lease := &coordinationv1.Lease{}
		if err := hubClient.Get(w.t.Context(), client.ObjectKey{Namespace: "rke2", Name: "cluster01"}, lease); err != nil {
			return err
		}
		if lease.Spec.RenewTime == nil || lease.Spec.RenewTime.Time.Before(since) {
			return fmt.Errorf("renewed at %v", lease.Spec.RenewTime)
		}
		return nil
	})
}

// fleetIdentities returns the identities of all objects that an upgrade and an uninstallation must keep, by cluster.
func (w *helmWorld) fleetIdentities() map[string][]string {
	w.t.Helper()
	identities := map[string][]string{}
	list := func(plane *localkube.Plane, columns, kinds string, scope ...string) {
		table := w.kubectl(plane, append([]string{"get", kinds, "--no-headers", "-o", "custom-columns=" + columns}, scope...)...)
		identities[plane.Name+" "+kinds] = slices.Sorted(strings.Lines(table))
	}
	const uid = "K:.kind,NS:.metadata.namespace,N:.metadata.name,UID:.metadata.uid"
	list(w.hub, uid, "customresourcedefinitions")
	list(w.hub, uid, "sveltosclusters,clusterprofiles,clustersummaries,clusterconfigurations", "-A")
	list(w.hub, uid, "serviceaccounts,secrets,roles,rolebindings", "-n", "rke2")
	list(w.hub, uid+",GEN:.metadata.generation", "configurationgroups", "-A")
	for _, member := range []*localkube.Plane{w.rke2, w.aks} {
		list(member, uid+",GEN:.metadata.generation", "deployments", "-A")
		list(member, uid, "services,configmaps,serviceaccounts,clusterroles,customresourcedefinitions", "-A")
		list(member, uid, "pods", "-n", "projectsveltos")
	}
	return identities
}

// wantFleet checks that no object of the fleet was deleted, created again or changed.
func (w *helmWorld) wantFleet(step string, before map[string][]string) {
	w.t.Helper()
	if diff := cmp.Diff(before, w.fleetIdentities()); diff != "" {
		w.t.Errorf("fleet after %s (-before +after):\n%s", step, diff)
	}
}

// TestInstallByHelmTakesOver makes a release of a hub that was installed with config/hub.yaml, and moves its cache.
func TestInstallByHelmTakesOver(t *testing.T) {
	awaitSlot(t)
	// No program runs here: pods of an unknown image are reported as running.
	w := &world{t: t, dir: t.TempDir(), hub: localkube.ForTest(t, localkube.Named("hub")), clients: &sync.Map{}}
	w.kubectl(w.hub, "apply", "-f", "../../config/hub.yaml")
	get := func(path string) string {
		return w.kubectl(w.hub, "get", "deployment", "towline-hub", "-n", "projectsveltos", "-o", "jsonpath="+path)
	}
	uid := get("{.metadata.uid}")
	const args, chart, namespace = "{.spec.template.spec.containers[0].args}", "../../charts/towline", "--namespace=projectsveltos"
	w.helm(w.hub, "install", "towline", chart, namespace, "--take-ownership", "--server-side=false", "--set=log.verbosity=3")
	if got := get(args); !strings.Contains(got, `"--v=3"`) {
		t.Errorf("arguments are %s after the release took over, want --v=3", got)
	}
	w.helm(w.hub, "upgrade", "towline", chart, namespace, "--set=log.verbosity=4")
	if got := get(args); !strings.Contains(got, `"--v=4"`) {
		t.Errorf("arguments are %s after the upgrade, want --v=4", got)
	}
	if got := get("{.metadata.uid}"); got != uid {
		t.Errorf("the Deployment has uid %s, want %s", got, uid)
	}

	w.helm(w.hub, "uninstall", "towline", namespace)
	w.helm(w.hub, "install", "towline", chart, namespace)
	const volume = "{.spec.template.spec.volumes[?(@.name=='cache')]}"
	for _, step := range []struct{ persistent, want string }{
		{"true", `{"name":"cache","persistentVolumeClaim":{"claimName":"towline-hub-cache"}}`},
		{"false", `{"emptyDir":{"sizeLimit":"2Gi"},"name":"cache"}`},
	} {
		w.helm(w.hub, "upgrade", "towline", chart, namespace, "--set=cache.persistent="+step.persistent)
		if got := get(volume); got != step.want {
			t.Errorf("cache.persistent=%s: volume %s, want %s", step.persistent, got, step.want)
		}
	}
}
