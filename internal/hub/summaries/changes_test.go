package summaries_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/hub/summaries"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

// setText is a patch that appends text to data.text of all ConfigMaps.
func setText(text string) libv1beta1.Patch {
	return libv1beta1.Patch{Patch: "- {op: add, path: /data/text, value: " + text + "}", Target: &libv1beta1.PatchSelector{Kind: "ConfigMap"}}
}

// requestForContent returns the request for a profile with the ConfigMap fleet/content; edit changes the profile.
func requestForContent(edit func(*configv1beta1.ProfileSpec)) summaries.ComposeRequest {
	r := requestFor("one", "")
	spec := configv1beta1.ProfileSpec{PolicyRefs: []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Name: "content"}}}
	edit(&spec)
	r.Summary.Spec.ClusterProfileSpec = spec
	return r
}

func changedHub(t *testing.T) client.Client {
	t.Helper()
	hub := newHub(interceptor.Funcs{})
	patch := func(text string) map[string]string {
		return map[string]string{"patch": "patch: |\n  - {op: add, path: /data/text, value: " + text + "}\ntarget: {kind: ConfigMap}\n"}
	}
	template := map[string]string{libv1beta1.TemplateAnnotation: "ok"}
	for _, object := range []client.Object{
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "content"}, Data: map[string]string{
			"objects.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: web, labels: {a: own}}\ndata: {text: rendered}\n",
		}},
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "plain"}, Data: patch("plain")},
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "template", Annotations: template}, Data: patch("'{{ .ClusterName }}'")},
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "secret"}, Type: libv1beta1.ProfileSecretType, Data: map[string][]byte{"patch": []byte(patch("secret")["patch"])}},
	} {
		if err := hub.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
	}
	return hub
}

func from(kind configv1beta1.ValueFromKind, name string) configv1beta1.ValueFrom {
	return configv1beta1.ValueFrom{Kind: kind, Name: name}
}

func TestPatchesOfProfile(t *testing.T) {
	t.Parallel()
	hub := changedHub(t)
	for name, c := range map[string]struct {
		edit        func(*configv1beta1.ProfileSpec)
		want        string
		isSensitive bool
		error       string
		isMissing   bool
	}{
		"none":     {edit: func(*configv1beta1.ProfileSpec) {}, want: "rendered"},
		"inline":   {edit: func(s *configv1beta1.ProfileSpec) { s.Patches = []libv1beta1.Patch{setText("a"), setText("b")} }, want: "b"},
		"template": {edit: func(s *configv1beta1.ProfileSpec) { s.Patches = []libv1beta1.Patch{setText("'{{ .ClusterName }}'")} }, want: "one"},
		"objects with a template come first": {edit: func(s *configv1beta1.ProfileSpec) {
			s.Patches = []libv1beta1.Patch{setText("a")}
			s.PatchesFrom = []configv1beta1.ValueFrom{from(configv1beta1.ValueFromConfigMap, "plain"), from(configv1beta1.ValueFromConfigMap, "template")}
		}, want: "plain"},
		"templates after the spec": {edit: func(s *configv1beta1.ProfileSpec) {
			s.Patches = []libv1beta1.Patch{setText("a")}
			s.PatchesFrom = []configv1beta1.ValueFrom{from(configv1beta1.ValueFromConfigMap, "template")}
		}, want: "one"},
		"a Secret": {edit: func(s *configv1beta1.ProfileSpec) {
			s.PatchesFrom = []configv1beta1.ValueFrom{from(configv1beta1.ValueFromSecret, "secret")}
		}, want: "secret", isSensitive: true},
		"optional": {edit: func(s *configv1beta1.ProfileSpec) {
			s.PatchesFrom = []configv1beta1.ValueFrom{{Kind: configv1beta1.ValueFromConfigMap, Name: "nothing", Optional: true}}
		}, want: "rendered"},
		"missing": {edit: func(s *configv1beta1.ProfileSpec) {
			s.PatchesFrom = []configv1beta1.ValueFrom{from(configv1beta1.ValueFromConfigMap, "nothing")}
		}, error: "patchesFrom: ConfigMap fleet/nothing does not exist", isMissing: true},
		"no patch": {edit: func(s *configv1beta1.ProfileSpec) {
			s.PatchesFrom = []configv1beta1.ValueFrom{from(configv1beta1.ValueFromConfigMap, "content")}
			s.Patches = []libv1beta1.Patch{{Patch: "a: b"}}
		}, error: "patches[0]: "},
		"broken template": {edit: func(s *configv1beta1.ProfileSpec) {
			s.Patches = []libv1beta1.Patch{setText("a"), setText("{{ .Nothing }}")}
		}, error: "patches[1]: "},
		"a path that is no pointer": {edit: func(s *configv1beta1.ProfileSpec) {
			s.DriftExclusions = []libv1beta1.DriftExclusion{{Paths: []string{"/spec/replicas"}}, {Paths: []string{"spec"}}}
		}, error: "driftExclusions[1]: \"spec\" is not a JSON pointer"},
		"ownership": {edit: func(s *configv1beta1.ProfileSpec) {
			s.ExtraLabels = map[string]string{"projectsveltos.io/reason": "x"}
		}, error: "extraLabels: only Towline sets projectsveltos.io/reason"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			composer := newComposer(t, hub)
			made, err := composer.Compose(t.Context(), requestForContent(c.edit), libv1beta1.FeatureResources)
			if c.error != "" {
				var invalid phase.TerminalError
				if err == nil || !strings.Contains(err.Error(), c.error) || errors.Is(err, source.ErrNotFound) != c.isMissing || errors.As(err, &invalid) == c.isMissing {
					t.Fatalf("got error %v, want %q", err, c.error)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			item := made.Bundle.Items[0]
			text := item.Objects[0].Object["data"].(map[string]any)["text"]
			if text != c.want || item.Sensitive != c.isSensitive || item.OnlySecretsPrivate == c.isSensitive {
				t.Errorf("got %v (sensitive: %t, only Secrets private: %t), want %s", text, item.Sensitive, item.OnlySecretsPrivate, c.want)
			}
		})
	}
}

// TestChangesAreComposedOnce uses one list of objects for all members, so that it is encoded once.
func TestChangesAreComposedOnce(t *testing.T) {
	t.Parallel()
	composer := newComposer(t, changedHub(t))
	var items []bundle.Item
	for _, member := range []string{"one", "two"} {
		r := requestForContent(func(s *configv1beta1.ProfileSpec) {
			s.Patches = []libv1beta1.Patch{setText("a")}
			s.ExtraLabels = map[string]string{"a": "profile"}
		})
		r.TemplateContext.Name = member
		made, err := composer.Compose(t.Context(), r, libv1beta1.FeatureResources)
		if err != nil {
			t.Fatal(err)
		}
		items = append(items, made.Bundle.Items[0])
	}
	if items[0].Documents != items[1].Documents || items[0].Objects[0] != items[1].Objects[0] {
		t.Error("the second member has other objects")
	}
	if got := items[0].Objects[0].GetLabels()["a"]; got != "profile" {
		t.Errorf("label: got %q", got)
	}
}

func TestSubresourcesOfContent(t *testing.T) {
	t.Parallel()
	hub := changedHub(t)
	marked := &corev1.ConfigMap{}
	if err := hub.Get(t.Context(), client.ObjectKey{Namespace: "fleet", Name: "content"}, marked); err != nil {
		t.Fatal(err)
	}
	marked.Annotations = map[string]string{libv1beta1.SubresourcesAnnotation: "status, scale,status,"}
	if err := hub.Update(t.Context(), marked); err != nil {
		t.Fatal(err)
	}
	made, err := newComposer(t, hub).Compose(t.Context(), requestForContent(func(*configv1beta1.ProfileSpec) {}), libv1beta1.FeatureResources)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"status", "scale"}, made.Bundle.Items[0].Subresources); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestPatchReferencesAreWatched(t *testing.T) {
	t.Parallel()
	r := requestForContent(func(s *configv1beta1.ProfileSpec) {
		s.PatchesFrom = []configv1beta1.ValueFrom{{Kind: configv1beta1.ValueFromConfigMap, Name: "{{ .ClusterName }}-patches"}}
	})
	want := source.Reference{Kind: "ConfigMap", Namespace: "fleet", Name: "one-patches"}
	if got := (&summaries.Composer{}).References(r); !slices.Contains(got, want) {
		t.Errorf("got %v, want also %s", got, want)
	}
}

// TestPatchesOfChart patches the objects of a chart, but neither its CRDs nor, with nohooks, its hooks.
func TestPatchesOfChart(t *testing.T) {
	t.Parallel()
	address := charts(t, examples.Chart{Files: map[string]string{
		"templates/hook.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: hook, annotations: {helm.sh/hook: pre-install}}\n",
		"templates/gone.yaml": "apiVersion: v1\nkind: Secret\nmetadata: {name: gone}\n",
	}})
	label := libv1beta1.Patch{Patch: "apiVersion: v1\nkind: A\nmetadata: {name: any, labels: {patched: x}}", Target: &libv1beta1.PatchSelector{}}
	gone := libv1beta1.Patch{Patch: "apiVersion: v1\nkind: Secret\nmetadata: {name: gone}\n$patch: delete"}
	for _, strategy := range []configv1beta1.PostRenderStrategy{"", configv1beta1.PostRenderCombined, configv1beta1.PostRenderSeparate, configv1beta1.PostRenderNoHooks} {
		r := requestFor("one", address)
		r.Summary.Spec.ClusterProfileSpec.Patches = []libv1beta1.Patch{label, gone}
		r.Summary.Spec.ClusterProfileSpec.ExtraLabels = map[string]string{"extra": "y"}
		r.Summary.Spec.ClusterProfileSpec.HelmCharts[0].Options = &configv1beta1.HelmOptions{PostRenderStrategy: strategy}
		made, err := newComposer(t, newHub(interceptor.Funcs{})).Compose(t.Context(), r, libv1beta1.FeatureHelm)
		if err != nil {
			t.Fatal(err)
		}
		item := made.Bundle.Items[0]
		var hooks, definitions int
		for i, object := range item.Objects {
			isDefinition, isHook := object.GetKind() == "CustomResourceDefinition", bundle.IsHook(object)
			wantPatched := !isDefinition && (!isHook || strategy != configv1beta1.PostRenderNoHooks)
			labels := object.GetLabels()
			if got := labels["patched"] == "x"; got != wantPatched || labels["extra"] != "y" {
				t.Errorf("%s: labels of %s %s: %v, want it patched: %t", strategy, object.GetKind(), object.GetName(), labels, wantPatched)
			}
			wantPath := map[string]string{"hook": "hello/templates/hook.yaml"}[object.GetName()]
			if path := item.Release.Data.Paths[i]; wantPath != "" && path != wantPath || object.GetName() == "gone" {
				t.Errorf("%s: %s has the path %s", strategy, object.GetName(), path)
			}
			hooks, definitions = hooks+count(isHook), definitions+count(isDefinition)
		}
		if hooks != 1 || definitions == 0 || len(item.Objects) != len(item.Release.Data.Paths) {
			t.Errorf("%s: %d hooks, %d CRDs, %d objects and %d paths", strategy, hooks, definitions, len(item.Objects), len(item.Release.Data.Paths))
		}
		if len(made.Releases[0].PatchesHash) == 0 {
			t.Errorf("%s: the status has no hash of the patches", strategy)
		}
	}
}

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}

// TestPatchMakesRevision renders the next revision for another patch, since the member creates a new revision.
func TestPatchMakesRevision(t *testing.T) {
	t.Parallel()
	hub := newHub(interceptor.Funcs{})
	r := requestFor("one", charts(t, with(`seen: "{{ .Release.Revision }}"`)))
	var got []string
	for _, text := range []string{"a", "a", "b"} {
		r.Summary.Spec.ClusterProfileSpec.Patches = []libv1beta1.Patch{setText(text)}
		made, err := newComposer(t, hub).Compose(t.Context(), r, libv1beta1.FeatureHelm)
		if err != nil {
			t.Fatal(err)
		}
		r.Deployed = made.Bundle.DeployedReleases()
		got = append(got, fmt.Sprint(field(t, made.Bundle.Items[0], "seen"), field(t, made.Bundle.Items[0], "text")))
	}
	if diff := cmp.Diff([]string{"1a", "1a", "2b"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
