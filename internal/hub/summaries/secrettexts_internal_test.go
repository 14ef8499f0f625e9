package summaries

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/source"
)

// secretText is a text of Secrets that must be in no message.
const secretText = "hunter2"

// brokenTexts are contents of a key of a Secret that no reader accepts. Libraries have parts of them in their errors.
func brokenTexts() []string {
	object := "apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: default, name: content}\n"
	texts := []string{
		secretText, "- " + secretText, "a: [" + secretText, secretText + ": 1\n" + secretText + ": 2\n", "*" + secretText, "{{ " + secretText + " }}",
		"{{ fail \"" + secretText + "\" }}", "{{ template \"" + secretText + "\" }}", "!!int " + secretText, "%" + secretText, "\t" + secretText,
		"apiVersion: " + secretText, "kind: " + secretText, object + "data: " + secretText, object + "$patch: " + secretText, object + "data:\n  $patch: " + secretText + "\n",
		`{"patch": "` + secretText + `"}`, `{"patch": "[{\"op\": \"` + secretText + `\", \"path\": \"/a\"}]"}`,
		`{"patch": "[{\"op\": \"test\", \"path\": \"/data/value\", \"value\": \"` + secretText + `\"}]"}`,
		`{"patch": "[{\"op\": \"replace\", \"path\": \"/` + secretText + `/a/b\", \"value\": 1}]"}`,
		`{"patch": "[{\"op\": \"add\", \"path\": \"` + secretText + `\", \"value\": 1}]"}`,
		`{"patch": "[{\"op\": \"copy\", \"from\": \"/` + secretText + `\", \"path\": \"/a\"}]"}`,
		`{"patch": "kind: ` + secretText + `", "target": {"labelSelector": "` + secretText + ` ! ="}}`,
		`{"patch": "[]", "target": {"name": "[` + secretText + `"}}`,
		"resources: [" + secretText + "]", "resorces: " + secretText, "configMapGenerator: [{name: a, files: [" + secretText + "]}]", "patches: [{patch: '" + secretText + "'}]",
		"configMapGenerator: [{name: a, literals: [" + secretText + "]}]", "namespace: [" + secretText + "]",
	}
	return texts
}

func TestMessagesHaveNoTextOfSecrets(t *testing.T) {
	t.Parallel()
	r := newRestarts(t)
	composer := newTestComposer(r)
	failures := map[string]int{}
	for i, text := range brokenTexts() {
		for _, isTemplate := range []bool{false, true} {
			name := fmt.Sprintf("broken-%d-%t", i, isTemplate)
			secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: name}, Type: libv1beta1.ProfileSecretType}
			secret.Data = map[string][]byte{"kustomization.yaml": []byte(text)}
			if isTemplate {
				secret.Annotations = map[string]string{libv1beta1.TemplateAnnotation: ""}
			}
			r.must(r.hub.Create(t.Context(), secret))
			from := []configv1beta1.ValueFrom{{Kind: configv1beta1.ValueFromSecret, Name: name}}
			value := map[string]string{"kustomization.yaml": "resources: [a.yaml]\n", "a.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {a: '{{ index . \"kustomization.yaml\" | fromYaml }}', b: '{{ index . \"kustomization.yaml\" | int | fail }}'}\n"}
			if i == 0 && !isTemplate {
				r.must(r.hub.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "kustomization"}, Data: value}))
			}
			for feature, spec := range map[string]configv1beta1.ProfileSpec{
				"patches":             {PolicyRefs: []libv1beta1.PolicyRef{{Kind: "ConfigMap", Name: "content"}}, PatchesFrom: from},
				"manifests":           {PolicyRefs: []libv1beta1.PolicyRef{{Kind: "Secret", Name: name}}},
				"kustomize":           {KustomizationRefs: []configv1beta1.KustomizationRef{{Kind: "Secret", Name: name}}},
				"values of kustomize": {KustomizationRefs: []configv1beta1.KustomizationRef{{Kind: "ConfigMap", Name: "kustomization", ValuesFrom: from}}},
			} {
				summary := r.summary()
				summary.Spec.ClusterProfileSpec = spec
				id := libv1beta1.FeatureResources
				if len(spec.KustomizationRefs) > 0 {
					id = libv1beta1.FeatureKustomize
				}
				tmplCtx := source.TemplateContext{Namespace: "fleet", Name: "one", Sandbox: pool}
				_, err := composer.Compose(t.Context(), ComposeRequest{Summary: summary, TemplateContext: tmplCtx}, id)
				if err == nil {
					continue
				}
				failures[feature]++
				if strings.Contains(err.Error(), secretText) {
					t.Errorf("%s, %q: %v", feature, text, err)
				}
			}
			content, err := composer.Contents.Values(t.Context(), from[0], source.TemplateContext{Namespace: "fleet", Name: "one"})
			r.must(err)
			if _, err := render.Values("", []source.Content{content}, source.TemplateContext{Namespace: "fleet", Name: "one", Sandbox: pool}); err != nil {
				failures["values"]++
				if strings.Contains(err.Error(), secretText) {
					t.Errorf("values, %q: %v", text, err)
				}
			}
		}
	}
	for _, feature := range []string{"patches", "manifests", "kustomize", "values of kustomize", "values"} {
		if failures[feature] < 5 {
			t.Errorf("%s: only %d texts are refused", feature, failures[feature])
		}
	}
}
