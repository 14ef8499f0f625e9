package stories

import (
	"cmp"
	"errors"
	"fmt"
	"net/http/httptest"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/localkube"
)

// serveRepository starts a repository with charts of the story.
func (w *world) serveRepository(charts ...examples.Chart) {
	w.t.Helper()
	repository, err := examples.Repository(charts...)
	if err != nil {
		w.t.Fatal(err)
	}
	server := httptest.NewServer(repository)
	w.t.Cleanup(server.Close)
	w.Charts = server.URL
}

// helmMember is a member on which a story deploys one chart. A profile named after the release selects it.
type helmMember struct {
	*world
	plane   *localkube.Plane
	cluster string // also its mode: pushed or pulled
	chart   string
	version string
	release string // also its namespace and a part of the name of the profile
	values  map[string]any
	options map[string]any
	// login names a Secret in namespace fleet with the login for the repository; "" stands for none.
	login string
	// shared is the name of a profile for several members, and the value of the label mode that it selects.
	shared string
}

// manifest returns the profile.
func (m *helmMember) manifest() string {
	m.t.Helper()
	values, err := yaml.Marshal(m.values)
	if err != nil {
		m.t.Fatal(err)
	}
	chart := map[string]any{
		"repositoryURL": m.Charts, "repositoryName": "stories", "chartName": "stories/" + m.chart, "chartVersion": m.version,
		"releaseName": m.release, "releaseNamespace": m.release, "values": string(values),
	}
	if m.options != nil {
		chart["options"] = m.options
	}
	if m.login != "" {
		chart["registryCredentialsConfig"] = map[string]any{"credentials": map[string]any{"namespace": "fleet", "name": m.login}}
	}
	text, err := yaml.Marshal(map[string]any{
		"apiVersion": "config.projectsveltos.io/v1beta1", "kind": "ClusterProfile", "metadata": map[string]any{"name": m.profile()},
		"spec": map[string]any{
			"clusterSelector": map[string]any{"matchLabels": map[string]any{"mode": cmp.Or(m.shared, m.cluster)}},
			"helmCharts":      []any{chart},
		},
	})
	if err != nil {
		m.t.Fatal(err)
	}
	return string(text)
}

func (m *helmMember) profile() string { return cmp.Or(m.shared, m.release+"-"+m.cluster) }

func (m *helmMember) summary() string { return m.profile() + "-sveltos-" + m.cluster }

// deploy applies the profile.
func (m *helmMember) deploy() {
	m.t.Helper()
	m.apply(m.hub, m.manifest())
}

// awaitRevision waits until a revision of the release is deployed and its summary reports that.
func (m *helmMember) awaitRevision(revision int) {
	m.t.Helper()
	m.eventually(fmt.Sprintf("revision %d of %s is deployed on %s", revision, m.release, m.cluster), func() error {
		reported := m.wantStatuses("fleet", m.summary(), "Provisioned")
		record := &corev1.Secret{}
		name := fmt.Sprintf("sh.helm.release.v1.%s.v%d", m.release, revision)
		err := m.client(m.plane).Get(m.t.Context(), client.ObjectKey{Namespace: m.release, Name: name}, record)
		if status := record.Labels["status"]; err == nil && status != "deployed" {
			err = fmt.Errorf("revision %d is %s", revision, status)
		}
		return errors.Join(err, reported)
	})
}

// awaitFailure waits until the summary reports that the chart failed, with a message that has all texts. It returns the
// message.
func (m *helmMember) awaitFailure(texts ...string) string {
	m.t.Helper()
	var message string
	m.eventually(fmt.Sprintf("%s fails on %s", m.release, m.cluster), func() error {
		summary := &configv1beta1.ClusterSummary{}
		if err := m.client(m.hub).Get(m.t.Context(), client.ObjectKey{Namespace: "fleet", Name: m.summary()}, summary); err != nil {
			return err
		}
		for _, feature := range summary.Status.FeatureSummaries {
			message = feature.FailureMessage
			if !strings.HasPrefix(string(feature.Status), "Failed") {
				return fmt.Errorf("feature %s is %s: %s", feature.FeatureID, feature.Status, message)
			}
			for _, text := range texts {
				if !strings.Contains(message, text) {
					return fmt.Errorf("the message is %q, want it to contain %q", message, text)
				}
			}
		}
		if message == "" {
			return errors.New("the summary reports no failure")
		}
		return nil
	})
	return message
}

// gatedPushMember registers a member in push mode. The hub connects to it through a gate.
func (w *world) gatedPushMember(namespace, cluster, labels string) (*localkube.Plane, *gate) {
	w.t.Helper()
	plane := localkube.ForTest(w.t, localkube.Named(cluster))
	g := w.startGate(plane.Config)
	w.run(w.hub, "sveltosctl", "register", "cluster", "--namespace="+namespace, "--cluster="+cluster,
		"--kubeconfig="+w.writeGateKubeconfig(cluster+".kubeconfig", g), "--labels="+labels)
	w.awaitReady(namespace, cluster)
	return plane, g
}
