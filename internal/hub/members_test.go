package hub_test

import (
	"fmt"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
)

// wantCluster waits until want returns true for the status of a cluster.
func (w *world) wantCluster(cluster *libv1beta1.SveltosCluster, want func(libv1beta1.SveltosClusterStatus) bool) {
	w.Helper()
	w.eventually("cluster "+cluster.Name, func() error {
		if err := w.Get(w.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
			return err
		}
		if !want(cluster.Status) {
			return fmt.Errorf("status is %+v", cluster.Status)
		}
		return nil
	})
}

func TestPushMemberBecomesReady(t *testing.T) {
	w := newWorld(t)
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "one-sveltos-kubeconfig"}, Data: map[string][]byte{"kubeconfig": []byte("{")}}
	w.create(secret)
	one := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "one"}}
	w.create(one)
	w.wantCluster(one, func(s libv1beta1.SveltosClusterStatus) bool {
		return !s.Ready && s.ConnectionFailures == 1 && strings.Contains(s.FailureMessage, `key "kubeconfig" of secret `+w.ns+"/one-sveltos-kubeconfig: parse kubeconfig")
	})
	raw, err := os.ReadFile(w.plane.Kubeconfig)
	w.must(err)
	update(w, secret, func(s *corev1.Secret) { s.Data["kubeconfig"] = raw })
	w.wantCluster(one, func(s libv1beta1.SveltosClusterStatus) bool {
		return s.Ready && s.ConnectionStatus == libv1beta1.ConnectionHealthy && s.FailureMessage == "" && strings.HasPrefix(s.Version, "v1.") &&
			slices.Contains(s.APIVersions, "apps/v1/Deployment")
	})
	if one.Labels["sveltos-agent"] != "present" || !strings.HasPrefix(one.Labels["projectsveltos.io/k8s-version"], "v1.") {
		t.Errorf("labels = %v", one.Labels)
	}
	// The hub restores a lost status before the next health check is due.
	w.must(w.Status().Patch(t.Context(), one, client.RawPatch("application/merge-patch+json", []byte(`{"status":{"apiVersions":null}}`))))
	w.wantCluster(one, func(s libv1beta1.SveltosClusterStatus) bool {
		return slices.Contains(s.APIVersions, "apps/v1/Deployment")
	})
}

func TestUnsupportedClusterFieldIsReported(t *testing.T) {
	w := newWorld(t)
	one := &libv1beta1.SveltosCluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "one"},
		Spec: libv1beta1.SveltosClusterSpec{WorkloadIdentity: &libv1beta1.WorkloadIdentity{
			Provider: "OIDC", Endpoint: "https://127.0.0.1:1", OIDC: &libv1beta1.OIDCIdentity{},
		}},
	}
	w.create(one)
	w.wantCluster(one, func(s libv1beta1.SveltosClusterStatus) bool {
		return !s.Ready && s.FailureMessage == "spec.workloadIdentity.provider OIDC is not supported yet"
	})
}

func TestReleaseBelongsToOneProfile(t *testing.T) {
	w := newWorld(t)
	repository, err := examples.Repository()
	w.must(err)
	server := httptest.NewServer(repository)
	t.Cleanup(server.Close)
	w.createReadyMember("one", w.prodLabels())
	w.create(&corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "values"}, Type: libv1beta1.ProfileSecretType,
		StringData: map[string]string{"values": "replicas: 3\n"},
	})
	chart := func(s *configv1beta1.ProfileSpec) {
		s.PolicyRefs = nil
		s.HelmCharts = []configv1beta1.HelmChart{{
			RepositoryURL: server.URL, RepositoryName: "examples", ChartName: "examples/hello", ChartVersion: "0.1.0",
			ReleaseName: "hello", ReleaseNamespace: "hello",
			ValuesFrom: []configv1beta1.ValueFrom{{Kind: configv1beta1.ValueFromSecret, Namespace: w.ns, Name: "values"}},
		}}
	}
	helm := func(s libv1beta1.FeatureStatus, message string) configv1beta1.FeatureSummary {
		return configv1beta1.FeatureSummary{FeatureID: libv1beta1.FeatureHelm, Status: s, FailureMessage: message}
	}
	first := w.createProfile(chart)
	holder := w.wantFeature(first, "one", helm(libv1beta1.FeatureStatusProvisioned, ""))
	w.set(func(m *fakeTransport) {
		for _, b := range m.deployed {
			if !b.Sensitive() {
				t.Error("values from a Secret are not sensitive")
			}
		}
	})
	second := w.createProfile(chart)
	conflict := "helm release hello/hello is managed by ClusterSummary " + holder.Name
	conflicting := w.wantFeature(second, "one", helm(libv1beta1.FeatureStatusFailedNonRetriable, conflict))
	if got := conflicting.Status.HelmReleaseSummaries; len(got) != 1 || got[0].Status != configv1beta1.HelmChartStatusConflict || got[0].ConflictMessage != conflict {
		t.Errorf("helmReleaseSummaries = %+v", got)
	}
	w.eventually("event", func() error {
		if all := w.listEvents(conflicting); !slices.Contains(all, "Warning Conflict Feature: Helm: "+conflict) {
			return fmt.Errorf("events are %q", all)
		}
		return nil
	})
	w.must(w.Delete(t.Context(), first))
	w.wantFeature(second, "one", helm(libv1beta1.FeatureStatusProvisioned, ""))

	// A chart with the action Uninstall has no objects in the bundle.
	update(w, second, func(p *configv1beta1.ClusterProfile) {
		p.Spec.HelmCharts[0].HelmChartAction = configv1beta1.HelmChartActionUninstall
	})
	w.eventually("nothing is left", func() error { return checkEqual(0, len(w.refs("one", "Helm"))) })
}
