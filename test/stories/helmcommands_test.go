package stories

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/kube"
)

// commandsChart is a chart. Its version 2 drops an object and a field of version 1. Its hooks are Jobs that are not
// deleted, so that each run has a UID.
func commandsChart(version int) examples.Chart {
	c := examples.Chart{Name: "commands", Version: fmt.Sprintf("0.%d.0", version), AppVersion: fmt.Sprintf("%d.0.0", version), Files: map[string]string{
		"templates/hooks.yaml": `
{{- range $event := list "pre-install" "pre-upgrade" "post-upgrade" "pre-delete" }}
---
apiVersion: batch/v1
kind: Job
metadata: {name: hook-{{ $event }}, namespace: {{ $.Release.Namespace }}, annotations: {helm.sh/hook: {{ $event }}}}
spec:
  backoffLimit: 0
  template: {spec: {restartPolicy: Never, containers: [{name: main, image: "example.com/hook:1"}]}}
{{- end }}
{{- if .Values.fails }}
---
apiVersion: batch/v1
kind: Job
metadata: {name: hook-fails, namespace: {{ .Release.Namespace }}, annotations: {helm.sh/hook: post-upgrade, helm.sh/hook-weight: "9"}}
spec:
  backoffLimit: 0
  activeDeadlineSeconds: 1
  template: {spec: {restartPolicy: Never, nodeSelector: {no-such: node}, containers: [{name: main, image: "example.com/hook:1"}]}}
{{- end }}
`,
		"templates/kept.yaml": `
apiVersion: v1
kind: ConfigMap
metadata: {name: kept, namespace: {{ .Release.Namespace }}, annotations: {helm.sh/resource-policy: keep}}
data:
  version: {{ .Chart.Version }}
{{- if eq .Chart.Version "0.1.0" }}
  dropped: "true"
{{- end }}
`,
	}}
	if version == 1 {
		c.Files["templates/dropped.yaml"] = `
apiVersion: v1
kind: ConfigMap
metadata: {name: dropped, namespace: {{ .Release.Namespace }}}
`
	}
	return c
}

// commandsStory is a member on which a user runs Helm, too.
type commandsStory struct {
	*helmMember
	archives string // a directory
	log      *hookLog
}

// TestHelmCommands runs the real Helm on members, before, between and after Towline's revisions.
func TestHelmCommands(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	w.serveRepository(commandsChart(1), commandsChart(2), revisionChart())
	for _, cluster := range []string{"pushed", "pulled"} {
		m := &helmMember{world: w, cluster: cluster, chart: "commands", version: "0.2.0", release: "web", values: map[string]any{"message": "one"}}
		if cluster == "pushed" {
			m.plane = w.pushMember("fleet", cluster, "mode="+cluster)
		} else {
			m.plane = w.pullMember("fleet", cluster, "mode="+cluster)
		}
		t.Run(cluster, func(t *testing.T) {
			t.Parallel()
			m.world = w.forSubtest(t)
			s := &commandsStory{helmMember: m, archives: t.TempDir(), log: m.watchHooks(m.plane, m.release)}
			for version := 1; version <= 2; version++ {
				raw, err := commandsChart(version).Archive()
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(s.archive(version), raw, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			s.adoptsHelmRelease()
			s.helmReadsRelease()
			s.upgradeByHand()
			s.uninstallByHand()
			s.rollsBack()
			s.uninstallsWithProfile()
			s.readsItsRevision()
			s.waitsForHelm()
		})
	}
}

func (s *commandsStory) archive(version int) string {
	return filepath.Join(s.archives, fmt.Sprintf("commands-%d.tgz", version))
}

// helm runs the real Helm on the member.
func (s *commandsStory) helm(args ...string) string {
	s.t.Helper()
	return s.run(s.plane, "helm", args...)
}

// history returns the revisions as "revision status chart: description".
func (s *commandsStory) history() []string {
	s.t.Helper()
	var revisions []struct {
		Revision    int
		Status      string
		Chart       string
		Description string
	}
	if err := json.Unmarshal([]byte(s.helm("history", s.release, "-n", s.release, "-o", "json")), &revisions); err != nil {
		s.t.Fatal(err)
	}
	var all []string
	for _, r := range revisions {
		all = append(all, fmt.Sprintf("%d %s %s: %s", r.Revision, r.Status, r.Chart, r.Description))
	}
	return all
}

func (s *commandsStory) wantHistory(want ...string) {
	s.t.Helper()
	if diff := cmp.Diff(want, s.history()); diff != "" {
		s.t.Errorf("helm history on %s (-want +got):\n%s", s.cluster, diff)
	}
}

// hookRuns counts the runs of hooks so far.
func (s *commandsStory) hookRuns() map[string]int {
	runs := map[string]int{}
	for _, line := range s.log.list(0) {
		if name, ok := strings.CutPrefix(line, "created hook-"); ok {
			runs[name]++
		}
	}
	return runs
}

func (s *commandsStory) wantRuns(what string, want map[string]int) {
	s.t.Helper()
	s.eventually("the hooks have run", func() error {
		if diff := cmp.Diff(want, s.hookRuns()); diff != "" {
			return fmt.Errorf("runs of hooks on %s after %s (-want +got):\n%s", s.cluster, what, diff)
		}
		return nil
	})
}

// adoptsHelmRelease installs version 1 with the helm command. The profile adopts it with an upgrade to version 2.
func (s *commandsStory) adoptsHelmRelease() {
	s.t.Helper()
	s.helm("install", "web", s.archive(1), "-n", "web", "--create-namespace", "--set", "message=by hand")
	s.deploy()
	s.awaitRevision(2)
	s.wantHistory("1 superseded commands-0.1.0: Install complete", "2 deployed commands-0.2.0: Upgrade complete")
	s.wantRuns("the adoption", map[string]int{"pre-install": 1, "pre-upgrade": 1, "post-upgrade": 1})
	if err := s.wantMissing(s.plane, &corev1.ConfigMap{}, "dropped", "web"); err != nil {
		s.t.Errorf("the object that version 2 drops: %v", err)
	}
	if data := s.kubectl(s.plane, "get", "configmap", "kept", "-n", "web", "-o", "jsonpath={.data}"); data != `{"version":"0.2.0"}` {
		s.t.Errorf("an object with a field that version 2 drops has %s", data)
	}
}

// helmReadsRelease reads the release with every helm command that reads.
func (s *commandsStory) helmReadsRelease() {
	s.t.Helper()
	s.values["message"] = "two"
	s.deploy()
	s.awaitRevision(3)
	// Two revisions are kept by default.
	s.wantHistory("2 superseded commands-0.2.0: Upgrade complete", "3 deployed commands-0.2.0: Upgrade complete")

	var list []map[string]string
	if err := json.Unmarshal([]byte(s.helm("list", "-A", "-o", "json")), &list); err != nil {
		s.t.Fatal(err)
	}
	for _, row := range list {
		delete(row, "updated")
	}
	want := []map[string]string{{"name": "web", "namespace": "web", "revision": "3", "status": "deployed", "chart": "commands-0.2.0", "app_version": "2.0.0"}}
	if diff := cmp.Diff(want, list); diff != "" {
		s.t.Errorf("helm list -A (-want +got):\n%s", diff)
	}
	for _, text := range []string{"NAME: web\n", "NAMESPACE: web\n", "STATUS: deployed\n", "REVISION: 3\n", "web says: two"} {
		if out := s.helm("status", "web", "-n", "web"); !strings.Contains(out, text) {
			s.t.Errorf("helm status does not print %q:\n%s", text, out)
		}
	}
	if got := s.helm("get", "values", "web", "-n", "web", "-o", "json"); strings.TrimSpace(got) != `{"message":"two"}` {
		s.t.Errorf("helm get values printed %s", got)
	}
	if got := s.helm("get", "notes", "web", "-n", "web"); !strings.Contains(got, "web says: two") {
		s.t.Errorf("helm get notes printed %s", got)
	}
	template := []string{"template", "web", s.archive(2), "-n", "web", "--set", "message=two", "--is-upgrade", "--kube-version=v1.36.3"}
	all, manifest := s.documents(s.helm(template...)), s.documents(s.helm(append(template, "--no-hooks")...))
	if diff := cmp.Diff(manifest, s.documents(s.helm("get", "manifest", "web", "-n", "web"))); diff != "" {
		s.t.Errorf("helm get manifest (-helm template +got):\n%s", diff)
	}
	hooks := slices.DeleteFunc(all, func(text string) bool { return slices.Contains(manifest, text) })
	if diff := cmp.Diff(hooks, s.documents(s.helm("get", "hooks", "web", "-n", "web"))); diff != "" || len(hooks) == 0 {
		s.t.Errorf("helm get hooks (-helm template +got):\n%s", diff)
	}
}

// documents returns the objects of a stream, each as YAML, sorted.
func (s *commandsStory) documents(stream string) []string {
	s.t.Helper()
	objects, err := kube.DecodeLenient([]byte(stream))
	if err != nil {
		s.t.Fatal(err)
	}
	var all []string
	for _, object := range objects {
		text, err := yaml.Marshal(object.Object)
		if err != nil {
			s.t.Fatal(err)
		}
		all = append(all, string(text))
	}
	slices.Sort(all)
	return all
}

// wantMessage returns an error unless the release's page has the message.
func (s *commandsStory) wantMessage(want string) error {
	out, err := s.try(s.plane, "kubectl", "get", "configmap", "web-page", "-n", "web", "-o", "jsonpath={.data.index\\.html}")
	if err == nil && !strings.Contains(out, "<h1>"+want+"</h1>") {
		err = fmt.Errorf("the page is %q, want %q", out, want)
	}
	return err
}

// allValues returns the values of a revision with the defaults of the chart and its subcharts.
func (s *commandsStory) allValues(revision int) map[string]any {
	s.t.Helper()
	values := map[string]any{}
	raw := s.helm("get", "values", "web", "-n", "web", "--all", "--revision", strconv.Itoa(revision), "-o", "json")
	if err := json.Unmarshal([]byte(raw), &values); err != nil {
		s.t.Fatalf("helm get values --all printed %s: %v", raw, err)
	}
	return values
}

// upgradeByHand deploys other values with the helm command. Towline corrects that as drift, without its hooks: only the
// hooks of Helm's own upgrade run.
func (s *commandsStory) upgradeByHand() {
	s.t.Helper()
	s.helm("upgrade", "web", s.archive(2), "-n", "web", "--set", "message=by hand", "--force-conflicts")
	s.eventually("the values of the profile are deployed again", func() error {
		history := s.history()
		if last := history[len(history)-1]; last != "5 deployed commands-0.2.0: Drift corrected by Towline" {
			return fmt.Errorf("the last revision is %q", last)
		}
		return s.wantMessage("two")
	})
	s.wantHistory("4 superseded commands-0.2.0: Upgrade complete", "5 deployed commands-0.2.0: Drift corrected by Towline")
	ofHelm, ours := s.allValues(4), s.allValues(5)
	ofHelm["message"] = "two"
	if diff := cmp.Diff(ofHelm, ours); diff != "" || len(ours) < 2 {
		s.t.Errorf("helm get values --all (-revision of helm +revision of Towline):\n%s", diff)
	}
	if got := s.helm("get", "values", "web", "-n", "web", "-o", "json"); strings.TrimSpace(got) != `{"message":"two"}` {
		s.t.Errorf("helm get values printed %s after an upgrade by hand", got)
	}
	s.wantRuns("an upgrade by hand", map[string]int{"pre-install": 1, "pre-upgrade": 3, "post-upgrade": 3})
}

// uninstallByHand uninstalls the release with the helm command. Towline deploys it again without hooks.
func (s *commandsStory) uninstallByHand() {
	s.t.Helper()
	s.helm("uninstall", "web", "-n", "web")
	s.eventually("the release is deployed again", func() error {
		out, err := s.try(s.plane, "helm", "list", "-n", "web", "-o", "json")
		if err != nil || !strings.Contains(out, `"status":"deployed"`) {
			return errors.Join(err, fmt.Errorf("helm list prints %s", out))
		}
		if _, err := s.try(s.plane, "kubectl", "get", "deployment", "web", "-n", "web"); err != nil {
			return err
		}
		return s.wantMessage("two")
	})
	s.wantRuns("an uninstallation by hand", map[string]int{"pre-install": 1, "pre-upgrade": 3, "post-upgrade": 3, "pre-delete": 1})
}

// rollsBack upgrades with the option atomic to a revision with a hook that fails.
func (s *commandsStory) rollsBack() {
	s.t.Helper()
	history := s.history()
	last := 0
	if _, err := fmt.Sscanf(history[len(history)-1], "%d ", &last); err != nil {
		s.t.Fatal(err)
	}
	s.options = map[string]any{"atomic": true, "upgradeOptions": map[string]any{"maxHistory": 3}}
	s.values["message"] = "three"
	s.deploy()
	s.awaitRevision(last + 1)
	s.values = map[string]any{"message": "broken", "fails": true}
	s.deploy()
	s.awaitFailure(" failed: post-upgrade hook Job batch web/hook-fails failed", "; rolled back to revision ")
	// The next attempt begins after a second.
	s.eventually("the values are rolled back", func() error { return s.wantMessage("three") })
	history = s.history()
	s.values = map[string]any{"message": "four"}
	if !slices.ContainsFunc(history, func(line string) bool { return strings.Contains(line, " failed commands-0.2.0: post-upgrade hook") }) ||
		!slices.ContainsFunc(history, func(line string) bool { return strings.Contains(line, " commands-0.2.0: Rollback to ") }) {
		s.t.Errorf("helm history after a rollback: %q", history)
	}
	s.deploy()
	s.eventually("the next upgrade is deployed", func() error {
		return errors.Join(s.wantMessage("four"), s.wantStatuses("fleet", s.summary(), "Provisioned"))
	})
	if history := s.history(); len(history) > 3 {
		s.t.Errorf("maxHistory is 3, and helm history prints %q", history)
	}
}

// uninstallsWithProfile deletes the profile. The release is uninstalled, except for objects that a resource policy
// keeps.
func (s *commandsStory) uninstallsWithProfile() {
	s.t.Helper()
	before := s.hookRuns()["pre-delete"]
	s.kubectl(s.hub, "delete", "clusterprofile", s.profile(), "--wait=false")
	s.eventually("the release is uninstalled", func() error {
		out, err := s.try(s.plane, "helm", "list", "-A", "-o", "json")
		if err == nil && strings.TrimSpace(out) != "[]" {
			err = fmt.Errorf("helm list prints %s", out)
		}
		return errors.Join(err, s.wantMissing(s.plane, &appsv1.Deployment{}, "web", "web"))
	})
	if after := s.hookRuns()["pre-delete"]; after != before+1 {
		s.t.Errorf("the hook before the uninstallation ran %d times", after-before)
	}
	s.kubectl(s.plane, "get", "configmap", "kept", "-n", "web")
}
