package stories

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// generatingChart generates a password and certificates, and checks the APIs of the member. It looks up its own Secret,
// like charts with Bitnami's library: an upgrade fails without the Secret, and takes the password from it.
func generatingChart() examples.Chart {
	return examples.Chart{Name: "generating", Files: map[string]string{"templates/generated.yaml": `
{{- $ca := genCA "the story" 365 }}
{{- $found := lookup "v1" "Secret" .Release.Namespace "generated" }}
{{- if and .Release.IsUpgrade (not $found) }}{{ fail "PASSWORDS ERROR: lookup does not find Secret generated" }}{{ end }}
{{- $cert := genSignedCert "web" nil (list "web.example.com") 365 $ca }}
apiVersion: v1
kind: Secret
metadata: {name: generated}
stringData:
  password: {{ if $found }}{{ $found.data.password | b64dec | quote }}{{ else }}{{ randAlphaNum 32 | quote }}{{ end }}
  ca.crt: {{ $ca.Cert | quote }}
  tls.crt: {{ $cert.Cert | quote }}
  tls.key: {{ $cert.Key | quote }}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: seen}
data:
  message: {{ .Values.message | quote }}
  widgets: "{{ .Capabilities.APIVersions.Has "stories.towline.dev/v1" }}"
  found: "{{ $found | empty | not }}"
`}}
}

const widgetsProfile = `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: widgets}
data:
  crd.yaml: |
    apiVersion: apiextensions.k8s.io/v1
    kind: CustomResourceDefinition
    metadata: {name: widgets.stories.towline.dev}
    spec:
      group: stories.towline.dev
      names: {kind: Widget, listKind: WidgetList, plural: widgets, singular: widget}
      scope: Namespaced
      versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}]
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: widgets}
spec:
  clusterSelector: {matchLabels: {mode: all}}
  policyRefs: [{kind: ConfigMap, namespace: default, name: widgets}]
`

// generatedStory has members with the chart, and the generated values of each member.
type generatedStory struct {
	*world
	members []*helmMember
	values  map[string]map[string]string // by cluster
}

// TestHelmGeneratedValues upgrades a chart that generates a password and certificates. Each member keeps its own values
// after each event, and no other member can read them.
func TestHelmGeneratedValues(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	w.serveRepository(generatingChart())
	s := &generatedStory{world: w, values: map[string]map[string]string{}}
	for cluster, plane := range map[string]*localkube.Plane{
		"pushed": w.pushMember("fleet", "pushed", "mode=all"), "pulled": w.pullMember("fleet", "pulled", "mode=all"),
		"other": w.pullMember("fleet", "other", "mode=all"),
	} {
		s.members = append(s.members, &helmMember{
			world: w, plane: plane, cluster: cluster, chart: "generating", version: "0.1.0", release: "generating", shared: "all",
		})
	}
	payloads := w.watchPayloads()
	s.upgrade(1)
	for _, m := range s.members {
		s.values[m.cluster] = m.generated()
	}
	s.wantDifferent()
	w.hubProcess.kill()
	w.startHub() // its rendering finds the Secret, and creates no revision
	s.upgrade(2)
	s.wantSame("an upgrade")

	w.hubProcess.kill()
	if err := os.RemoveAll(filepath.Join(w.dir, "cache")); err != nil {
		t.Fatal(err)
	}
	w.startHub()
	s.upgrade(3)
	s.wantSame("the hub has lost its cache")

	w.apply(w.hub, widgetsProfile)
	for _, m := range s.members {
		w.eventually("the chart sees the new API of "+m.cluster, func() error {
			seen, err := w.data(m.plane, m.release, "seen")
			if want := map[string]string{"found": "true", "message": "3", "widgets": "true"}; err == nil && !maps.Equal(seen, want) {
				err = fmt.Errorf("its values are %s", seen)
			}
			return err
		})
	}
	s.wantSame("a new API")
	if out := w.kubectl(w.hub, "get", "events", "-n", "fleet", "-o", "jsonpath={.items[*].reason}"); strings.Contains(out, "LookupUnanswered") {
		t.Errorf("the lookup of an object of the release is reported: %s", out)
	}
	for _, m := range s.members {
		w.wantHidden(w.hub, s.values[m.cluster])
		w.wantHidden(m.plane, s.values[m.cluster])
	}
	payloads.wantPrivate(w, s.values)
	s.handOver()
}

// handOver moves the release to another profile that waits for it, then to a third one with a lower tier.
func (s *generatedStory) handOver() {
	s.t.Helper()
	s.deployBy("waiting", 100, "4")
	s.awaitStatus("waiting", "FailedNonRetriable")
	s.kubectl(s.hub, "delete", "clusterprofile", "all")
	s.awaitStatus("waiting", "Provisioned")
	s.wantSame("another profile waited for the release")
	s.deployBy("taking", 50, "5")
	s.awaitStatus("taking", "Provisioned")
	s.kubectl(s.hub, "delete", "clusterprofile", "waiting")
	s.wantSame("another profile took the release over")
	s.deployBy("taking", 50, "6")
	for _, m := range s.members {
		s.eventually("an upgrade by the other profile on "+m.cluster, func() error {
			seen, err := s.data(m.plane, m.release, "seen")
			if err == nil && seen["message"] != "6" {
				err = fmt.Errorf("the message is %q", seen["message"])
			}
			return err
		})
	}
	s.wantSame("an upgrade by the other profile")
	s.kubectl(s.hub, "delete", "clusterprofile", "taking")
	s.eventually("the generated values are deleted", func() error {
		out, err := s.try(s.hub, "kubectl", "get", "secrets", "-n", "fleet", "--field-selector=type=towline.dev/generated-values", "-o", "name")
		if err == nil && out != "" {
			err = fmt.Errorf("Secrets still exist: %s", out)
		}
		return err
	})
}

// deployBy deploys the release with a profile of this name.
func (s *generatedStory) deployBy(profile string, tier int, message string) {
	s.t.Helper()
	s.members[0].values = map[string]any{"message": message}
	manifest := strings.Replace(s.members[0].manifest(), "name: all", "name: "+profile, 1)
	s.apply(s.hub, strings.Replace(manifest, "spec:\n", fmt.Sprintf("spec:\n  tier: %d\n", tier), 1))
}

// awaitStatus waits until the summaries of a profile have a status.
func (s *generatedStory) awaitStatus(profile, status string) {
	s.t.Helper()
	for _, m := range s.members {
		s.eventually("profile "+profile+" on "+m.cluster, func() error {
			return s.wantStatuses("fleet", profile+"-sveltos-"+m.cluster, status)
		})
	}
}

// upgrade deploys a revision to all members.
func (s *generatedStory) upgrade(revision int) {
	s.t.Helper()
	s.members[0].values = map[string]any{"message": fmt.Sprint(revision)}
	s.members[0].deploy()
	for _, m := range s.members {
		m.awaitRevision(revision)
	}
}

// wantDifferent checks that all members have different values.
func (s *generatedStory) wantDifferent() {
	s.t.Helper()
	for key := range s.values["pushed"] {
		different := map[string]bool{}
		for _, values := range s.values {
			different[values[key]] = true
		}
		if len(different) != len(s.members) {
			s.t.Errorf("members share a generated %s", key)
		}
	}
}

// wantSame checks that every member still has its first generated values.
func (s *generatedStory) wantSame(after string) {
	s.t.Helper()
	for _, m := range s.members {
		if diff := cmp.Diff(s.values[m.cluster], m.generated()); diff != "" {
			s.t.Errorf("generated values of %s after %s (-want +got):\n%s", m.cluster, after, diff)
		}
	}
}

// generated returns the values that the chart generated for the member.
func (m *helmMember) generated() map[string]string {
	m.t.Helper()
	secret := &corev1.Secret{}
	if err := m.client(m.plane).Get(m.t.Context(), client.ObjectKey{Namespace: m.release, Name: "generated"}, secret); err != nil {
		m.t.Fatal(err)
	}
	values := map[string]string{}
	for key, value := range secret.Data {
		values[key] = string(value)
	}
	if len(values["password"]) != 32 || !strings.Contains(values["tls.key"], "PRIVATE KEY") {
		m.t.Fatalf("the chart generated keys %q", slices.Sorted(maps.Keys(values)))
	}
	return values
}

// wantHidden checks that only Secrets of a plane have the password and the key.
func (w *world) wantHidden(plane *localkube.Plane, values map[string]string) {
	w.t.Helper()
	listed := w.kubectl(plane, "api-resources", "--verbs=list", "-o", "name")
	kinds := slices.DeleteFunc(strings.Fields(listed), func(kind string) bool { return kind == "secrets" })
	out := w.kubectl(plane, "get", strings.Join(kinds, ","), "-A", "-o", "json", "--ignore-not-found")
	for _, secret := range []string{values["password"], strings.Split(values["tls.key"], "\n")[2]} {
		for _, text := range []string{secret, base64.StdEncoding.EncodeToString([]byte(secret))} {
			if strings.Contains(out, text) {
				w.t.Errorf("a generated value is in an object of %s that is no Secret", plane.Name)
			}
		}
	}
}

// payloads has the content of all bundles that were ever on the hub, by namespace.
type payloads struct {
	mu  sync.Mutex // guards all
	all map[string][]libv1beta1.ConfigurationBundle
}

// watchPayloads collects the content of bundles from this time on.
func (w *world) watchPayloads() *payloads {
	w.t.Helper()
	c, err := client.NewWithWatch(w.hub.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.t.Context()))
	events, err := c.Watch(ctx, &libv1beta1.ConfigurationBundleList{})
	if err != nil {
		cancel()
		w.t.Fatal(err)
	}
	p := &payloads{all: map[string][]libv1beta1.ConfigurationBundle{}}
	var reader sync.WaitGroup
	reader.Go(func() {
		for event := range events.ResultChan() {
			if b, ok := event.Object.(*libv1beta1.ConfigurationBundle); ok && event.Type == watch.Added {
				p.mu.Lock()
				p.all[b.Namespace] = append(p.all[b.Namespace], *b)
				p.mu.Unlock()
			}
		}
	})
	w.t.Cleanup(func() { cancel(); events.Stop(); reader.Wait() })
	return p
}

// contents returns the decrypted and decompressed payloads by namespace.
func (p *payloads) contents(w *world) map[string][]string {
	w.t.Helper()
	decoder, err := zstd.NewReader(nil)
	if err != nil {
		w.t.Fatal(err)
	}
	defer decoder.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	contents := map[string][]string{}
	for namespace, all := range p.all {
		for _, bundle := range all {
			text, err := decoder.DecodeAll(w.decryptPayload(bundle), nil)
			if err != nil {
				w.t.Fatal(errors.Join(fmt.Errorf("content of a bundle in %s", namespace), err))
			}
			contents[namespace] = append(contents[namespace], string(text))
		}
	}
	return contents
}

// wantPrivate checks that each pull member's values were in bundles of one namespace only, without other members'
// values.
func (p *payloads) wantPrivate(w *world, generated map[string]map[string]string) {
	w.t.Helper()
	found := map[string]map[string]bool{} // namespaces by cluster
	for namespace, all := range p.contents(w) {
		for _, text := range all {
			for cluster, values := range generated {
				if strings.Contains(text, values["password"]) {
					if found[cluster] == nil {
						found[cluster] = map[string]bool{}
					}
					found[cluster][namespace] = true
				}
			}
		}
	}
	if len(found) != 2 || len(found["pulled"]) != 1 || len(found["other"]) != 1 || cmp.Equal(found["pulled"], found["other"]) {
		w.t.Errorf("passwords were in bundles of these namespaces: %v; want one namespace for each of the pull members", found)
	}
}
