package stories

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/localkube"
)

// orderChart writes its version and its values into an object.
func orderChart(version string) examples.Chart {
	return examples.Chart{Name: "order", Version: version, Files: map[string]string{"values.schema.json": "{}", "templates/order.yaml": `
apiVersion: v1
kind: ConfigMap
metadata: {name: order}
data:
  version: {{ .Chart.Version }}
  {{- toYaml .Values.order | nindent 2 }}
`}}
}

// templatesProfile has templates in references, content, chart fields and values, and a script. %s is the repository.
const templatesProfile = `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: registry, labels: {tier: front}}
data: {host: registry.example.com}
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: templated, annotations: {projectsveltos.io/template: ""}}
data:
  objects.yaml: |
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: site, name: settings}
    data:
      city: {{ upper .Cluster.metadata.labels.city | quote }}
      chart: {{ .Cluster.metadata.labels.chart }}
      registry: {{ (getResource "Registry").data.host }}
      tier: {{ index .MgmtResources.Registry.metadata.labels "tier" }}
    ---
    {{ $copy := chainSetField (getResource "Registry") "metadata.namespace" "site" -}}
    {{ toYaml (chainRemoveField $copy "metadata.labels") }}
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: scripted, annotations: {projectsveltos.io/lua: ""}}
data:
  script.lua: |
    local strings = require("strings")
    function evaluate()
      local registry = getResource(resources, "Registry")
      local text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: site, name: scripted}\ndata:\n"
      text = text .. "  host: " .. strings.ToUpper(registry.data.host) .. "\n  tier: " .. getLabel(registry, "tier") .. "\n"
      return {resources = text}
    end
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: templated-values, annotations: {projectsveltos.io/template: ""}}
data:
  values.yaml: "order: {third: 'templated for {{ .ClusterName }} from {{ .MgmtResources.Registry.data.host }}'}"
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: plain-values}
data:
  values.yaml: "order: {second: plain, third: plain}"
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: templates, annotations: {projectsveltos.io/tex-template: ""}}
spec:
  clusterSelector: {matchLabels: {env: templates}}
  templateResourceRefs:
  - {identifier: Registry, resource: {apiVersion: v1, kind: ConfigMap, namespace: default, name: registry}}
  policyRefs:
  - {kind: ConfigMap, namespace: default, name: templated}
  - {kind: ConfigMap, name: "own-{{ .ClusterName }}"}
  - {kind: ConfigMap, namespace: default, name: scripted}
  helmCharts:
  - repositoryURL: %s
    repositoryName: stories
    chartName: stories/order
    chartVersion: "{{ .Cluster.metadata.labels.chart }}"
    releaseName: "order-{{ .Cluster.metadata.labels.city }}"
    releaseNamespace: site
    values: "order: {first: 'inline for {{ .ClusterName }}', second: inline, third: inline}"
    valuesFrom:
    - {kind: ConfigMap, namespace: default, name: templated-values}
    - {kind: ConfigMap, namespace: default, name: plain-values}
`

// ownContent is the content for one cluster, in its namespace.
const ownContent = `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: %[1]s, name: own-%[2]s}
data:
  objects.yaml: |
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: site, name: own}
    data: {of: %[2]s, text: "{{ is no template }}"}
`

// TestTemplates expands templates and runs scripts for a pull and a push member. Changes of the objects that they read
// are delivered. A deleted object or an invalid template is reported by name, with the line, and no delivered object is
// changed.
func TestTemplates(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	w.serveRepository(orderChart("0.1.0"), orderChart("0.2.0"))
	members := map[string]*localkube.Plane{
		"pull-1": w.pullMember("edge", "pull-1", "env=templates,city=rome,chart=0.1.0"), "push-1": w.pushMember("cloud", "push-1", "env=templates,city=oslo,chart=0.1.0"),
	}
	namespaces := map[string]string{"pull-1": "edge", "push-1": "cloud"}
	for cluster, namespace := range namespaces {
		w.apply(w.hub, fmt.Sprintf(ownContent, namespace, cluster))
	}
	profile := fmt.Sprintf(templatesProfile, w.Charts)
	w.apply(w.hub, profile)
	w.wantExpanded(members, namespaces, "registry.example.com", "front", "0.1.0")
	cities := map[string]string{"pull-1": "rome", "push-1": "oslo"}
	for cluster, plane := range members {
		if got := w.helm(plane, "list", "-n", "site", "-q"); strings.TrimSpace(got) != "order-"+cities[cluster] {
			t.Errorf("releases on %s: %s", cluster, got)
		}
	}

	profile = strings.NewReplacer("registry.example.com", "other.example.com", "tier: front", "tier: back").Replace(profile)
	w.apply(w.hub, strings.Split(profile, "---")[0])
	w.wantExpanded(members, namespaces, "other.example.com", "back", "0.1.0")
	for cluster, namespace := range namespaces {
		w.kubectl(w.hub, "label", "sveltoscluster", cluster, "-n", namespace, "chart=0.2.0", "--overwrite")
	}
	w.wantExpanded(members, namespaces, "other.example.com", "back", "0.2.0")

	wantFailure := w.expectUntouched(map[string]*localkube.Plane{"edge/pull-1": members["pull-1"], "cloud/push-1": members["push-1"]}, "templates", "site")
	w.kubectl(w.hub, "delete", "configmap", "templated")
	wantFailure("ConfigMap default/templated does not exist")
	w.apply(w.hub, profile)
	w.wantExpanded(members, namespaces, "other.example.com", "back", "0.2.0")

	w.appliesExample(members, namespaces)
	w.reportsBadTemplates(members, namespaces)
}

// wantExpanded waits until the members have the objects of templatesProfile, expanded with the host and the tier of the
// ConfigMap registry, and the chart in this version.
func (w *world) wantExpanded(members map[string]*localkube.Plane, namespaces map[string]string, host, tier, version string) {
	w.t.Helper()
	cities := map[string]string{"pull-1": "ROME", "push-1": "OSLO"}
	for cluster, plane := range members {
		for name, want := range map[string]map[string]string{
			"settings": {"city": cities[cluster], "chart": version, "registry": host, "tier": tier},
			"registry": {"host": host},
			"own":      {"of": cluster, "text": "{{ is no template }}"},
			"scripted": {"host": strings.ToUpper(host), "tier": tier},
			"order":    {"version": version, "first": "inline for " + cluster, "second": "plain", "third": "templated for " + cluster + " from " + host},
		} {
			w.eventually("ConfigMap site/"+name+" is on "+cluster, func() error {
				got, err := w.data(plane, "site", name)
				if diff := cmp.Diff(want, got); err == nil && diff != "" {
					err = fmt.Errorf("it differs (-want +got):\n%s", diff)
				}
				return err
			})
		}
		w.awaitProvisioned(namespaces[cluster], "templates-sveltos-"+cluster)
	}
}

// appliesExample applies the example of a profile with templates.
func (w *world) appliesExample(members map[string]*localkube.Plane, namespaces map[string]string) {
	w.t.Helper()
	example, err := os.ReadFile("../../examples/clusterprofile-templates.yaml")
	if err != nil {
		w.t.Fatal(err)
	}
	w.apply(w.hub, strings.ReplaceAll(string(example), "env: test", "env: templates"))
	for cluster, plane := range members {
		w.awaitProvisioned(namespaces[cluster], "registry-sveltos-"+cluster)
		got, err := w.data(plane, "kube-public", "cluster")
		if diff := cmp.Diff(map[string]string{"name": cluster, "env": "templates"}, got); err != nil || diff != "" {
			w.t.Errorf("the settings of %s: %v (-want +got):\n%s", cluster, err, diff)
		}
		if got := w.kubectl(plane, "get", "secret", "registry-login", "-n", "kube-public", "-o", "jsonpath={.type}"); got != "kubernetes.io/dockerconfigjson" {
			w.t.Errorf("the login of %s is of type %s", cluster, got)
		}
	}
}

// templateCase is a template or script that is valid at first.
type templateCase struct {
	annotation, bad string
	texts           []string
}

func templateCases() map[string]templateCase {
	const template, script = "template", "lua"
	return map[string]templateCase{
		"missing-label":     {template, "\n\n{{ .Cluster.metadata.labels.none }}", []string{"line 3:", `"none"`}},
		"unknown-object":    {template, `{{ copy "None" }}`, []string{"line 1:", `templateResourceRefs has no identifier "None"`}},
		"cluster-api":       {template, `{{ .KubeadmControlPlane.spec.version }}`, []string{"line 1:", `"KubeadmControlPlane"`}},
		"endless-recursion": {template, `{{ define "a" }}{{ template "a" }}{{ end }}{{ template "a" }}`, []string{"line 1:", "maximum template depth"}},
		"endless-output":    {template, `{{ range until 1000 }}{{ repeat 1000000 "x" }}{{ end }}`, []string{"line 1: the result is larger than 64 MiB"}},
		"endless-template":  {template, "\n{{ $a := until 100000 }}\n{{ range $a }}{{ range $a }}{{ range $a }}{{ end }}{{ end }}{{ end }}", []string{"it took longer than 10s in line 3"}},
		"the-environment":   {template, `{{ env "HOME" }}`, []string{"line 1:", `function "env" not defined`}},
		"script-error":      {script, "function evaluate()\n  return {resources = resources.None.data}\nend", []string{"line 2:", "attempt to index"}},
		"script-files":      {script, "function evaluate()\n  return {resources = io.open('/etc/passwd'):read()}\nend", []string{"line 2:"}},
		"endless-script":    {script, "function evaluate() while true do end end", []string{"more than 5000000 steps"}},
	}
}

// caseContent is the content of a case: its annotation, and the text of its key.
func caseContent(name, annotation, text string) string {
	return fmt.Sprintf("---\napiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: default, name: %s, annotations: {projectsveltos.io/%s: ''}}\ndata:\n  objects.yaml: %q\n",
		name, annotation, text)
}

// reportsBadTemplates breaks templates and scripts that were delivered.
func (w *world) reportsBadTemplates(members map[string]*localkube.Plane, namespaces map[string]string) {
	w.t.Helper()
	cases := templateCases()
	names := slices.Sorted(maps.Keys(cases))
	var good, bad strings.Builder
	for _, name := range names {
		text := fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: bad, name: %s}\ndata: {text: good}\n", name)
		if cases[name].annotation == "lua" {
			text = fmt.Sprintf("function evaluate() return {resources = %q} end", text)
		}
		good.WriteString(caseContent(name, cases[name].annotation, text))
		fmt.Fprintf(&good, "---\napiVersion: config.projectsveltos.io/v1beta1\nkind: ClusterProfile\nmetadata: {name: %[1]s}\n"+
			"spec:\n  clusterSelector: {matchLabels: {env: templates}}\n  policyRefs: [{kind: ConfigMap, namespace: default, name: %[1]s}]\n", name)
		bad.WriteString(caseContent(name, cases[name].annotation, cases[name].bad))
	}
	w.apply(w.hub, good.String())
	before := map[string]map[string]fingerprint{}
	for cluster, plane := range members {
		for _, name := range names {
			w.awaitProvisioned(namespaces[cluster], name+"-sveltos-"+cluster)
		}
		before[cluster] = w.fingerprints(plane, "bad")
		if len(before[cluster]) < len(names) {
			w.t.Fatalf("%s has %d objects, want %d", cluster, len(before[cluster]), len(names))
		}
	}
	w.apply(w.hub, bad.String())
	for cluster, plane := range members {
		for _, name := range names {
			w.awaitFailureReport(namespaces[cluster], name+"-sveltos-"+cluster, append(cases[name].texts, "ConfigMap default/"+name+", key objects.yaml"))
		}
		if diff := cmp.Diff(before[cluster], w.fingerprints(plane, "bad")); diff != "" {
			w.t.Errorf("objects on %s (-before +after):\n%s", cluster, diff)
		}
	}
}
