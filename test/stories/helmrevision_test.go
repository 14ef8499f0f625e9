package stories

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/go-cmp/cmp"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/examples"
)

// revisionChart is a chart whose templates write the revision and the operation into a ConfigMap. With the value held,
// its hook waits for a node with the label held.
func revisionChart() examples.Chart {
	return examples.Chart{Name: "revision", Version: "0.1.0", AppVersion: "1.0.0", Files: map[string]string{
		"templates/revision.yaml": `
apiVersion: v1
kind: ConfigMap
metadata: {name: revision, namespace: {{ .Release.Namespace }}}
data: {read: "{{ .Release.Revision }} {{ .Release.IsInstall }} {{ .Release.IsUpgrade }} {{ .Values.message }}"}
`,
		"templates/held.yaml": `
{{- if .Values.held }}
apiVersion: batch/v1
kind: Job
metadata: {name: held, namespace: {{ .Release.Namespace }}, annotations: {helm.sh/hook: pre-install}}
spec:
  template: {spec: {restartPolicy: Never, nodeSelector: {held: "no"}, containers: [{name: main, image: "example.com/hook:1"}]}}
{{- end }}
`,
	}}
}

// readsItsRevision deploys a release whose templates read the revision, after two revisions of the helm command. Only
// changes of the values make revisions, also after reports are deleted.
func (s *commandsStory) readsItsRevision() {
	s.t.Helper()
	m := *s
	m.helmMember = &helmMember{
		world: s.world, plane: s.plane, cluster: s.cluster, chart: "revision", version: "0.1.0", release: "reader",
		values: map[string]any{"message": "a"}, options: map[string]any{"upgradeOptions": map[string]any{"maxHistory": 9}},
	}
	raw, err := revisionChart().Archive()
	if err != nil {
		s.t.Fatal(err)
	}
	archive := filepath.Join(s.archives, "revision.tgz")
	if err := os.WriteFile(archive, raw, 0o600); err != nil {
		s.t.Fatal(err)
	}
	m.helm("install", "reader", archive, "-n", "reader", "--create-namespace", "--set", "message=by hand")
	m.helm("upgrade", "reader", archive, "-n", "reader", "--set", "message=by hand")
	m.deploy()
	m.wantTemplateText(3, "3 false true a")

	m.deleteReports()
	m.wantTemplateText(3, "3 false true a")
	m.values["message"] = "b"
	m.deploy()
	m.wantTemplateText(4, "4 false true b")
	m.deleteReports()
	m.wantTemplateText(4, "4 false true b")

	// The profile is deleted and leaves the release on the member, and is created again.
	m.kubectl(m.hub, "patch", "clusterprofile", m.profile(), "--type=merge", "-p", `{"spec":{"stopMatchingBehavior":"LeavePolicies"}}`)
	m.kubectl(m.hub, "delete", "clusterprofile", m.profile())
	m.eventually("the summary is deleted", func() error { return m.wantMissing(m.hub, &configv1beta1.ClusterSummary{}, m.summary(), "fleet") })
	m.deploy()
	m.wantTemplateText(5, "5 false true b")
}

// waitsForHelm deploys a release while a user installs it with the helm command. The templates of the next revision
// read that it is an upgrade.
func (s *commandsStory) waitsForHelm() {
	s.t.Helper()
	m := *s
	m.helmMember = &helmMember{
		world: s.world, plane: s.plane, cluster: s.cluster, chart: "revision", version: "0.1.0", release: "held", values: map[string]any{"message": "a"},
	}
	archive := filepath.Join(s.archives, "revision.tgz") // of readsItsRevision
	installed := make(chan error, 1)
	go func() {
		_, err := m.try(m.plane, "helm", "install", "held", archive, "-n", "held", "--create-namespace", "--set", "message=by hand,held=true")
		installed <- err
	}()
	m.eventually("helm waits for its hook", func() error {
		_, err := m.try(m.plane, "kubectl", "get", "job", "held", "-n", "held")
		return err
	})
	m.deploy()
	m.eventually("the release waits for helm", func() error {
		out, err := m.try(m.hub, "kubectl", "get", "clustersummary", m.summary(), "-n", "fleet", "-o", "yaml")
		if err == nil && !strings.Contains(out, "waiting for another client of Helm") {
			err = fmt.Errorf("the summary is %s", out)
		}
		return err
	})
	m.kubectl(m.plane, "label", "nodes", "--all", "held=no")
	if err := <-installed; err != nil {
		s.t.Fatal(err)
	}
	m.wantTemplateText(2, "2 false true a")
}

// wantTemplateText waits until a revision is deployed, and compares the text that its template has written. helm
// history must have no further revisions.
func (s *commandsStory) wantTemplateText(revision int, want string) {
	s.t.Helper()
	s.awaitRevision(revision)
	if got := s.kubectl(s.plane, "get", "configmap", "revision", "-n", s.release, "-o", "jsonpath={.data.read}"); got != want {
		s.t.Errorf("the templates of revision %d on %s read %q, want %q", revision, s.cluster, got, want)
	}
	var expected, got []string
	for i := 1; i <= revision; i++ {
		status := "superseded"
		if i == revision {
			status = "deployed"
		}
		expected = append(expected, fmt.Sprintf("%d %s", i, status))
	}
	for _, line := range s.history() {
		words := strings.Fields(line)
		got = append(got, words[0]+" "+words[1])
	}
	if diff := cmp.Diff(expected, got); diff != "" {
		s.t.Errorf("helm history on %s (-want +got):\n%s", s.cluster, diff)
	}
}

// deleteReports deletes the status of the summary, and in pull mode its ConfigurationGroup, and waits until the hub has
// written them again.
func (s *commandsStory) deleteReports() {
	s.t.Helper()
	if s.cluster == "pulled" {
		groups := []string{"configurationgroups", "-n", "fleet", "-o", "jsonpath={range .items[*]}{.metadata.uid}={.status.status}{\"\\n\"}{end}"}
		before, _, _ := strings.Cut(s.kubectl(s.hub, append([]string{"get"}, groups...)...), "=")
		s.kubectl(s.hub, "delete", "configurationgroups", "-n", "fleet", "--all")
		s.eventually("the group exists again", func() error {
			out, err := s.try(s.hub, "kubectl", append([]string{"get"}, groups...)...)
			if err == nil && (strings.HasPrefix(out, before) || strings.TrimSpace(out) == "" || !strings.HasSuffix(strings.TrimSpace(out), "=Provisioned")) {
				err = fmt.Errorf("the groups are %q", out)
			}
			return err
		})
	}
	s.kubectl(s.hub, "patch", "clustersummary", s.summary(), "-n", "fleet", "--subresource=status", "--type=merge", "-p", `{"status":null}`)
	s.eventually("the status is written again", func() error {
		return s.wantStatuses("fleet", s.summary(), "Provisioned")
	})
}
