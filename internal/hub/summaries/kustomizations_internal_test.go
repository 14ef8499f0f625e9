package summaries

import (
	"cmp"
	"context"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/source"
)

// kustomization returns a ConfigMap with a kustomization of one ConfigMap that contains value.
func kustomization(name, value string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: name}, Data: map[string]string{
		"kustomization.yaml": "resources: [a.yaml]\n",
		"a.yaml":             "apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: default, name: a}\ndata: {value: '" + value + "'}\n",
	}}
}

// useKustomization replaces the policyRefs of the summary by a kustomizationRef.
func (r *restarts) useKustomization(ref configv1beta1.KustomizationRef) {
	r.must(r.hub.Create(r.t.Context(), kustomization("app", "{{ .value }}")))
	r.must(r.hub.Create(r.t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "values"}, Data: map[string]string{"value": "1"}}))
	s := r.summary()
	s.Generation++
	ref.Kind, ref.Name = "ConfigMap", "app"
	ref.ValuesFrom = []configv1beta1.ValueFrom{{Kind: "ConfigMap", Name: "values"}}
	s.Spec.ClusterProfileSpec.PolicyRefs, s.Spec.ClusterProfileSpec.KustomizationRefs = nil, []configv1beta1.KustomizationRef{ref}
	r.must(r.hub.Update(r.t.Context(), s))
	r.feature = libv1beta1.FeatureKustomize
}

func (r *restarts) Withdraw(_ context.Context, m fleet.Member, w bundle.Withdrawal) (bool, error) {
	if (m.Mode == fleet.Local) == r.isLocal {
		delete(r.deployed, w.ID)
	}
	return true, nil
}

func TestUnchangedKustomizationIsNotBuiltAgain(t *testing.T) {
	t.Parallel()
	label := func(r *restarts) {
		one := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "one"}}
		r.update(one, func() { one.Labels = map[string]string{"env": "prod"} })
	}
	for name, test := range map[string]struct {
		ref     configv1beta1.KustomizationRef
		change  func(r *restarts)
		isBuilt bool
	}{
		"nothing":                   {},
		"a label without templates": {change: label},
		"a label with templates":    {isBuilt: true, change: label, ref: configv1beta1.KustomizationRef{Path: "{{ \".\" }}"}},
		"the kustomization": {isBuilt: true, change: func(r *restarts) {
			c := kustomization("app", "")
			r.update(c, func() { c.Data = kustomization("app", "2").Data })
		}},
		"the values": {isBuilt: true, change: func(r *restarts) {
			c := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "values"}}
			r.update(c, func() { c.Data = map[string]string{"value": "2"} })
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRestarts(t)
			r.useKustomization(test.ref)
			if got := r.reconcile(); got.Status != libv1beta1.FeatureStatusProvisioned || r.deliveries != 1 {
				t.Fatalf("status of the feature: %s (%v) after %d deliveries", got.Status, got.FailureMessage, r.deliveries)
			}
			if test.change != nil {
				test.change(r)
			}
			if got := r.reconcile(); got.Status != libv1beta1.FeatureStatusProvisioned {
				t.Errorf("status of the feature: %s (%v)", got.Status, got.FailureMessage)
			}
			if got := r.reads > 0; got != test.isBuilt {
				t.Errorf("%d reads of content and %d deliveries, want the bundle built: %t", r.reads, r.deliveries, test.isBuilt)
			}
		})
	}
}

// composedItem has the fields of a bundle.Item that the tests of compose compare.
type composedItem struct {
	Name                                       string
	Tier                                       int32
	Sensitive, OnlySecretsPrivate, Force, Skip bool
	Objects                                    []string
}

func composedItemsOf(items []bundle.Item) []composedItem {
	var all []composedItem
	for _, i := range items {
		item := composedItem{i.Reference.Name, i.Reference.Tier, i.Sensitive, i.OnlySecretsPrivate, i.Force, i.SkipNamespaceCreation, nil}
		for _, object := range i.Objects {
			item.Objects = append(item.Objects, kube.RefOf(object).String())
		}
		all = append(all, item)
	}
	return all
}

// TestComposeManifests has references in the order of tiers, and then of the list. Of an object in several references,
// the one with the lowest tier is used; within one tier, the member reports the conflict.
func TestComposeManifests(t *testing.T) {
	t.Parallel()
	r := newRestarts(t)
	manifest := func(name string) string {
		return "apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: default, name: " + name + "}\n---\n"
	}
	for name, text := range map[string]string{"second": manifest("a") + manifest("b"), "again": manifest("b") + manifest("c"), "covered": manifest("a")} {
		r.must(r.hub.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: name}, Data: map[string]string{"a.yaml": text}}))
	}
	r.must(r.hub.Create(t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "first"}, Type: libv1beta1.ProfileSecretType, Data: map[string][]byte{"a.yaml": []byte(manifest("a"))},
	}))
	summary := r.summary()
	summary.Spec.ClusterProfileSpec.PolicyRefs = []libv1beta1.PolicyRef{
		{Kind: "ConfigMap", Name: "second", Force: true, SkipNamespaceCreation: true},
		{Kind: "ConfigMap", Name: "missing", Optional: true},
		{Kind: "ConfigMap", Name: "again"},
		{Kind: "ConfigMap", Name: "covered", Tier: 200},
		{Kind: "Secret", Name: "first", Tier: 50},
	}
	request := ComposeRequest{Summary: summary, TemplateContext: source.TemplateContext{Namespace: "fleet", Name: "one", Sandbox: pool}}
	composition, err := newTestComposer(r).Compose(t.Context(), request, libv1beta1.FeatureResources)
	if err != nil {
		t.Fatal(err)
	}
	want := []composedItem{
		{Name: "first", Tier: 50, Sensitive: true, Objects: []string{"ConfigMap default/a"}},
		{Name: "second", Tier: bundle.DefaultTier, OnlySecretsPrivate: true, Force: true, Skip: true, Objects: []string{"ConfigMap default/b"}},
		{Name: "again", Tier: bundle.DefaultTier, OnlySecretsPrivate: true, Objects: []string{"ConfigMap default/b", "ConfigMap default/c"}},
	}
	if diff := gocmp.Diff(want, composedItemsOf(composition.Bundle.Items)); diff != "" {
		t.Errorf("items (-want +got):\n%s", diff)
	}
}

func TestComposeKustomizations(t *testing.T) {
	t.Parallel()
	r := newRestarts(t)
	private := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "values"}, Type: libv1beta1.ProfileSecretType, Data: map[string][]byte{"value": []byte("secret")}}
	r.must(r.hub.Create(t.Context(), private))
	both := kustomization("second", "overridden")
	both.Data["kustomization.yaml"] = "resources: [a.yaml, b.yaml]\n"
	both.Data["b.yaml"] = "apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: default, name: b}\n"
	r.must(r.hub.Create(t.Context(), both))
	r.must(r.hub.Create(t.Context(), kustomization("first", "{{ .value }}")))
	summary := r.summary()
	summary.Spec.ClusterProfileSpec.KustomizationRefs = []configv1beta1.KustomizationRef{
		{Kind: "ConfigMap", Name: "second", Force: true, SkipNamespaceCreation: true},
		{Kind: "ConfigMap", Name: "missing", Optional: true},
		{Kind: "ConfigMap", Name: "first", Tier: 50, ValuesFrom: []configv1beta1.ValueFrom{{Kind: "Secret", Name: "values"}}},
	}
	composer := newTestComposer(r)
	request := ComposeRequest{Summary: summary, TemplateContext: source.TemplateContext{Namespace: "fleet", Name: "one", Sandbox: pool}}
	composition, err := composer.Compose(t.Context(), request, libv1beta1.FeatureKustomize)
	if err != nil {
		t.Fatal(err)
	}
	want := []composedItem{
		{Name: "first", Tier: 50, Sensitive: true, Objects: []string{"ConfigMap default/a"}},
		{Name: "second", Tier: bundle.DefaultTier, OnlySecretsPrivate: true, Force: true, Skip: true, Objects: []string{"ConfigMap default/b"}},
	}
	if diff := gocmp.Diff(want, composedItemsOf(composition.Bundle.Items)); diff != "" {
		t.Errorf("items (-want +got):\n%s", diff)
	}
	references := composer.References(request)
	slices.SortFunc(references, func(a, b source.Reference) int { return cmp.Compare(a.String(), b.String()) })
	wantReferences := []string{
		"ConfigMap fleet/content", "ConfigMap fleet/first", "ConfigMap fleet/missing", "ConfigMap fleet/optional", "ConfigMap fleet/second", "Secret fleet/values",
	}
	var names []string
	for _, reference := range references {
		names = append(names, reference.String())
	}
	if diff := gocmp.Diff(wantReferences, names); diff != "" {
		t.Errorf("references (-want +got):\n%s", diff)
	}
}
