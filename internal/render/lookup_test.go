package render_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/render"
)

// managing returns a chart that keeps its password as charts with Bitnami's library do: an upgrade fails without the
// Secret of the installation.
func managing() examples.Chart {
	return withTemplate(`{{ $found := lookup "v1" "Secret" .Release.Namespace "own" }}
{{- if and .Release.IsUpgrade (not $found) }}{{ fail "PASSWORDS ERROR" }}{{ end }}` + object("Secret", "own") + `
data: {count: {{ .Values.count | default 1 | toString | b64enc }}}
stringData:
  password: {{ if $found }}{{ $found.data.password | b64dec }}{{ else }}{{ randAlphaNum 20 }}{{ end }}
` + "---\n" + object("ConfigMap", "generated") + `data:
  password: {{ dig "data" "password" "" $found | b64dec | quote }}
  count: {{ dig "data" "count" "" $found | b64dec | quote }}
  metadata: {{ $found.metadata | default dict | toJson | quote }}
  fields: {{ keys $found | join "," | quote }}
  api: {{ .Capabilities.APIVersions.Has "example.com/v1" | quote }}
`)
}

func TestLookupFindsTheLastRenderingOfAMemberThatCannotBeRead(t *testing.T) {
	t.Parallel()
	chartRequest := request(t, managing())
	m, charts := &member{name: "one"}, render.NewCharts(pool)
	var kept render.Generated
	deploy := func(when string) map[string]string {
		t.Helper()
		release := m.render(t, charts, chartRequest)
		if release.Unanswered || !release.MemberSpecific {
			t.Errorf("%s: unanswered is %t, specific to the member %t", when, release.Unanswered, release.MemberSpecific)
		}
		kept = m.kept
		if again := m.render(t, charts, chartRequest); again.Objects[0] != release.Objects[0] {
			t.Errorf("%s: the next request renders again", when)
		}
		if diff := cmp.Diff(generated(t, release), generated(t, m.render(t, render.NewCharts(pool), chartRequest))); diff != "" {
			t.Errorf("%s: the release differs after a restart (-want +got):\n%s", when, diff)
		}
		if diff := cmp.Diff(kept, m.kept); diff != "" {
			t.Errorf("%s: the kept results differ after a restart (-want +got):\n%s", when, diff)
		}
		return generated(t, release)
	}
	want := map[string]string{"password": "", "count": "", "metadata": "{}", "fields": "", "api": "false"}
	if diff := cmp.Diff(want, deploy("installation")); diff != "" {
		t.Errorf("installation (-want +got):\n%s", diff)
	}
	chartRequest.APIVersions, want["api"] = append(chartRequest.APIVersions, "example.com/v1"), "true"
	if diff := cmp.Diff(want, deploy("another API")); diff != "" {
		t.Errorf("another API (-want +got):\n%s", diff)
	}
	first := password(m.render(t, charts, chartRequest).Objects)
	chartRequest.IsUpgrade = true
	want["password"], want["metadata"], want["fields"] = first, `{"name":"own","namespace":"site"}`, "apiVersion,data,kind,metadata"
	for count := 2; count < 5; count++ {
		chartRequest.Values = values(t, fmt.Sprintf("count: %d\n", count))
		want["count"] = fmt.Sprint(count - 1)
		if diff := cmp.Diff(want, deploy("upgrade")); diff != "" {
			t.Errorf("upgrade to %d (-want +got):\n%s", count, diff)
		}
		if len(kept) != 3 {
			t.Errorf("upgrade to %d: got %d results, want the password, the found Secret and the rendered one", count, len(kept))
		}
	}
}

// TestObjectsThatLookupFinds installs and upgrades a chart on a member that cannot be read. The objects of each test
// are rendered with the number of the operation.
func TestObjectsThatLookupFinds(t *testing.T) {
	t.Parallel()
	const cm, own = "apiVersion: v1\nkind: ConfigMap\n", `lookup "v1" "ConfigMap" "site" "own"`
	hook := func(annotations string) string {
		return cm + "metadata: {name: own, annotations: {" + annotations + "}}\n"
	}
	numbered := "data: {number: \"{{ .Values.number }}\"}\n"
	for name, test := range map[string]struct {
		lookup  string // the call
		objects string
		// found is data.number of the object, or "yes", at the installation and two upgrades. unanswered is true if the
		// installation reports it.
		found      string
		unanswered bool
	}{
		"without a namespace":  {own, cm + "metadata: {name: own}\n" + numbered, "- 1 2", false},
		"with the namespace":   {own, cm + "metadata: {name: own, namespace: site}\n" + numbered, "- 1 2", false},
		"in another namespace": {own, cm + "metadata: {name: own, namespace: other}\n" + numbered, "- - -", true},
		"with another name":    {own, cm + "metadata: {name: other}\n" + numbered, "- - -", true},
		"of another kind":      {own, strings.ReplaceAll(cm, "ConfigMap", "Example") + "metadata: {name: own}\n", "- - -", true},
		"of another version":   {own, strings.ReplaceAll(cm, "v1", "v2") + "metadata: {name: own}\n", "- - -", true},
		"with other fields on the member": {
			`lookup "v1" "Service" "site" "own"`, "apiVersion: v1\nkind: Service\nmetadata: {name: own}\n", "- - -", true,
		},
		"with a token of Kubernetes": {
			`lookup "v1" "Secret" "site" "own"`, "apiVersion: v1\nkind: Secret\nmetadata: {name: own}\ntype: kubernetes.io/service-account-token\n", "- - -", true,
		},
		"in a list":                 {`lookup "v1" "ConfigMap" "site" ""`, cm + "metadata: {name: own}\n", "- - -", true},
		"of the second upgrade":     {own, "{{ if gt (int .Values.number) 1 }}" + cm + "metadata: {name: own}\n" + numbered + "{{ end }}", "- - 2", true},
		"until the first upgrade":   {own, "{{ if lt (int .Values.number) 2 }}" + cm + "metadata: {name: own}\n" + numbered + "{{ end }}", "- - -", false},
		"of the installation, kept": {own, "{{ if lt (int .Values.number) 2 }}" + hook(`helm.sh/resource-policy: keep`) + numbered + "{{ end }}", "- - -", false},
		"of the installation, kept, beside another": {
			`lookup "v1" "ConfigMap" "site" "other" | empty | ternary (` + own + `) (` + own + `)`, cm + "metadata: {name: other}\n---\n" +
				"{{ if lt (int .Values.number) 2 }}" + hook(`helm.sh/resource-policy: keep`) + numbered + "{{ end }}", "- 1 1", false,
		},
		"hook":                     {own, hook(`helm.sh/hook: "pre-install,pre-upgrade"`) + numbered, "- 1 2", false},
		"hook of the installation": {own, hook(`helm.sh/hook: Pre-Install`) + numbered, "- 1 1", false},
		"hook of an upgrade":       {own, hook(`helm.sh/hook: pre-upgrade`) + numbered, "- - -", true},
		"hook that is deleted":     {own, hook(`helm.sh/hook: pre-install, helm.sh/hook-delete-policy: "before-hook-creation,hook-succeeded"`) + numbered, "- - -", true},
		"small beside a large one": {
			`lookup "v1" "ConfigMap" "site" "large" | empty | ternary (` + own + `) (dict)`,
			cm + "metadata: {name: own}\n" + numbered + "---\n" + cm + "metadata: {name: large}\ndata: {large: {{ repeat 70000 \"x\" }}}\n", "- 1 2", true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			chartRequest := request(t, withTemplate(`{{ $found := `+test.lookup+` }}`+object("ConfigMap", "generated")+
				"data:\n  found: {{ if $found }}{{ dig \"data\" \"number\" \"yes\" $found | quote }}{{ else }}\"-\"{{ end }}\n---\n"+test.objects))
			m := &member{name: "one"}
			var found []string
			for n := range 3 {
				chartRequest.Values = values(t, fmt.Sprintf("number: %d\n", n+1))
				release := m.render(t, render.NewCharts(pool), chartRequest)
				got := generated(t, release)["found"]
				found = append(found, got)
				if n == 0 && release.Unanswered != test.unanswered {
					t.Errorf("installation: unanswered is %t", release.Unanswered)
				}
				if release.MemberSpecific != (got != "-") {
					t.Errorf("found %s, but specific to the member is %t", got, release.MemberSpecific)
				}
				if again := m.render(t, render.NewCharts(pool), chartRequest); !cmp.Equal(objectsOf(again), objectsOf(release)) {
					t.Errorf("rendering %d differs when it is repeated: found %s, then %s", n+1, got, generated(t, again)["found"])
				}
			}
			if got := strings.Join(found, " "); got != test.found {
				t.Errorf("found %s, want %s", got, test.found)
			}
			if test.unanswered && test.found == "- - -" && len(m.kept) > 0 {
				t.Errorf("results are kept for nothing: %v", m.kept)
			}
		})
	}
}

func objectsOf(release render.Release) []map[string]any {
	var all []map[string]any
	for _, object := range release.Objects {
		all = append(all, (&unstructured.Unstructured{Object: object.Object}).Object)
	}
	return all
}

// TestMembersShareARenderingWithUnansweredLookups renders lookups that only a member answers, for two members that
// cannot be read. A member that can be read has its own rendering.
func TestMembersShareARenderingWithUnansweredLookups(t *testing.T) {
	t.Parallel()
	chartRequest := request(t, withTemplate(object("ConfigMap", "generated")+
		`data: {found: "{{ lookup "v1" "Service" "site" "own" | len }} {{ lookup "v1" "Secret" "site" "" | len }} {{ lookup "v1" "Secret" "site" "not-own" | len }}"}`))
	charts, first, second := render.NewCharts(pool), &member{name: "first"}, &member{name: "second"}
	one, two := first.render(t, charts, chartRequest), second.render(t, charts, chartRequest)
	if got := generated(t, one)["found"]; got != "0 0 0" || !one.Unanswered {
		t.Errorf("found %q, unanswered is %t", got, one.Unanswered)
	}
	if one.Objects[0] != two.Objects[0] || first.loads+second.loads > 0 {
		t.Errorf("the release is rendered for each member, after %d loads", first.loads+second.loads)
	}
	chartRequest.Lookup = func(string, string, string, string) (map[string]any, error) {
		return map[string]any{"kind": "found"}, nil
	}
	if got := generated(t, (&member{name: "third"}).render(t, charts, chartRequest))["found"]; got != "1 1 1" {
		t.Errorf("on a member that can be read: found %q", got)
	}
}

// TestLookupOfAnotherReleaseThatFails renders a chart that fails, or whose objects are invalid, until lookup finds a
// Secret.
func TestLookupOfAnotherReleaseThatFails(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"fails":   `{{ if not $found }}{{ fail "SECRET IS MISSING" }}{{ end }}`,
		"invalid": `{{ if not $found }}kind: [{{ end }}`,
	} {
		chartRequest := request(t, withTemplate(`{{ $found := lookup "v1" "Secret" "site" "not-own" }}`+text+object("ConfigMap", "generated")+`data: {found: "{{ len $found }}"}`))
		chartRequest.Owner = "one"
		charts := render.NewCharts(pool)
		if _, err := charts.Render(t.Context(), chartRequest); err == nil {
			t.Errorf("%s: no error without the Secret", name)
		}
		chartRequest.Lookup = func(string, string, string, string) (map[string]any, error) {
			return map[string]any{"kind": "found"}, nil
		}
		if got := generated(t, rendered(t, charts, chartRequest))["found"]; got != "1" {
			t.Errorf("%s: found %q", name, got)
		}
	}
}
