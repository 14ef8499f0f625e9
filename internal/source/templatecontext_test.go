package source_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

func templateContext() source.TemplateContext {
	return source.TemplateContext{
		Namespace: "eu",
		Name:      "eu-1",
		Cluster: func() (map[string]any, error) {
			return map[string]any{
				"metadata": map[string]any{"name": "eu-1", "namespace": "eu", "labels": map[string]any{"env": "test"}},
				"spec":     map[string]any{"data": map[string]any{"toml": "port = 80\n", "day": "2020-01-02"}},
			}, nil
		},
	}
}

func TestExpand(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ text, want string }{
		"plain text":          {"web", "web"},
		"cluster object":      {"{{ .Cluster.metadata.name }}-{{ .Cluster.metadata.labels.env }}", "eu-1-test"},
		"cluster name":        {"{{ .ClusterNamespace }}/{{ .ClusterName }}", "eu/eu-1"},
		"sprig":               {`{{ upper .ClusterName | quote }}`, `"EU-1"`},
		"no HTML escapes":     {`{{ "a<b>&c" }}`, "a<b>&c"},
		"to YAML":             {`{{ dict "a" 1 | toYaml }}`, "a: 1"},
		"from YAML":           {`{{ (fromYaml "a: {b: c}").a.b }}`, "c"},
		"from a YAML array":   {`{{ index (fromYamlArray "[x, z]") 1 }}`, "z"},
		"from JSON":           {`{{ (fromJson "{\"a\": \"b\"}").a }}`, "b"},
		"from a JSON array":   {`{{ index (fromJsonArray "[\"x\"]") 0 }}`, "x"},
		"to TOML":             {`{{ dict "a" "b" | toToml }}`, "a = \"b\"\n"},
		"from TOML":           {`{{ (fromToml .Cluster.spec.data.toml).port }}`, "80"},
		"a date":              {`{{ .Cluster.spec.data.day | mustToDate "2006-01-02" | dateModify "36h" | date "Jan 2 15h" }}`, "Jan 3 12h"},
		"a date of seconds":   {`{{ htmlDate 86400 }} {{ dateInZone "15h" 0 "UTC" }} {{ durationRound "90s" }}`, "1970-01-02 00h 1m"},
		"field with a dot in": {`{{ index .Cluster.metadata.labels "env" }}`, "test"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := templateContext().Expand("text", test.text)
			if err != nil {
				t.Fatal(err)
			}
			if got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

// TestFunctionsOfMapsAreSorted expands functions of maps, whose results must have a sorted order.
func TestFunctionsOfMapsAreSorted(t *testing.T) {
	t.Parallel()
	const dict = `(dict "d" 4 "b" 2 "e" 5 "a" 1 "c" 3)`
	for text, want := range map[string]string{
		`{{ keys ` + dict + ` | join "," }}`:              "a,b,c,d,e",
		`{{ keys ` + dict + ` (dict "A" 1) | join "," }}`: "a,b,c,d,e,A",
		`{{ keys | len }}{{ keys (dict) | toJson }}`:      "0[]",
		`{{ values ` + dict + ` }}`:                       "[1 2 3 4 5]",
		`{{ values (dict) | toJson }}`:                    "[]",
	} {
		for range 20 {
			if got, err := templateContext().Expand("text", text); err != nil || got != want {
				t.Errorf("%s: got %q, %v, want %q", text, got, err, want)
				break
			}
		}
	}
}

func TestExpandRefuses(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ text, want string }{
		"missing field":      {"{{ .Cluster.metadata.labels.region }}", `map has no entry for key "region"`},
		"missing object":     {"{{ .MgmtResources.x }}", `map has no entry for key "x"`},
		"unknown object":     {`{{ getResource "x" }}`, `error calling getResource: templateResourceRefs has no identifier "x"`},
		"a recursion":        {`{{ define "t" }}{{ template "t" }}{{ end }}{{ template "t" }}`, "exceeded maximum template depth"},
		"nested ranges":      {`{{ $a := until 4000 }}{{ range $a }}{{ range $a }}{{ range $a }}{{ repeat 1000 "x" }}{{ end }}{{ end }}{{ end }}`, "line 1: the result is larger than 64 MiB"},
		"broken template":    {"{{ .Cluster", "unclosed action"},
		"the clock":          {"{{ now }}", `function "now" not defined`},
		"the date of today":  {`{{ date "2006" "2020-01-02" }}`, "a string is no time"},
		"the time since":     {`{{ durationRound (toDate "2006" "2020") }}`, "the time since then differs each time"},
		"an unknown zone":    {`{{ dateInZone "15" 0 "Nowhere/City" }}`, `time zone "Nowhere/City" is not known`},
		"chance":             {"{{ randAlphaNum 8 }}", `function "randAlphaNum" not defined`},
		"new certificates":   {`{{ genCA "ca" 1 }}`, `function "genCA" not defined`},
		"the environment":    {`{{ env "HOME" }}`, `function "env" not defined`},
		"too much":           {`{{ range until 1000 }}{{ repeat 1000000 "x" }}{{ end }}`, "larger than 64 MiB"},
		"too much in line 4": {"a\n{{- /* a\ncomment */ -}}\n{{ range until 1000 }}\n\n{{ repeat 1000000 \"x\" }}{{ end }}", "line 4: the result is larger than 64 MiB"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := templateContext().Expand("the text", test.text)
			wantInvalid(t, err, "the text", test.want)
		})
	}
}

func TestResultsWithoutTemplateContextAreShared(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{
		"plain": true,
		`{{ upper "a" | quote }}{{ $x := list 1 2 }}{{ index $x 0 }}{{ break_ }}`: true, // invalid syntax
		`{{ if true }}a{{ else if false }}b{{ else }}c{{ end }}`:                  true,
		`{{ fail "reason" }}`:                                             true,
		`{{ define "t" }}text{{ end }}{{ template "t" }}`:                 true,
		`{{ .ClusterName }}`:                                              false,
		`{{ $.ClusterName }}`:                                             false,
		`{{ . }}`:                                                         false,
		`{{ $x := . }}{{ index $x "ClusterName" }}`:                       false,
		`{{ (index . "Cluster").metadata.name }}`:                         false,
		`{{ printf "%v" (list $) }}`:                                      false,
		`{{ if .Cluster }}a{{ end }}`:                                     false,
		`{{ if true }}a{{ else }}{{ .Nothing }}{{ end }}`:                 false,
		`{{ range list 1 }}{{ $.ClusterName }}{{ end }}`:                  false,
		`{{ with "a" }}{{ else with .ClusterName }}{{ end }}`:             false,
		`{{ define "t" }}{{ .ClusterName }}{{ end }}{{ template "t" . }}`: false,
		`{{ block "t" . }}text{{ end }}`:                                  false,
		`{{ .Cluster.metadata.labels.region }}`:                           false, // an error
	} {
		got, err := templateContext().ExpandTracked("text", text)
		if got.IsShared != want {
			t.Errorf("%s: got %t, want %t (error: %v)", text, got.IsShared, want, err)
		}
	}
}

// TestSharedResultsAreExpandedOnce expands the same text for two clusters. Each expansion reads the cluster.
func TestSharedResultsAreExpandedOnce(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		text           string
		want           []string // "" for an error
		wantExpansions int
	}{
		"nothing":    {`{{ upper "a" }}{{ "{{ .Labels.job }}" }}`, []string{"A{{ .Labels.job }}", "A{{ .Labels.job }}"}, 1},
		"cluster":    {`{{ .ClusterName }}`, []string{"one", "two"}, 2},
		"resources":  {`{{ (getResource "Web").kind }}`, []string{"Deployment", "Deployment"}, 2},
		"an error":   {`{{ fail "reason" }}`, []string{"", ""}, 2},
		"plain text": {"a", []string{"a", "a"}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			known, expansions := source.NewExpansions(), 0
			for i, cluster := range []string{"one", "two"} {
				read := func() (map[string]any, error) {
					expansions++
					return map[string]any{}, nil
				}
				on := source.TemplateContext{Name: cluster, Cluster: read, Resources: webResources(), Expansions: known}
				got, err := on.ExpandTracked("text of "+cluster, test.text)
				if got.Text != test.want[i] || (err != nil) != (test.want[i] == "") || err != nil && !strings.Contains(err.Error(), "text of "+cluster) {
					t.Errorf("cluster %s: got %+v, error %v, want %q", cluster, got, err, test.want[i])
				}
				if _, err := on.ExpandTracked("text", "another "+test.text); (err != nil) != (test.want[i] == "") {
					t.Errorf("another text for cluster %s: %v", cluster, err)
				}
			}
			if expansions != 2*test.wantExpansions {
				t.Errorf("got %d expansions of two texts, want %d", expansions, 2*test.wantExpansions)
			}
		})
	}
}

// wantInvalid checks that err is a TerminalError and contains all of texts.
func wantInvalid(t *testing.T, err error, texts ...string) {
	t.Helper()
	if _, ok := errors.AsType[phase.TerminalError](err); !ok {
		t.Errorf("got %T, want phase.TerminalError", err)
	}
	wantTexts(t, err, texts...)
}

func wantTexts(t *testing.T, err error, texts ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("got no error")
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("got %q, want an error that contains %q", err, text)
		}
	}
}
