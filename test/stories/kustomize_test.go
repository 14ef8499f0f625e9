package stories

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/localkube"
)

// kustomizeProfile has an overlay with a component and values, and a kustomization in a Secret. It patches and labels
// the objects of both.
const kustomizeProfile = `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: values}
data: {color: blue}
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: kustom}
spec:
  clusterSelector: {matchLabels: {env: test}}
  kustomizationRefs:
  - kind: ConfigMap
    namespace: default
    name: app
    path: overlays/{{ .Cluster.metadata.labels.env }}
    components: ['../../components/{{ .Cluster.metadata.labels.region }}']
    targetNamespace: shop
    values: {region: '{{ .Cluster.metadata.labels.region }}', color: red}
    valuesFrom: [{kind: ConfigMap, namespace: default, name: values}]
  - {kind: Secret, namespace: default, name: private, targetNamespace: shop}
  patches:
  - target: {kind: ConfigMap, name: test-settings}
    patch: '[{op: add, path: /data/patched, value: "for {{ .ClusterName }}"}]'
  extraLabels: {team: shop}
`

// kustomizeTree returns the files of the ConfigMap app, with a mode in its settings and a component for each cluster.
func kustomizeTree(mode string) map[string]string {
	tree := map[string]string{
		"base/kustomization.yaml":          "resources: [settings.yaml, web.yaml]\n",
		"base/settings.yaml":               "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings}\ndata: {mode: base, region: '{{ .region }}', color: '{{ .color }}'}\n",
		"base/web.yaml":                    "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {selector: {app: web}, ports: [{port: 80}]}\n",
		"overlays/test/kustomization.yaml": "resources: [../../base]\nnamePrefix: test-\npatches: [{path: mode.yaml}]\n",
		"overlays/test/mode.yaml":          "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings}\ndata: {mode: " + mode + "}\n",
	}
	for _, cluster := range []string{"pull-1", "push-1"} {
		tree["components/"+cluster+"/kustomization.yaml"] = "apiVersion: kustomize.config.k8s.io/v1alpha1\nkind: Component\npatches:\n" +
			"- target: {kind: ConfigMap, name: settings}\n  patch: '[{\"op\": \"add\", \"path\": \"/data/limits\", \"value\": \"of " + cluster + "\"}]'\n"
	}
	return tree
}

// TestKustomize deploys kustomizations from a ConfigMap and a Secret to a pull and a push member: changes of the
// sources are deployed, drift is corrected, bad input and a deleted source change no delivered object, and the objects
// are deleted with the profile.
func TestKustomize(t *testing.T) {
	awaitSlot(t)
	s := newKustomizeStory(t)
	s.applySources(kustomizeTree("first"))
	s.w.apply(s.w.hub, kustomizeProfile)
	s.wantSettings("first", "blue")
	s.wantReported()

	// Changes of the sources.
	s.applySources(kustomizeTree("second"))
	s.wantSettings("second", "blue")
	s.w.apply(s.w.hub, strings.Split(strings.Replace(kustomizeProfile, "blue", "green", 1), "---")[0])
	s.wantSettings("second", "green")

	s.causeDrift()
	s.wantSettings("second", "green")
	s.wantFailures()

	s.applySources(kustomizeTree("third"))
	s.wantSettings("third", "green")
	s.applyExample()

	s.w.kubectl(s.w.hub, "delete", "clusterprofile", "kustom", "--wait=false")
	for name, member := range s.members {
		s.w.eventually("objects are removed from "+name, func() error {
			return errors.Join(
				wantNotFound(s.w.client(member).Get(t.Context(), settingsKey(), &corev1.ConfigMap{})),
				wantNotFound(s.w.client(member).Get(t.Context(), client.ObjectKey{Namespace: "shop", Name: "test-web"}, &corev1.Service{})),
				wantNotFound(s.w.client(member).Get(t.Context(), client.ObjectKey{Namespace: "shop", Name: "login"}, &corev1.Secret{})),
			)
		})
	}
}

// kustomizeStory has a pull and a push member by name, and their namespaces on the hub.
type kustomizeStory struct {
	w          *world
	members    map[string]*localkube.Plane
	namespaces map[string]string
}

func newKustomizeStory(t *testing.T) *kustomizeStory {
	t.Helper()
	w := newWorld(t)
	return &kustomizeStory{
		w: w,
		members: map[string]*localkube.Plane{
			"pull-1": w.pullMember("edge", "pull-1", "env=test,region=pull-1"), "push-1": w.pushMember("cloud", "push-1", "env=test,region=push-1"),
		},
		namespaces: map[string]string{"pull-1": "edge", "push-1": "cloud"},
	}
}

func settingsKey() client.ObjectKey {
	return client.ObjectKey{Namespace: "shop", Name: "test-settings"}
}

// applySources writes the ConfigMap app with a tree, and the Secret private.
func (s *kustomizeStory) applySources(tree map[string]string) {
	s.w.t.Helper()
	s.w.apply(s.w.hub, fmt.Sprintf(`
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: app}
binaryData: {kustomize.tar.gz: %s}
---
apiVersion: v1
kind: Secret
metadata: {namespace: default, name: private}
type: addons.projectsveltos.io/cluster-profile
stringData:
  kustomization.yaml: |
    secretGenerator: [{name: login, literals: [password=%s], options: {disableNameSuffixHash: true}}]
`, base64.StdEncoding.EncodeToString(s.pack(tree)), password))
}

// pack returns a tar.gz archive.
func (s *kustomizeStory) pack(tree map[string]string) []byte {
	s.w.t.Helper()
	var packed bytes.Buffer
	compressed := gzip.NewWriter(&packed)
	writer := tar.NewWriter(compressed)
	for _, name := range slices.Sorted(maps.Keys(tree)) {
		err := writer.WriteHeader(&tar.Header{Name: "./" + name, Size: int64(len(tree[name])), Mode: 0o600})
		if err == nil {
			_, err = writer.Write([]byte(tree[name]))
		}
		if err != nil {
			s.w.t.Fatal(err)
		}
	}
	if err := errors.Join(writer.Close(), compressed.Close()); err != nil {
		s.w.t.Fatal(err)
	}
	return packed.Bytes()
}

// wantSettings waits until the members have the objects of the profile, and the summaries are Provisioned.
func (s *kustomizeStory) wantSettings(mode, color string) {
	s.w.t.Helper()
	for name, member := range s.members {
		s.w.eventually(fmt.Sprintf("%s has mode %s and color %s", name, mode, color), func() error {
			settings, login := &corev1.ConfigMap{}, &corev1.Secret{}
			err := errors.Join(
				s.w.client(member).Get(s.w.t.Context(), settingsKey(), settings),
				s.w.client(member).Get(s.w.t.Context(), client.ObjectKey{Namespace: "shop", Name: "login"}, login),
			)
			want := map[string]string{"mode": mode, "color": color, "region": name, "limits": "of " + name, "patched": "for " + name}
			if diff := cmp.Diff(want, settings.Data); err == nil && diff != "" {
				err = errors.New(diff)
			}
			if got := string(login.Data["password"]); err == nil && got != password {
				err = fmt.Errorf("the Secret has password %q", got)
			}
			if got := []string{settings.Labels["team"], login.Labels["team"]}; err == nil && !slices.Equal(got, []string{"shop", "shop"}) {
				err = fmt.Errorf("the label team has the values %q, want shop", got)
			}
			return errors.Join(err, s.w.wantStatuses(s.namespaces[name], "kustom-sveltos-"+name, "Provisioned"))
		})
	}
}

// wantReported checks that the ConfigurationGroup of the pull member, the summary, its wide table and the
// ClusterConfiguration have the feature.
func (s *kustomizeStory) wantReported() {
	s.w.t.Helper()
	groups := &libv1beta1.ConfigurationGroupList{}
	if err := s.w.client(s.w.hub).List(s.w.t.Context(), groups, client.MatchingLabels{libv1beta1.PullRequestorFeatureLabel: "Kustomize"}); err != nil {
		s.w.t.Fatal(err)
	}
	if len(groups.Items) != 1 || groups.Items[0].Annotations[libv1beta1.PullRequestorNameAnnotation] != "kustom-sveltos-pull-1" {
		s.w.t.Errorf("ConfigurationGroups of the feature Kustomize: %v, want one for kustom-sveltos-pull-1", groups.Items)
	}
	for name := range s.members {
		summary := "kustom-sveltos-" + name
		row := s.w.tableRow(s.w.kubectl(s.w.hub, "get", "clustersummaries", "-n", s.namespaces[name], "-o", "wide"), summary)
		if err := wantFields(row, summary, "*", "Provisioned"); err != nil {
			s.w.t.Error(err)
		}
		s.w.eventually("the ClusterConfiguration has the objects of "+name, func() error {
			var all configv1beta1.ClusterConfigurationList
			if err := s.w.client(s.w.hub).List(s.w.t.Context(), &all, client.InNamespace(s.namespaces[name])); err != nil {
				return err
			}
			var got []string
			for _, profile := range all.Items[0].Status.ClusterProfileResources {
				for _, feature := range profile.Features {
					for _, resource := range feature.Resources {
						got = append(got, fmt.Sprintf("%s %s %s %s/%s", profile.ClusterProfileName, feature.FeatureID, resource.Kind, resource.Namespace, resource.Name))
					}
				}
			}
			slices.Sort(got)
			want := []string{"kustom Kustomize ConfigMap shop/test-settings", "kustom Kustomize Secret shop/login", "kustom Kustomize Service shop/test-web"}
			if diff := cmp.Diff(want, got); diff != "" {
				return errors.New(diff)
			}
			return nil
		})
	}
}

// causeDrift edits one object on the members, and deletes another one, which must exist again.
func (s *kustomizeStory) causeDrift() {
	s.w.t.Helper()
	for name, member := range s.members {
		settings, login := &corev1.ConfigMap{}, &corev1.Secret{}
		members := s.w.client(member)
		err := errors.Join(
			members.Get(s.w.t.Context(), settingsKey(), settings),
			members.Get(s.w.t.Context(), client.ObjectKey{Namespace: "shop", Name: "login"}, login),
		)
		settings.Data["mode"] = "edited"
		if err = errors.Join(err, members.Update(s.w.t.Context(), settings), members.Delete(s.w.t.Context(), login)); err != nil {
			s.w.t.Fatalf("%s: %v", name, err)
		}
	}
}

// wantFailures breaks the source, and deletes it. Both are reported, and the members keep their objects.
func (s *kustomizeStory) wantFailures() {
	s.w.t.Helper()
	before := map[string]map[string]fingerprint{}
	for name, member := range s.members {
		before[name] = s.w.fingerprints(member, "shop")
		if len(before[name]) != 2 {
			s.w.t.Fatalf("objects on %s: %v", name, before[name])
		}
	}
	wantFailure := func(texts ...string) {
		s.w.t.Helper()
		for name, member := range s.members {
			s.w.awaitFailureReport(s.namespaces[name], "kustom-sveltos-"+name, texts)
			if diff := cmp.Diff(before[name], s.w.fingerprints(member, "shop")); diff != "" {
				s.w.t.Errorf("objects on %s (-want +got):\n%s", name, diff)
			}
		}
	}
	broken := kustomizeTree("broken")
	delete(broken, "base/web.yaml")
	s.applySources(broken)
	wantFailure("ConfigMap default/app", "path overlays/test", "base/kustomization.yaml", `"web.yaml" does not exist`)
	s.w.kubectl(s.w.hub, "delete", "configmap", "app")
	wantFailure("ConfigMap default/app does not exist")
}

// applyExample deploys the example to the members.
func (s *kustomizeStory) applyExample() {
	s.w.t.Helper()
	example, err := os.ReadFile(filepath.Join("..", "..", "examples", "clusterprofile-kustomize.yaml"))
	if err != nil {
		s.w.t.Fatal(err)
	}
	s.w.apply(s.w.hub, string(example))
	for name, member := range s.members {
		s.w.eventually("the example is on "+name, func() error {
			found := &corev1.ConfigMapList{}
			if err := s.w.client(member).List(s.w.t.Context(), found, client.InNamespace("greeter")); err != nil {
				return err
			}
			i := slices.IndexFunc(found.Items, func(c corev1.ConfigMap) bool { return strings.HasPrefix(c.Name, "example-greeting-") })
			if i < 0 || found.Items[i].Data["greeting.txt"] != "Hello "+name+"\n" {
				return fmt.Errorf("ConfigMaps: %v", found.Items)
			}
			return s.w.client(member).Get(s.w.t.Context(), client.ObjectKey{Namespace: "greeter", Name: "example-greeter"}, &corev1.Service{})
		})
		s.w.awaitProvisioned(s.namespaces[name], "greeter-sveltos-"+name)
	}
}

func wantNotFound(err error) error {
	if err == nil {
		return errors.New("an object still exists")
	}
	return client.IgnoreNotFound(err)
}
