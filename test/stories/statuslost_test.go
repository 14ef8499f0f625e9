package stories

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/localkube"
)

// tampering returns another status of a ClusterSummary, which the test writes instead of the hub. older is an earlier
// status of the summary.
type tampering func(older configv1beta1.ClusterSummaryStatus) configv1beta1.ClusterSummaryStatus

// tamperings are the ways in which a status is lost.
var tamperings = map[string]tampering{
	"cleared": func(configv1beta1.ClusterSummaryStatus) configv1beta1.ClusterSummaryStatus {
		return configv1beta1.ClusterSummaryStatus{}
	},
	"nonsense": func(configv1beta1.ClusterSummaryStatus) configv1beta1.ClusterSummaryStatus {
		return configv1beta1.ClusterSummaryStatus{FeatureSummaries: []configv1beta1.FeatureSummary{
			{FeatureID: libv1beta1.FeatureResources, Status: libv1beta1.FeatureStatusRemoved},
			{FeatureID: libv1beta1.FeatureHelm, Status: libv1beta1.FeatureStatusRemoved, Hash: []byte("nonsense")},
		}}
	},
	"restored": func(older configv1beta1.ClusterSummaryStatus) configv1beta1.ClusterSummaryStatus { return older },
}

// statusProfile is a ClusterProfile on one member. Its status is lost.
type statusProfile struct {
	*world
	name      string
	cluster   string
	member    *localkube.Plane
	tampering tampering
	older     configv1beta1.ClusterSummaryStatus
}

// manifest returns the profile: with a ConfigMap, and from version 2 on with a chart.
func (p *statusProfile) manifest(version int) string {
	text := fmt.Sprintf(`
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: %[1]s-content}
data:
  objects.yaml: |
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: default, name: %[1]s}
    data: {version: "%[2]d"}
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: %[1]s}
spec:
  clusterSelector: {matchLabels: {%[1]s: deploy}}
  policyRefs: [{kind: ConfigMap, namespace: default, name: %[1]s-content}]
`, p.name, version)
	if version < 2 {
		return text
	}
	return text + fmt.Sprintf(`  helmCharts:
  - {repositoryURL: %[2]s, repositoryName: examples, chartName: examples/%[1]s, chartVersion: v0.1.0, releaseName: %[1]s, releaseNamespace: %[1]s}
`, p.name, p.Charts)
}

func (p *statusProfile) summary() string { return p.name + "-sveltos-" + p.cluster }

// label makes the member match the profile, or stop matching with "-".
func (p *statusProfile) label(suffix string) {
	p.kubectl(p.hub, "label", "sveltoscluster", p.cluster, "-n", "fleet", p.name+suffix, "--overwrite")
}

// deploy deploys version 1 and then version 2.
func (p *statusProfile) deploy() {
	p.t.Helper()
	p.apply(p.hub, p.manifest(1))
	p.label("=deploy")
	p.wantDeployed("1", "Resources")
	p.older = p.status()
	p.apply(p.hub, p.manifest(2))
	p.wantDeployed("2", "Resources", "Helm")
}

func (p *statusProfile) status() configv1beta1.ClusterSummaryStatus {
	p.t.Helper()
	summary := &configv1beta1.ClusterSummary{}
	if err := p.client(p.hub).Get(p.t.Context(), client.ObjectKey{Namespace: "fleet", Name: p.summary()}, summary); err != nil {
		p.t.Fatal(err)
	}
	return summary.Status
}

// tamper changes the status of the summary, if there is one; it returns false if there is none.
func (p *statusProfile) tamper() bool {
	p.t.Helper()
	hub := p.client(p.hub)
	for {
		summary := &configv1beta1.ClusterSummary{}
		err := hub.Get(p.t.Context(), client.ObjectKey{Namespace: "fleet", Name: p.summary()}, summary)
		if err == nil {
			summary.Status = p.tampering(p.older)
			err = hub.Status().Update(p.t.Context(), summary)
		}
		switch {
		case apierrors.IsNotFound(err):
			return false
		case err == nil:
			return true
		case !apierrors.IsConflict(err):
			p.t.Fatal(err)
		}
	}
}

// tamperUntilDeleted changes the status repeatedly until the summary is deleted.
func (p *statusProfile) tamperUntilDeleted() {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), waitTimeout)
	defer cancel()
	for p.tamper() {
		select {
		case <-ctx.Done():
			p.t.Fatalf("summary %s is not deleted within %s", p.summary(), waitTimeout)
		case <-time.After(time.Second): // the hub needs a moment between two changes
		}
	}
}

// wantDeployed waits until the member has a version, and the summary reports exactly these features as provisioned.
func (p *statusProfile) wantDeployed(version string, features ...string) {
	p.t.Helper()
	p.eventually(p.name+" is deployed", func() error {
		data, err := p.data(p.member, "default", p.name)
		if err != nil {
			return err
		}
		got := []string{data["version"]}
		summary := &configv1beta1.ClusterSummary{}
		if err := p.client(p.hub).Get(p.t.Context(), client.ObjectKey{Namespace: "fleet", Name: p.summary()}, summary); err != nil {
			return err
		}
		for _, feature := range summary.Status.FeatureSummaries {
			got = append(got, string(feature.FeatureID)+" "+string(feature.Status))
		}
		want := []string{version}
		for _, feature := range features {
			want = append(want, feature+" Provisioned")
		}
		if diff := cmp.Diff(want, got); diff != "" {
			return fmt.Errorf("version and features (-want +got):\n%s", diff)
		}
		return nil
	})
}

// objects lists the objects of the profile on the member, with uids and resourceVersions.
func (p *statusProfile) objects() string {
	p.t.Helper()
	format := `custom-columns=KIND:.kind,NAME:.metadata.name,UID:.metadata.uid,VERSION:.metadata.resourceVersion`
	return p.kubectl(p.member, "get", "configmap", p.name, "-o", format) + p.kubectl(p.member, "get", "services", "-n", p.name, "-o", format)
}

// wantWithdrawn waits until the member and the hub have no object of the profile.
func (p *statusProfile) wantWithdrawn() {
	p.t.Helper()
	p.eventually(p.name+" is withdrawn", func() error {
		groups := p.kubectl(p.hub, "get", "configurationgroups", "-A", "-o", "yaml")
		if strings.Contains(groups, p.summary()) {
			return errors.New("a group is left")
		}
		return errors.Join(p.wantMissing(p.member, &corev1.ConfigMap{}, p.name, "default"), p.wantMissing(p.member, &appsv1.Deployment{}, p.name, p.name))
	})
}

// TestStatusLost loses the status of ClusterSummaries in every way, at every step: the member always gets the desired
// objects, no object is changed without need, and the status is soon true again. Withdrawals do not need the status.
func TestStatusLost(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	push, pull := w.pushMember("fleet", "pushed", "tier=one"), w.pullMember("fleet", "pulled", "tier=one")
	w.serveCharts()
	var all []*statusProfile
	for what, tampering := range tamperings {
		all = append(all,
			&statusProfile{name: "push-" + what, cluster: "pushed", member: push, tampering: tampering},
			&statusProfile{name: "pull-" + what, cluster: "pulled", member: pull, tampering: tampering})
	}
	t.Run("one profile at a time", func(t *testing.T) {
		for _, p := range all {
			t.Run(p.name, func(t *testing.T) {
				t.Parallel()
				p := *p
				p.world = w.forSubtest(t)
				p.losesStatusAtEveryMoment()
			})
		}
	})
	for _, p := range all {
		p.world = w
		p.deploy()
	}
	w.losesClusterStatus(all)
	w.losesGroupStatus(all)

	// The hub is killed between the loss and the withdrawal.
	w.hubProcess.kill()
	for _, p := range all {
		p.tamper()
		w.kubectl(w.hub, "delete", "clusterprofile", p.name, "--wait=false")
	}
	w.startHub()
	for _, p := range all {
		p.wantWithdrawn()
	}

	for _, p := range all {
		p.deploy()
		p.tamper()
	}
	for _, cluster := range []string{"pushed", "pulled"} {
		done := w.start("deregister", w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster="+cluster)
		for _, p := range all {
			if p.cluster == cluster {
				p.tamperUntilDeleted()
			}
		}
		<-done.exited
		if code := done.cmd.ProcessState.ExitCode(); code != 0 {
			t.Errorf("deregister of %s exits with %d:\n%s", cluster, code, done.out.String())
		}
	}
	for _, p := range all {
		p.wantWithdrawn()
	}
}

// serveCharts serves a chart for each profile: the profiles are on the same member, and each chart defines a kind.
func (w *world) serveCharts() {
	w.t.Helper()
	var charts []examples.Chart
	for what := range tamperings {
		charts = append(charts, examples.Chart{Name: "push-" + what}, examples.Chart{Name: "pull-" + what})
	}
	repository, err := examples.Repository(charts...)
	if err != nil {
		w.t.Fatal(err)
	}
	server := httptest.NewServer(repository)
	w.t.Cleanup(server.Close)
	w.Charts = server.URL
}

// losesStatusAtEveryMoment loses the status after and during a rollout, a relabel and a withdrawal.
func (p *statusProfile) losesStatusAtEveryMoment() {
	p.t.Helper()
	p.deploy()
	before := p.objects()
	p.tamper()
	p.wantDeployed("2", "Resources", "Helm")
	if diff := cmp.Diff(before, p.objects()); diff != "" {
		p.t.Errorf("objects were touched when the status was lost (-before +after):\n%s", diff)
	}

	p.tamper()
	p.apply(p.hub, p.manifest(3))
	for range 3 {
		p.tamper()
	}
	p.wantDeployed("3", "Resources", "Helm")

	p.tamper()
	p.label("-")
	p.tamperUntilDeleted()
	p.wantWithdrawn()
	p.label("=deploy")
	p.wantDeployed("3", "Resources", "Helm")
	p.tamper()
	p.wantDeployed("3", "Resources", "Helm")

	p.tamper()
	p.kubectl(p.hub, "delete", "clusterprofile", p.name, "--wait=false")
	p.tamperUntilDeleted()
	p.wantWithdrawn()
}

// losesClusterStatus clears the status of the clusters: their summaries stay, and so do the deployed objects.
func (w *world) losesClusterStatus(all []*statusProfile) {
	w.t.Helper()
	before := map[string]string{}
	for _, p := range all {
		before[p.name] = p.objects()
	}
	for _, cluster := range []string{"pushed", "pulled"} {
		w.kubectl(w.hub, "patch", "sveltoscluster", cluster, "-n", "fleet", "--subresource=status", "--type=merge", "-p", `{"status":null}`)
	}
	for _, cluster := range []string{"pushed", "pulled"} {
		w.awaitReady("fleet", cluster)
	}
	for _, p := range all {
		p.wantDeployed("2", "Resources", "Helm")
		if diff := cmp.Diff(before[p.name], p.objects()); diff != "" {
			w.t.Errorf("%s: objects were touched when the status of the cluster was lost (-before +after):\n%s", p.name, diff)
		}
	}
}

// losesGroupStatus clears the status of all groups: their agent reports again.
func (w *world) losesGroupStatus(all []*statusProfile) {
	w.t.Helper()
	groups := &libv1beta1.ConfigurationGroupList{}
	hub := w.client(w.hub)
	if err := hub.List(w.t.Context(), groups); err != nil {
		w.t.Fatal(err)
	}
	for i := range groups.Items {
		group := &groups.Items[i]
		w.kubectl(w.hub, "patch", "configurationgroup", group.Name, "-n", group.Namespace, "--subresource=status", "--type=merge", "-p", `{"status":null}`)
	}
	for _, p := range all {
		p.wantDeployed("2", "Resources", "Helm")
	}
	w.awaitNoBundles()
}
