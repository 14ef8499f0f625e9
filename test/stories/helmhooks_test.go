package stories

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/examples"
)

// hookTemplate has hooks for every event, in reverse order: Helm orders them by their weights and names. A subchart has
// its own hook for each event.
const hookTemplate = `
{{- $policies := dict "early" "before-hook-creation,hook-succeeded" "late" "before-hook-creation,hook-failed" "only" "" "fails" "hook-failed" "hangs" "" }}
{{- $weights := dict "early" -5 "late" 5 "only" 0 "fails" 9 "hangs" 9 }}
{{- range $event := .Values.events }}
{{- range $part := (prepend (prepend $.Values.parts (eq $event $.Values.fails | ternary "fails" "")) (eq $event $.Values.hangs | ternary "hangs" "")) }}
{{- if $part }}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: hook-{{ $event }}-{{ $part }}
  annotations:
    stories.towline.dev/revision: "{{ $.Values.revision }}"
    helm.sh/hook: {{ $event }}
    helm.sh/hook-weight: "{{ get $weights $part }}"
    {{- with get $policies $part }}
    helm.sh/hook-delete-policy: {{ . }}
    {{- end }}
spec:
  backoffLimit: 0
  {{- if eq $part "fails" }}
  activeDeadlineSeconds: 1
  {{- end }}
  template:
    spec:
      restartPolicy: Never
      containers: [{name: main, image: "example.com/hook:1"}]
      {{- if or (eq $part "fails") (eq $part "hangs") }}
      nodeSelector: {no-such: node}
      {{- end }}
{{- end }}
{{- end }}
{{- if $.Values.others }}
---
apiVersion: v1
kind: Pod
metadata:
  name: hook-{{ $event }}-pod
  annotations: {stories.towline.dev/revision: "{{ $.Values.revision }}", helm.sh/hook: {{ $event }}}
spec:
  restartPolicy: Never
  containers: [{name: main, image: "example.com/hook:1"}]
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: hook-{{ $event }}-note
  annotations: {stories.towline.dev/revision: "{{ $.Values.revision }}", helm.sh/hook: {{ $event }}, helm.sh/hook-delete-policy: hook-succeeded}
{{- end }}
{{- end }}
`

const subchartHook = `
{{- range $event := list "pre-install" "post-install" "pre-upgrade" "post-upgrade" "pre-delete" "post-delete" "test" }}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: hook-{{ $event }}-sub
  annotations: {stories.towline.dev/revision: "{{ $.Values.revision }}", helm.sh/hook: {{ $event }}, helm.sh/hook-weight: "-10"}
spec:
  template:
    spec:
      restartPolicy: Never
      containers: [{name: main, image: "example.com/hook:1"}]
{{- end }}
`

func hookedChart() examples.Chart {
	return examples.Chart{Name: "hooked", Files: map[string]string{
		"templates/hooks.yaml":                 hookTemplate,
		"charts/greeting/templates/hooks.yaml": subchartHook,
		"templates/revision.yaml": `
apiVersion: v1
kind: ConfigMap
metadata: {name: revision, annotations: {stories.towline.dev/revision: "{{ .Values.revision }}"}}
data: {revision: "{{ .Values.revision }}"}
`,
	}}
}

// hookStory is a member with the chart, and the process that deploys it.
type hookStory struct {
	*helmMember
	log      *hookLog
	revision int
	gate     *gate // in front of the member
	// deployer is the process that deploys: the agent, or the hub in push mode. both are the agent and the hub. hubAlone
	// is the hub in pull mode, which is killed while the agent continues; it is the zero victim in push mode.
	deployer, both, hubAlone victim
}

// TestHelmHooks deploys a chart with every kind of hook. It is the longest story, and waits most of the time: it starts
// first, and its subtests take no slots.
func TestHelmHooks(t *testing.T) {
	t.Parallel()
	t.Run("push", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.serveRepository(hookedChart())
		w.kubectl(w.hub, "create", "namespace", "fleet")
		plane, gate := w.gatedPushMember("fleet", "pushed", "mode=pushed")
		s := w.newHookStory(&helmMember{world: w, plane: plane, cluster: "pushed"})
		s.gate, s.deployer = gate, victim{kill: func() { w.hubProcess.kill() }, start: func() { w.startHub() }}
		s.both = s.deployer
		s.runLifecycle()
		s.killDuringUninstall(s.deployer)
		s.awaitUninstalled()
	})
	t.Run("pull", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.serveRepository(hookedChart())
		agent := w.startProcessAgent("fleet", "pulled", "mode=pulled")
		s := w.newHookStory(&helmMember{world: w, plane: agent.plane, cluster: "pulled"})
		s.gate, s.deployer = agent.member, victim{kill: func() { agent.process.kill() }, start: agent.start}
		s.both = victim{
			kill:  func() { agent.process.kill(); w.hubProcess.kill() },
			start: func() { w.startHub(); agent.start() },
		}
		s.hubAlone = victim{kill: func() { w.hubProcess.kill() }, start: func() {
			agent.member.resume()
			s.eventually("the agent continues without the hub", func() error { return s.wantHookEvent("created", "hook-post-upgrade-late") })
			w.startHub()
		}}
		s.runLifecycle()

		// The agent gets the removal request. Then the hub and its API server stop, and the agent continues without them.
		s.killDuringUninstall(victim{
			kill: func() {
				s.both.kill()
				if err := w.hub.Stop(); err != nil {
					t.Fatal(err)
				}
			},
			start: agent.start,
		})
		s.awaitUninstalled()
		if err := w.hub.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.startHub()
		w.eventually("the hub deletes the summary", func() error { return w.wantMissing(w.hub, &configv1beta1.ClusterSummary{}, s.summary(), "fleet") })
	})
}

func (w *world) newHookStory(m *helmMember) *hookStory {
	m.chart, m.version, m.release = "hooked", "0.1.0", "hooked"
	return &hookStory{helmMember: m, log: w.watchHooks(m.plane, m.release)}
}

// upgrade deploys another revision, with hooks for events.
func (s *hookStory) upgrade(values map[string]any) {
	s.t.Helper()
	s.revision++
	s.values = map[string]any{
		"revision": s.revision, "greeting": map[string]any{"revision": s.revision}, "others": true, "parts": []string{"late", "early"},
		"events": []string{"test", "post-delete", "pre-delete", "post-upgrade", "pre-upgrade", "post-install", "pre-install"},
		"fails":  "", "hangs": "",
	}
	for key, value := range values {
		s.values[key] = value
	}
	s.deploy()
}

func (s *hookStory) wantHookEvent(what, name string) error {
	if !s.log.has(what, name, strconv.Itoa(s.revision)) {
		return fmt.Errorf("%s %s was not logged for revision %d", what, name, s.revision)
	}
	return nil
}

// hooksOf returns the expected events when the hooks of an event run. again means that the objects of an earlier run
// exist.
func hooksOf(event string, again bool) []string {
	name := func(part string) string { return "hook-" + event + "-" + part }
	var all []string
	run := func(part string, kept, ends bool) {
		if again && kept {
			all = append(all, "deleted "+name(part))
		}
		all = append(all, "created "+name(part))
		if ends {
			all = append(all, "ended "+name(part))
		}
	}
	run("sub", true, true)
	run("early", false, true)
	run("note", false, false)
	run("pod", true, true)
	run("late", true, true)
	return append(all, "deleted "+name("note"), "deleted "+name("early"))
}

// wantHooks waits until the events of hooks since a resource version are exactly the given events, one after the other.
// The event "objects" stands for the objects of the release.
func (s *hookStory) wantHooks(since int64, again bool, events ...string) {
	s.t.Helper()
	var want []string
	for _, event := range events {
		if event == "objects" {
			want = append(want, event)
			continue
		}
		want = append(want, hooksOf(event, again && event == "test")...)
	}
	s.eventually("the hooks run in Helm's order", func() error {
		var got []string
		for _, line := range s.log.list(since) {
			if !strings.Contains(line, " hook-") {
				line = "objects"
			}
			if len(got) == 0 || line != "objects" || got[len(got)-1] != line {
				got = append(got, line)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			return fmt.Errorf("hooks on %s (-want +got):\n%s", s.cluster, diff)
		}
		return nil
	})
}

// runLifecycle installs and upgrades the release, with hooks that fail and hang, and with processes killed meanwhile.
func (s *hookStory) runLifecycle() {
	s.t.Helper()
	s.options = map[string]any{"runTests": true}
	s.killDuringInstall()
	s.awaitRevision(1)
	s.wantHooks(0, false, "pre-install", "objects", "post-install", "test")

	// An upgrade changes the ConfigMap, and creates and deletes nothing, so that only hooks have events.
	since := s.log.last()
	s.upgrade(nil)
	s.awaitRevision(2)
	s.wantHooks(since, true, "pre-upgrade", "post-upgrade", "test")

	s.options = map[string]any{"timeout": "45s"}
	s.killDuringUpgrade()
	s.hookHangs()
	s.hookFails()

	s.upgrade(nil)
	s.eventually("the last revision is deployed", func() error {
		data, err := s.data(s.plane, s.release, "revision")
		if err == nil && data["revision"] != strconv.Itoa(s.revision) {
			err = fmt.Errorf("values of revision %s are deployed, want %d", data["revision"], s.revision)
		}
		return errors.Join(err, s.wantStatuses("fleet", s.summary(), "Provisioned"), s.wantHookEvent("ended", "hook-post-upgrade-late"))
	})
	if repeated := s.log.repeated(); len(repeated) > 0 {
		s.t.Errorf("hooks on %s ran more than once: %q", s.cluster, repeated)
	}
}

// hookHangs upgrades to a revision with a hook that never ends. Nothing else waits for it, and the time limit ends it.
func (s *hookStory) hookHangs() {
	s.t.Helper()
	s.upgrade(map[string]any{"hangs": "pre-upgrade"})
	s.eventually("the hook runs", func() error { return s.wantHookEvent("created", "hook-pre-upgrade-hangs") })
	s.apply(s.hub, fmt.Sprintf(`
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: meanwhile}
data:
  objects.yaml: |
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: default, name: meanwhile}
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: meanwhile}
spec:
  clusterSelector: {matchLabels: {mode: %s}}
  policyRefs: [{kind: ConfigMap, namespace: default, name: meanwhile}]
`, s.cluster))
	s.awaitProvisioned("fleet", "meanwhile-sveltos-"+s.cluster)
	if err := s.wantStatuses("fleet", s.summary(), "Provisioning"); err != nil {
		s.t.Errorf("the other profile was not deployed while the hook was running: %v", err)
	}
	s.awaitFailure("upgrade of revision", "pre-upgrade hook Job batch hooked/hook-pre-upgrade-hangs failed: it did not end within 45s")
	// A hook with the default policy stays, so that users can read its logs.
	s.kubectl(s.plane, "get", "job", "hook-pre-upgrade-hangs", "-n", s.release)
}

// hookFails upgrades to a revision with a hook that fails. The policy hook-failed deletes it.
func (s *hookStory) hookFails() {
	s.t.Helper()
	s.upgrade(map[string]any{"fails": "post-upgrade"})
	s.awaitFailure("upgrade of revision", "post-upgrade hook Job batch hooked/hook-post-upgrade-fails failed: Job was active longer than specified deadline")
	s.eventually("the failed hook is deleted", func() error { return s.wantHookEvent("deleted", "hook-post-upgrade-fails") })
}

// awaitUninstalled waits until the release is uninstalled, and checks the hooks before and after that.
func (s *hookStory) awaitUninstalled() {
	s.t.Helper()
	s.eventually("the release is uninstalled", func() error {
		records := &corev1.SecretList{}
		err := s.client(s.plane).List(s.t.Context(), records, client.InNamespace(s.release), client.MatchingLabels{"owner": "helm"})
		if err == nil && len(records.Items) > 0 {
			err = fmt.Errorf("%d release records are left", len(records.Items))
		}
		return err
	})
	lines := s.log.list(0)
	began := slices.Index(lines, "created hook-pre-delete-sub")
	if began < 0 {
		s.t.Fatalf("no hook was run before the uninstallation: %q", lines)
	}
	var got []string
	for _, line := range lines[began:] {
		if !strings.Contains(line, " hook-") {
			line = "objects"
		}
		if len(got) == 0 || line != "objects" || got[len(got)-1] != line {
			got = append(got, line)
		}
	}
	want := slices.Concat(hooksOf("pre-delete", false), []string{"objects"}, hooksOf("post-delete", false))
	if diff := cmp.Diff(want, got); diff != "" {
		s.t.Errorf("hooks of the uninstallation on %s (-want +got):\n%s", s.cluster, diff)
	}
}
