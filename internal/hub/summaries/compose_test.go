package summaries_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/hub/summaries"
	"github.com/towline/towline/internal/source"
)

func TestReferencesOfAProfileAreInItsNamespace(t *testing.T) {
	t.Parallel()
	summary := &configv1beta1.ClusterSummary{}
	spec := &summary.Spec.ClusterProfileSpec
	for _, namespace := range []string{"", "eu", "us"} {
		spec.PolicyRefs = append(spec.PolicyRefs, libv1beta1.PolicyRef{Kind: libv1beta1.SourceConfigMap, Namespace: namespace, Name: "manifests" + namespace})
		spec.KustomizationRefs = append(spec.KustomizationRefs, configv1beta1.KustomizationRef{
			Kind: libv1beta1.SourceConfigMap, Namespace: namespace, Name: "app" + namespace,
			ValuesFrom: []configv1beta1.ValueFrom{{Kind: configv1beta1.ValueFromConfigMap, Namespace: namespace, Name: "appvalues" + namespace}},
		})
		spec.HelmCharts = append(spec.HelmCharts, configv1beta1.HelmChart{
			ValuesFrom: []configv1beta1.ValueFrom{{Kind: configv1beta1.ValueFromSecret, Namespace: namespace, Name: "values" + namespace}},
			RegistryCredentialsConfig: &configv1beta1.RegistryCredentialsConfig{
				Credentials: &corev1.SecretReference{Namespace: namespace, Name: "login" + namespace},
				CA:          &corev1.SecretReference{Namespace: namespace, Name: "ca" + namespace},
			},
			ProvenanceVerification: &configv1beta1.ProvenanceVerification{
				KeyringSecretRef: &corev1.SecretReference{Namespace: namespace, Name: "keyring" + namespace},
			},
			SignatureVerification: &configv1beta1.SignatureVerification{
				SecretRef: &corev1.SecretReference{Namespace: namespace, Name: "cosign" + namespace},
			},
		})
	}
	references := func(restricted string) []string {
		var texts []string
		for _, ref := range (&summaries.Composer{}).References(summaries.ComposeRequest{Summary: summary, TemplateContext: source.TemplateContext{Namespace: "eu", RestrictedNamespace: restricted}}) {
			texts = append(texts, ref.String())
		}
		return texts
	}
	own := []string{
		"ConfigMap eu/manifests", "ConfigMap eu/manifestseu",
		"ConfigMap eu/app", "ConfigMap eu/appvalues", "ConfigMap eu/appeu", "ConfigMap eu/appvalueseu",
		"Secret eu/values", "Secret eu/login", "Secret eu/ca", "Secret eu/keyring", "Secret eu/cosign",
		"Secret eu/valueseu", "Secret eu/logineu", "Secret eu/caeu", "Secret eu/keyringeu", "Secret eu/cosigneu",
	}
	if diff := cmp.Diff(own, references("eu")); diff != "" {
		t.Errorf("of a Profile (-want +got):\n%s", diff)
	}
	if got := references(""); len(got) != len(own)+8 {
		t.Errorf("of a ClusterProfile: %v", got)
	}
}
