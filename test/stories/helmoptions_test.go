package stories

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"

	"github.com/towline/towline/examples"
)

// optionsChart is a chart for one option. Its CustomResourceDefinition has the name of the chart.
func optionsChart(name string) examples.Chart {
	return examples.Chart{Name: name, Files: map[string]string{
		"templates/greeting.yaml":             "",
		"charts/greeting/templates/NOTES.txt": "The subchart greets.\n",
		"templates/objects.yaml": `
apiVersion: v1
kind: ConfigMap
metadata: {name: main}
data: {revision: "{{ .Values.revision }}"}
{{- with .Values.unknown }}
{{ . }}: true
{{- end }}
{{- if .Values.immutable }}
immutable: true
{{- end }}
{{- if .Values.added }}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: added}
{{- end }}
{{- if .Values.claim }}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: never-bound}
spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
{{- end }}
{{- if .Values.job }}
---
apiVersion: batch/v1
kind: Job
metadata: {name: never-ends}
spec:
  template: {spec: {restartPolicy: Never, nodeSelector: {no-such: node}, containers: [{name: main, image: "example.com/job:1"}]}}
{{- end }}
{{- range $event := list "pre-install" "pre-upgrade" "pre-delete" }}
---
apiVersion: batch/v1
kind: Job
metadata: {name: hook-{{ $event }}, annotations: {helm.sh/hook: {{ $event }}}}
spec:
  template: {spec: {restartPolicy: Never, containers: [{name: main, image: "example.com/hook:1"}]}}
{{- end }}
{{- if .Values.fails }}
---
apiVersion: batch/v1
kind: Job
metadata: {name: hook-fails, annotations: {helm.sh/hook: "post-install,post-upgrade"}}
spec:
  backoffLimit: 0
  activeDeadlineSeconds: 1
  template: {spec: {restartPolicy: Never, nodeSelector: {no-such: node}, containers: [{name: main, image: "example.com/hook:1"}]}}
{{- end }}
`,
	}}
}

// optionStory is one release with one option.
type optionStory struct {
	*helmMember
	log *hookLog
}

// optionStories are the options with their effects. It lacks takeOwnership, since Towline always adopts objects,
// runTests, which TestHelmHooks checks, and atomic upgrades, which TestHelmCommands checks.
func optionStories() map[string]func(*optionStory) {
	return map[string]func(*optionStory){
		"labels-description-subnotes-maxhistory": (*optionStory).labelsRecords,
		"skipcrds-skipschemavalidation":          (*optionStory).skipsCRDsAndValidation,
		"wait-timeout": func(s *optionStory) {
			s.waits("claim", map[string]any{"wait": true, "timeout": "10s"}, "not ready within 10s: PersistentVolumeClaim "+s.release+"/never-bound")
		},
		"waitforjobs": func(s *optionStory) {
			s.waits("job", map[string]any{"wait": true, "waitForJobs": true, "timeout": "10s"}, "not ready within 10s: Job batch "+s.release+"/never-ends: it is not complete")
		},
		"disablehooks": func(s *optionStory) { s.runsHooks(map[string]any{"disableHooks": true}) },
		"install-disablehooks": func(s *optionStory) {
			s.runsHooks(map[string]any{"installOptions": map[string]any{"disableHooks": true}}, "pre-upgrade", "pre-delete")
		},
		"upgrade-disablehooks": func(s *optionStory) {
			s.runsHooks(map[string]any{"upgradeOptions": map[string]any{"disableHooks": true}}, "pre-install", "pre-delete")
		},
		"uninstall-disablehooks": func(s *optionStory) {
			s.runsHooks(map[string]any{"uninstallOptions": map[string]any{"disableHooks": true}}, "pre-install", "pre-upgrade")
		},
		"createnamespace":     (*optionStory).needsNamespace,
		"atomic-install":      (*optionStory).undoesInstallation,
		"recoverafter":        (*optionStory).uninstallsAfterFailures,
		"cleanuponfail":       (*optionStory).deletesCreatedObjects,
		"force":               (*optionStory).forcesReplacement,
		"upgradecrds":         (*optionStory).upgradesCRDs,
		"keephistory-replace": (*optionStory).keepsHistory,
		"deletionpropagation": (*optionStory).orphansDependents,
		"deletionpropagation-background": func(s *optionStory) {
			s.deletesDependents("background")
		},
		"deletionpropagation-foreground": func(s *optionStory) {
			s.deletesDependents("foreground")
		},
		"passcredentialsall": (*optionStory).passesCredentials,
		"resetvalues":        (*optionStory).resetsValues,
		"refused":            (*optionStory).refusesOptions,
	}
}

// TestHelmOptions deploys a release for each option and checks the effect of the option.
func TestHelmOptions(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	var charts []examples.Chart
	for name := range optionStories() {
		charts = append(charts, optionsChart(name))
	}
	charts = append(charts, changedCRDs("upgradecrds"))
	w.serveRepository(charts...)
	push, pull := w.pushMember("fleet", "pushed", "mode=pushed"), w.pullMember("fleet", "pulled", "mode=pulled")
	for name, story := range optionStories() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := w.forSubtest(t)
			for _, m := range []*helmMember{{world: w, plane: push, cluster: "pushed"}, {world: w, plane: pull, cluster: "pulled"}} {
				m.chart, m.version, m.release = name, "0.1.0", name
				story(&optionStory{helmMember: m, log: w.watchHooks(m.plane, name)})
			}
		})
	}
}

// upgrade deploys values, the number of the revision, and options.
func (s *optionStory) upgrade(revision int, options map[string]any, values ...string) {
	s.t.Helper()
	s.options, s.values = options, map[string]any{"revision": revision}
	for _, value := range values {
		s.values[value] = true
	}
	s.deploy()
}

func (s *optionStory) labelsRecords() {
	s.t.Helper()
	options := map[string]any{
		"labels": map[string]any{"team": "a"}, "description": "by the story", "upgradeOptions": map[string]any{"maxHistory": 1, "subNotes": true},
	}
	s.upgrade(1, options)
	s.awaitRevision(1)
	s.upgrade(2, options)
	s.awaitRevision(2)
	s.eventually("one revision is left", func() error {
		out, err := s.try(s.plane, "kubectl", "get", "secrets", "-n", s.release, "-l", "owner=helm,team=a", "-o", "jsonpath={.items[*].metadata.name}")
		if want := "sh.helm.release.v1." + s.release + ".v2"; err == nil && out != want {
			err = fmt.Errorf("labelled records are %q, want %q", out, want)
		}
		return err
	})
	if out := s.run(s.plane, "helm", "history", s.release, "-n", s.release); !strings.Contains(out, "by the story") {
		s.t.Errorf("helm history does not print the description:\n%s", out)
	}
	if out := s.run(s.plane, "helm", "get", "notes", s.release, "-n", s.release); !strings.Contains(out, "The subchart greets.") {
		s.t.Errorf("helm get notes does not print the notes of the subchart:\n%s", out)
	}
}

func (s *optionStory) skipsCRDsAndValidation() {
	s.t.Helper()
	s.values = map[string]any{"message": ""}
	s.options = map[string]any{"skipCRDs": true}
	s.deploy()
	s.awaitFailure("message")
	s.options["skipSchemaValidation"] = true
	s.deploy()
	s.awaitRevision(1)
	const crd = ".examples.towline.dev"
	if err := s.wantMissing(s.plane, &apiextensionsv1.CustomResourceDefinition{}, "greetings."+s.release+crd, ""); err != nil {
		s.t.Error(err)
	}
	s.options = map[string]any{"skipSchemaValidation": true}
	s.deploy()
	s.eventually("the CustomResourceDefinition is created", func() error {
		if s.wantMissing(s.plane, &apiextensionsv1.CustomResourceDefinition{}, "greetings."+s.release+crd, "") == nil {
			return errors.New("it does not exist")
		}
		return nil
	})
}

// changedCRDs is version 0.2.0 of a chart. Its CustomResourceDefinition has a short name.
func changedCRDs(name string) examples.Chart {
	c := optionsChart(name)
	c.Version = "0.2.0"
	c.Files["crds/greetings.yaml"] = fmt.Sprintf(`
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: greetings.%[1]s.examples.towline.dev}
spec:
  group: %[1]s.examples.towline.dev
  names: {kind: Greeting, listKind: GreetingList, plural: greetings, singular: greeting, shortNames: [changed]}
  scope: Namespaced
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}]
`, name)
	return c
}

// upgradesCRDs upgrades to a chart with another CustomResourceDefinition. Only the option makes Towline change it.
func (s *optionStory) upgradesCRDs() {
	s.t.Helper()
	for i, step := range []struct {
		version, want string
		options       map[string]any
	}{
		{version: "0.1.0"},
		{version: "0.2.0"},
		{version: "0.2.0", options: map[string]any{"upgradeOptions": map[string]any{"upgradeCRDs": true}}, want: "changed"},
	} {
		s.version = step.version
		s.upgrade(i+1, step.options)
		s.awaitRevision(i + 1)
		got := s.kubectl(s.plane, "get", "crd", "greetings."+s.release+".examples.towline.dev", "-o", "jsonpath={.spec.names.shortNames[*]}")
		if got != step.want {
			s.t.Errorf("%s, revision %d of chart %s: short names %q, want %q", s.cluster, i+1, step.version, got, step.want)
		}
	}
}

// waits deploys an object that never becomes ready. Without options Towline does not wait for it.
func (s *optionStory) waits(value string, options map[string]any, message string) {
	s.t.Helper()
	s.upgrade(1, nil, value)
	s.awaitRevision(1)
	s.upgrade(2, options, value)
	s.awaitFailure("upgrade of revision", message)
}

// runsHooks installs, upgrades and removes the release, and expects hooks of these events only.
func (s *optionStory) runsHooks(options map[string]any, events ...string) {
	s.t.Helper()
	s.upgrade(1, options)
	s.awaitRevision(1)
	s.upgrade(2, options)
	s.awaitRevision(2)
	s.remove()
	var got []string
	for _, line := range s.log.list(0) {
		if event, ok := strings.CutPrefix(line, "created hook-"); ok {
			got = append(got, event)
		}
	}
	if diff := cmp.Diff(events, got); diff != "" {
		s.t.Errorf("hooks on %s with %v (-want +got):\n%s", s.cluster, options, diff)
	}
}

func (s *optionStory) needsNamespace() {
	s.t.Helper()
	s.upgrade(1, map[string]any{"installOptions": map[string]any{"createNamespace": false}})
	s.awaitFailure(fmt.Sprintf("namespaces %q not found", s.release))
	s.kubectl(s.plane, "create", "namespace", s.release)
	s.eventually("it is deployed", func() error { return s.wantStatuses("fleet", s.summary(), "Provisioned") })
}

func (s *optionStory) undoesInstallation() {
	s.t.Helper()
	s.upgrade(1, map[string]any{"atomic": true}, "fails")
	s.awaitFailure("install of revision", "failed: post-install hook")
	s.eventually("the installation is undone", func() error {
		lines := s.log.list(0)
		if !slices.Contains(lines, "deleted main") {
			return fmt.Errorf("the events are %q", lines)
		}
		return nil
	})
}

func (s *optionStory) uninstallsAfterFailures() {
	s.t.Helper()
	s.upgrade(1, map[string]any{"installOptions": map[string]any{"recoverAfterConsecutiveFailures": 2}}, "fails")
	s.eventually("it is uninstalled after two failures", func() error {
		lines := s.log.list(0)
		at := slices.Index(lines, "deleted main")
		if at < 0 {
			return fmt.Errorf("the events are %q", lines)
		}
		failures := 0
		for _, line := range lines[:at] {
			if line == "created hook-fails" {
				failures++
			}
		}
		if failures != 2 {
			s.t.Fatalf("uninstalled after %d failures, want 2: %q", failures, lines)
		}
		return nil
	})
}

func (s *optionStory) deletesCreatedObjects() {
	s.t.Helper()
	options := map[string]any{"upgradeOptions": map[string]any{"cleanupOnFail": true}}
	s.upgrade(1, options)
	s.awaitRevision(1)
	s.upgrade(2, options, "added", "fails")
	s.awaitFailure("upgrade of revision", "hook-fails")
	s.eventually("the objects that the upgrade created are deleted", func() error {
		if lines := s.log.list(0); !slices.Contains(lines, "created added") || !slices.Contains(lines, "deleted added") || slices.Contains(lines, "deleted main") {
			return fmt.Errorf("the events are %q", lines)
		}
		return nil
	})
}

func (s *optionStory) forcesReplacement() {
	s.t.Helper()
	s.upgrade(1, nil, "immutable")
	s.awaitRevision(1)
	s.upgrade(2, nil, "immutable")
	s.awaitFailure("immutable")
	s.upgrade(2, map[string]any{"upgradeOptions": map[string]any{"force": true}}, "immutable")
	s.eventually("the object is replaced", func() error {
		out, err := s.try(s.plane, "kubectl", "get", "configmap", "main", "-n", s.release, "-o", "jsonpath={.data.revision}")
		if err == nil && out != "2" {
			err = fmt.Errorf("revision %q is deployed", out)
		}
		return errors.Join(err, s.wantStatuses("fleet", s.summary(), "Provisioned"))
	})
}

// refusesOptions sets options that have no meaning since the hub renders. They are refused by name.
func (s *optionStory) refusesOptions() {
	s.t.Helper()
	for option, options := range map[string]map[string]any{
		"dependencyUpdate":                    {"dependencyUpdate": true},
		"disableOpenAPIValidation":            {"disableOpenAPIValidation": true},
		"enableClientCache":                   {"enableClientCache": true},
		"installOptions.replace":              {"installOptions": map[string]any{"replace": false}},
		"upgradeOptions.reuseValues":          {"upgradeOptions": map[string]any{"reuseValues": true}},
		"upgradeOptions.resetThenReuseValues": {"upgradeOptions": map[string]any{"resetThenReuseValues": true}},
		"upgradeOptions.recreate":             {"upgradeOptions": map[string]any{"recreate": true}},
	} {
		s.upgrade(1, options)
		s.awaitFailure("spec.helmCharts[0].options." + option)
	}
	// The API server validates the objects, which disableOpenAPIValidation could not change.
	s.upgrade(1, nil)
	s.values["unknown"] = "undeclared"
	s.deploy()
	s.awaitFailure("ConfigMap "+s.release+"/main", "undeclared: field not declared in schema")
}

// passesCredentials deploys from a repository whose index names an archive on another host, which requires the login.
func (s *optionStory) passesCredentials() {
	s.t.Helper()
	repository, err := examples.Repository(optionsChart(s.chart))
	if err != nil {
		s.t.Fatal(err)
	}
	archives := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); user != "story" || password != "teller" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		repository.ServeHTTP(w, r)
	}))
	s.t.Cleanup(archives.Close)
	name := s.chart + "-" + s.version + ".tgz"
	index := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer := httptest.NewRecorder()
		repository.ServeHTTP(answer, r)
		_, _ = io.WriteString(w, strings.Replace(answer.Body.String(), "- "+name, "- "+archives.URL+"/"+name, 1))
	}))
	s.t.Cleanup(index.Close)
	s.login = s.profile()
	s.apply(s.hub, fmt.Sprintf(`
apiVersion: v1
kind: Secret
metadata: {namespace: fleet, name: %s}
type: addons.projectsveltos.io/cluster-profile
stringData: {username: story, password: teller}
`, s.login))
	w := *s.world
	w.Charts = index.URL
	s.world = &w
	s.upgrade(1, nil)
	s.awaitFailure(archives.URL+"/"+name, "401 Unauthorized")
	s.upgrade(1, map[string]any{"passCredentialsAll": true})
	s.awaitRevision(1)
}

// resetsValues upgrades with and without resetValues: both drop the values of the former revision.
func (s *optionStory) resetsValues() {
	s.t.Helper()
	options := map[string]any{"upgradeOptions": map[string]any{"resetValues": true}}
	revision := 0
	deploy := func(options map[string]any, values ...string) string {
		s.t.Helper()
		revision++
		s.upgrade(len(values), options, values...)
		s.awaitRevision(revision)
		return s.run(s.plane, "helm", "get", "manifest", s.release, "-n", s.release) + s.run(s.plane, "helm", "get", "values", s.release, "-n", s.release) +
			s.kubectl(s.plane, "get", "deployments,configmaps", "-n", s.release, "-o", `jsonpath={range .items[*]}{.kind} {.metadata.name} {.data.revision}{"\n"}{end}`)
	}
	first, second := deploy(nil, "added"), deploy(nil)
	if !strings.Contains(first, "ConfigMap added") || strings.Contains(second, "added") {
		s.t.Errorf("%s: value added is kept, or was not deployed:\n%s\nupgraded:\n%s", s.cluster, first, second)
	}
	if diff := cmp.Diff(first, deploy(options, "added")); diff != "" {
		s.t.Errorf("%s: the release differs with the options (-without +with):\n%s", s.cluster, diff)
	}
	if diff := cmp.Diff(second, deploy(options)); diff != "" {
		s.t.Errorf("%s: the upgraded release differs with the options (-without +with):\n%s", s.cluster, diff)
	}
}
