package source_test

import (
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/towline/towline/internal/source"
)

// webResources returns a Deployment with the identifier Web, a Secret, and an optional object that does not exist.
func webResources() source.Resources {
	return source.Resources{
		Objects: map[string]json.RawMessage{
			"Web": []byte(`{"apiVersion": "apps/v1", "kind": "Deployment",
				"metadata": {"namespace": "default", "name": "web", "uid": "u", "resourceVersion": "7", "generation": 2,
					"ownerReferences": [{"name": "owner"}], "finalizers": ["a/b"], "labels": {"tier": "front"},
					"annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "a": "b"}},
				"spec": {"replicas": 3}}`),
			"Login": []byte(`{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "login"}, "data": {"password": "aHVudGVyMg=="}}`),
		},
		Absent: []string{"Other"}, HasSecret: true, Digest: "d",
	}
}

func contextWithResources() source.TemplateContext {
	withResources := templateContext()
	withResources.Resources = webResources()
	return withResources
}

// TestFunctionsAreDocumented expands the examples in the documentation.
func TestFunctionsAreDocumented(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/templates.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := regexp.MustCompile("(?m)^\\| `(\\w+)` \\| `(.*)` \\| `(.*)` \\|$").FindAllStringSubmatch(string(text), -1)
	if len(rows) < 15 {
		t.Fatalf("the documentation has %d examples, want one for each function", len(rows))
	}
	for _, row := range rows {
		function, example, want := row[1], row[2], row[3]
		got, err := contextWithResources().Expand(function, example)
		if err != nil || strings.TrimSpace(got) != want || !strings.Contains(example, function) {
			t.Errorf("%s: got %q, %v, want %q", example, got, err, want)
		}
	}
}

func TestObjectFunctions(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		`{{ copy "Web" }}`: "apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  annotations:\n    a: b\n  labels:\n    tier: front\n" +
			"  name: web\n  namespace: default\nspec:\n  replicas: 3",
		`{{ .MgmtResources.Web.metadata.uid }}`: "u",
		// The functions do not change the object itself.
		`{{ $c := chainSetField (getResource "Web") "spec.replicas" (int64 9) }}{{ $c.spec.replicas }}{{ getField "Web" "spec.replicas" }}`:                               "93",
		`{{ $w := getResource "Web" }}{{ $c := chainRemoveField $w "spec" }}{{ hasKey $w "spec" }}{{ hasKey $c "spec" }}`:                                                 "truefalse",
		`{{ (fromYaml (setField "Web" "spec.ports" (list 1 (dict "a" true)))).spec.ports }}`:                                                                              "[1 map[a:true]]",
		`{{ getField "Web" "spec.none" }}{{ getField "Web" "spec.replicas.none" }}`:                                                                                       "",
		`{{ if getResource "Other" }}there{{ else }}absent{{ end }}{{ copy "Other" }}{{ getField "Other" "a" }}{{ setField "Other" "a" 1 }}{{ removeField "Other" "a" }}`: "absent",
		`{{ hasKey .MgmtResources "Other" }}`: "false",
		// An example of Sveltos: it changes each item of a list of maps.
		`{{ $l := list }}{{ range list (dict "image" "a") (dict "image" "b") }}{{ $l = append $l (chainSetField . "image" "c") }}{{ end }}{{ $l }}`: "[map[image:c] map[image:c]]",
	} {
		if got, err := contextWithResources().Expand("text", text); err != nil || got != want {
			t.Errorf("%s: got %q, %v, want %q", text, got, err, want)
		}
	}
}

// TestErrorsShowNoSecrets expands templates that fail with a value of a Secret.
func TestErrorsShowNoSecrets(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		`{{ fromJson .MgmtResources.Login.data.password }}`:                    "line 1:3: at <fromJson .MgmtResources.Login.data.password>: error calling fromJson (details",
		`{{ fail (getField "Login" "data.password") }}`:                        "error calling fail (details",
		`{{ range .MgmtResources.Login.data.password }}{{ end }}`:              "range can't iterate over this value (details",
		`{{ .MgmtResources.Login.data.user }}`:                                 `map has no entry for key "user"`,
		"{{ $p := b64dec .MgmtResources.Login.data.password }}\n{{ fail $p }}": "line 2:3: at <fail $p>: error calling fail (details",
	} {
		_, err := contextWithResources().Expand("text", text)
		wantInvalid(t, err, want)
		if strings.Contains(err.Error(), "aHVudGVyMg") || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: got %q", text, err)
		}
	}
	_, err := contextWithResources().Expand("text", `{{ fail "reason" }}`)
	wantInvalid(t, err, "error calling fail: reason")
}

func TestTemplatesThatReadOnlyResources(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{
		`{{ .MgmtResources.Web.metadata.name }}`:                                             true,
		`{{ $.MgmtResources.Web.metadata.name }}`:                                            true,
		`{{ copy "Web" }}`:                                                                   true,
		`{{ $w := getResource "Web" }}{{ $w.metadata.name }}`:                                true,
		`{{ range $k, $v := .MgmtResources.Web.metadata.labels }}{{ $k }}{{ . }}{{ end }}`:   true,
		`{{ with .MgmtResources.Web }}{{ .metadata.name }}{{ end }}`:                         true,
		`{{ define "t" }}{{ .metadata.name }}{{ end }}{{ template "t" .MgmtResources.Web }}`: true,
		`{{ with .MgmtResources.Web }}{{ $.ClusterName }}{{ end }}`:                          false,
		`{{ with .MgmtResources.Web }}{{ else }}{{ .ClusterName }}{{ end }}`:                 false,
		`{{ .MgmtResources.Web.metadata.name }}{{ .ClusterName }}`:                           false,
		`{{ define "t" }}{{ .ClusterName }}{{ end }}{{ template "t" . }}`:                    false,
		`{{ with . }}{{ .ClusterName }}{{ end }}`:                                            false,
		`{{ $x := . }}{{ with $x }}{{ .ClusterName }}{{ end }}`:                              false,
		`{{ range list $ }}{{ .Cluster.metadata.name }}{{ end }}`:                            false,
		`{{ toYaml . }}`:  false,
		`{{ upper "a" }}`: false, // reads no resources
	} {
		got, err := contextWithResources().ExpandTracked("text", text)
		if err != nil || got.OnlyResources != want {
			t.Errorf("%s: got %t, %v, want %t", text, got.OnlyResources, err, want)
		}
	}
}
