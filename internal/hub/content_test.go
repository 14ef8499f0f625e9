package hub_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// helm is what is expected of the Helm feature.
func helm(status libv1beta1.FeatureStatus, message string) configv1beta1.FeatureSummary {
	return configv1beta1.FeatureSummary{FeatureID: libv1beta1.FeatureHelm, Status: status, FailureMessage: message}
}

func TestProfileReadsItsOwnNamespaceOnly(t *testing.T) {
	w := newWorld(t)
	w.configMap("manifests", manifest("a"))
	elsewhere := w.plane.Namespace(t, "elsewhere")
	w.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: elsewhere, Name: "manifests"}, Data: map[string]string{"content": manifest("hidden")}})
	one := w.member("one", w.prod())
	update(w, one, func(c *libv1beta1.SveltosCluster) { c.Annotations = map[string]string{"elsewhere": elsewhere} })
	profile := &configv1beta1.Profile{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "p"},
		Spec: configv1beta1.ProfileSpec{
			ClusterSelector: metav1.LabelSelector{MatchLabels: map[string]string{"env": "prod"}},
			PolicyRefs:      []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Namespace: "{{ .Cluster.metadata.annotations.elsewhere }}", Name: "manifests"}},
			HelmCharts: []configv1beta1.HelmChart{{
				RepositoryURL: "http://127.0.0.1:1", RepositoryName: "r", ChartName: "r/c", ChartVersion: "1.0.0", ReleaseName: "c", ReleaseNamespace: "c",
				RegistryCredentialsConfig: &configv1beta1.RegistryCredentialsConfig{Credentials: &corev1.SecretReference{Namespace: elsewhere, Name: "login"}},
			}},
		},
	}
	w.create(profile)
	only := ": a Profile reads its own namespace " + w.ns + " only"
	w.wantFeature(profile, "one", configv1beta1.FeatureSummary{
		FeatureID: libv1beta1.FeatureResources, Status: libv1beta1.FeatureStatusFailedNonRetriable, FailureMessage: "ConfigMap " + elsewhere + "/manifests" + only,
	})
	w.wantFeature(profile, "one", helm(libv1beta1.FeatureStatusFailedNonRetriable,
		"helm release c/c: registryCredentialsConfig.credentials: Secret "+elsewhere+"/login"+only))
	update(w, profile, func(p *configv1beta1.Profile) {
		p.Spec.HelmCharts, p.Spec.PolicyRefs[0].Namespace = nil, w.ns
	})
	w.wantProvisioned(profile, "one")
	if err := same([]string{"ConfigMap default/a"}, w.refs("one", "Resources")); err != nil {
		t.Errorf("one has %v", err)
	}
	w.must(w.Delete(t.Context(), profile))
	w.wantGone(profile, "one")
}
