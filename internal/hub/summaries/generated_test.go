package summaries_test

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/summaries"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/source"
)

// charts serves charts and returns the address.
func charts(t *testing.T, all ...examples.Chart) string {
	t.Helper()
	repository, err := examples.Repository(all...)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(repository)
	t.Cleanup(server.Close)
	return server.URL
}

func newComposer(t *testing.T, hub client.Client) *summaries.Composer {
	t.Helper()
	fetched, err := source.NewCharts(t.TempDir(), clock.RealClock{})
	if err != nil {
		t.Fatal(err)
	}
	return &summaries.Composer{
		Contents: &source.Contents{Hub: hub}, Objects: hub, Hub: hub, Charts: fetched, Renderer: render.NewCharts(nil), Manifests: render.NewManifestRenderer(), Changer: render.NewChanger(nil), HubUID: "hub",
		ListDeployed: func(context.Context, fleet.Member) ([]bundle.Deployed, error) { return nil, nil },
	}
}

// requestFor returns the request for a release of chart hello on a pull member.
func requestFor(member, address string) summaries.ComposeRequest {
	summary := &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "profile-" + member, UID: types.UID("uid-" + member)}}
	summary.Spec.ClusterProfileSpec.HelmCharts = []configv1beta1.HelmChart{{
		RepositoryURL: address, RepositoryName: "r", ChartName: "r/hello", ChartVersion: "0.1.0", ReleaseName: "web", ReleaseNamespace: "site",
	}}
	return summaries.ComposeRequest{
		Summary: summary,
		Member: fleet.Member{
			Type: fleet.TypeSveltos, Namespace: "fleet", Name: member, UID: "cluster-" + member, Mode: fleet.Pull, KubernetesVersion: "v1.36.0", APIVersions: []string{"v1", "apps/v1"},
		},
		TemplateContext: source.TemplateContext{Namespace: "fleet", Name: member},
		EnsureFinalizer: func(context.Context) error { return nil },
	}
}

// compose returns the item of the only release.
func compose(t *testing.T, composer *summaries.Composer, r summaries.ComposeRequest) bundle.Item {
	t.Helper()
	made, err := composer.Compose(t.Context(), r, libv1beta1.FeatureHelm)
	if err != nil {
		t.Fatal(err)
	}
	return made.Bundle.Items[0]
}

// field returns data.field of the ConfigMap "added".
func field(t *testing.T, item bundle.Item, field string) string {
	t.Helper()
	for _, object := range item.Objects {
		if object.GetName() == "added" {
			text, _, _ := unstructured.NestedString(object.Object, "data", field)
			return text
		}
	}
	t.Fatal("ConfigMap added is missing")
	return ""
}

// with returns the chart hello with a ConfigMap "added".
func with(data string) examples.Chart {
	return examples.Chart{Files: map[string]string{
		"templates/added.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: added}\ndata: {" + data + "}\n",
	}}
}

func newHub(funcs interceptor.Funcs) client.Client {
	return fake.NewClientBuilder().WithScheme(kube.Scheme()).WithInterceptorFuncs(funcs).Build()
}

func generatedSecrets(t *testing.T, hub client.Client) []corev1.Secret {
	t.Helper()
	var list corev1.SecretList
	if err := hub.List(t.Context(), &list, client.InNamespace("fleet")); err != nil {
		t.Fatal(err)
	}
	return list.Items
}

func TestGeneratedValuesAreKeptPerMember(t *testing.T) {
	t.Parallel()
	hub := newHub(interceptor.Funcs{})
	address := charts(t, with(`password: "{{ randAlphaNum 20 }}", extra: "{{ if .Values.extra }}{{ randNumeric 20 }}{{ end }}"`))
	composer := newComposer(t, hub)
	one, two := requestFor("one", address), requestFor("two", address)
	item := compose(t, composer, one)
	password := field(t, item, "password")
	if !item.Sensitive {
		t.Error("an item with generated values is not sensitive")
	}
	if password == "" || password == field(t, compose(t, composer, two), "password") {
		t.Errorf("two members have the password %q", password)
	}
	want := func(when, password string, item bundle.Item) {
		t.Helper()
		if got := field(t, item, "password"); got != password {
			t.Errorf("%s: got password %q, want %q", when, got, password)
		}
	}
	want("again", password, compose(t, composer, one))
	composer = newComposer(t, hub)
	want("after a restart", password, compose(t, composer, one))
	one.Member.APIVersions = append(one.Member.APIVersions, "example.com/v1", "example.com/v1/Example")
	one.Member.KubernetesVersion = "v1.37.0"
	want("with another version and API", password, compose(t, composer, one))
	one.Summary.Spec.ClusterProfileSpec.HelmCharts[0].Values = "extra: true\n"
	item = compose(t, composer, one)
	want("with other values", password, item)
	extra := field(t, item, "extra")
	one.Summary.Spec.ClusterProfileSpec.HelmCharts[0].Values = ""
	compose(t, composer, one)
	one.Summary.Spec.ClusterProfileSpec.HelmCharts[0].Values = "extra: true\n"
	if got := field(t, compose(t, newComposer(t, hub), one), "extra"); extra == "" || got != extra {
		t.Errorf("a value that was not used for a while: got %q, want %q", got, extra)
	}
	owners := map[types.UID]bool{}
	for _, secret := range generatedSecrets(t, hub) {
		for _, owner := range secret.OwnerReferences {
			owners[owner.UID] = true
		}
		if secret.Annotations["towline.dev/release"] != "site/web" {
			t.Errorf("Secret %s: annotations are %v", secret.Name, secret.Annotations)
		}
	}
	if diff := cmp.Diff(map[types.UID]bool{"cluster-one": true, "uid-one": true, "cluster-two": true, "uid-two": true}, owners); diff != "" {
		t.Errorf("owners differ (-want +got):\n%s", diff)
	}
}

func TestGeneratedValuesAreWrittenOnce(t *testing.T) {
	t.Parallel()
	writes := 0
	hub := newHub(interceptor.Funcs{
		Create: func(ctx context.Context, hub client.WithWatch, obj client.Object, opts ...client.CreateOption) error {
			writes++
			return hub.Create(ctx, obj, opts...)
		},
		Update: func(ctx context.Context, hub client.WithWatch, obj client.Object, opts ...client.UpdateOption) error {
			writes++
			return hub.Update(ctx, obj, opts...)
		},
	})
	address := charts(t, with(`password: "{{ randAlphaNum 20 }}"`))
	r := requestFor("one", address)
	for range 3 {
		compose(t, newComposer(t, hub), r)
	}
	if writes != 1 {
		t.Errorf("got %d writes, want 1", writes)
	}
}

func TestGeneratedValuesBelongToTheReleaseOnTheMember(t *testing.T) {
	t.Parallel()
	hub := newHub(interceptor.Funcs{})
	address := charts(t, with(`password: "{{ randAlphaNum 20 }}"`))
	r := requestFor("one", address)
	password := field(t, compose(t, newComposer(t, hub), r), "password")
	r.Summary.Name, r.Summary.UID = "of-another-profile", "other"
	if got := field(t, compose(t, newComposer(t, hub), r), "password"); got != password {
		t.Errorf("with another profile: got password %q, want %q", got, password)
	}
	var owners []types.UID
	for _, owner := range generatedSecrets(t, hub)[0].OwnerReferences {
		owners = append(owners, owner.UID)
	}
	if diff := cmp.Diff([]types.UID{"cluster-one", "uid-one", "other"}, owners); diff != "" {
		t.Errorf("owners differ (-want +got):\n%s", diff)
	}
	r.Summary.Spec.ClusterProfileSpec.HelmCharts[0].ReleaseName = "second"
	if got := field(t, compose(t, newComposer(t, hub), r), "password"); got == password {
		t.Error("two releases have one password")
	}
	r.Summary.Spec.ClusterProfileSpec.HelmCharts[0].ReleaseName = "web"
	r.Member.UID = "registered again"
	if got := field(t, compose(t, newComposer(t, hub), r), "password"); got == password {
		t.Error("another cluster of the same name has the same password")
	}
}

func TestGeneratedValuesAreStoredBeforeTheDelivery(t *testing.T) {
	t.Parallel()
	refused := errors.New("no room")
	hub := newHub(interceptor.Funcs{
		Create: func(context.Context, client.WithWatch, client.Object, ...client.CreateOption) error { return refused },
	})
	_, err := newComposer(t, hub).Compose(t.Context(), requestFor("one", charts(t, with(`password: "{{ randAlphaNum 20 }}"`))), libv1beta1.FeatureHelm)
	if !errors.Is(err, refused) {
		t.Errorf("got %v, want nothing to deliver", err)
	}
}

// TestFinalizerIsSetBeforeGeneratedValuesAreStored has a second chart that cannot be fetched, so that nothing is
// delivered.
func TestFinalizerIsSetBeforeGeneratedValuesAreStored(t *testing.T) {
	t.Parallel()
	hub := newHub(interceptor.Funcs{})
	r := requestFor("one", charts(t, with(`password: "{{ randAlphaNum 20 }}"`)))
	missing := r.Summary.Spec.ClusterProfileSpec.HelmCharts[0]
	missing.ChartName, missing.ReleaseName = "r/missing", "missing"
	r.Summary.Spec.ClusterProfileSpec.HelmCharts = append(r.Summary.Spec.ClusterProfileSpec.HelmCharts, missing)
	refused := errors.New("the summary has changed")
	r.EnsureFinalizer = func(context.Context) error { return refused }
	if _, err := newComposer(t, hub).Compose(t.Context(), r, libv1beta1.FeatureHelm); !errors.Is(err, refused) || len(generatedSecrets(t, hub)) != 0 {
		t.Errorf("got %v and %d Secrets, want the error of the finalizer and no Secret", err, len(generatedSecrets(t, hub)))
	}
	set := 0
	r.EnsureFinalizer = func(context.Context) error { set++; return nil }
	if _, err := newComposer(t, hub).Compose(t.Context(), r, libv1beta1.FeatureHelm); err == nil || set != 1 || len(generatedSecrets(t, hub)) != 1 {
		t.Errorf("got %v, %d calls and %d Secrets, want a failure after the finalizer and the Secret", err, set, len(generatedSecrets(t, hub)))
	}
}

func TestGeneratedValuesThatChangedMeanwhileAreAConflict(t *testing.T) {
	t.Parallel()
	hub := newHub(interceptor.Funcs{})
	address := charts(t, with(`password: "{{ randAlphaNum 20 }}", extra: "{{ if .Values.extra }}{{ randNumeric 20 }}{{ end }}"`))
	r := requestFor("one", address)
	compose(t, newComposer(t, hub), r)
	stale := interceptor.NewClient(hub.(client.WithWatch), interceptor.Funcs{
		Get: func(ctx context.Context, hub client.WithWatch, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
			if err := hub.Get(ctx, key, obj, opts...); err != nil {
				return err
			}
			changed := obj.DeepCopyObject().(client.Object)
			changed.SetLabels(map[string]string{"changed": "yes"})
			return hub.Update(ctx, changed)
		},
	})
	r.Summary.Spec.ClusterProfileSpec.HelmCharts[0].Values = "extra: true\n"
	if _, err := newComposer(t, stale).Compose(t.Context(), r, libv1beta1.FeatureHelm); !apierrors.IsConflict(err) {
		t.Errorf("got %v, want a conflict", err)
	}
}

func TestGeneratedValuesThatCannotBeReadAreNotGeneratedAgain(t *testing.T) {
	t.Parallel()
	hub := newHub(interceptor.Funcs{})
	r := requestFor("one", charts(t, with(`password: "{{ randAlphaNum 20 }}"`)))
	compose(t, newComposer(t, hub), r)
	secret := generatedSecrets(t, hub)[0]
	secret.Data["values.json.zst"] = []byte("broken")
	if err := hub.Update(t.Context(), &secret); err != nil {
		t.Fatal(err)
	}
	if _, err := newComposer(t, hub).Compose(t.Context(), r, libv1beta1.FeatureHelm); err == nil || !strings.Contains(err.Error(), "Secret fleet/"+secret.Name) {
		t.Errorf("got %v, want an error that names the Secret", err)
	}
}

func TestTooManyGeneratedValuesAreRefused(t *testing.T) {
	t.Parallel()
	hub := newHub(interceptor.Funcs{})
	r := requestFor("one", charts(t, with(`password: "{{ randBytes 1100000 | sha256sum }}"`)))
	_, err := newComposer(t, hub).Compose(t.Context(), r, libv1beta1.FeatureHelm)
	var invalid phase.TerminalError
	if !errors.As(err, &invalid) || !strings.Contains(fmt.Sprint(err), "the limit of a Secret is 1000") {
		t.Errorf("got %v, want a refusal that names the limit", err)
	}
	if got := generatedSecrets(t, hub); len(got) != 0 {
		t.Errorf("got %d Secrets, want none", len(got))
	}
}

func TestChartThatGeneratesNothingHasNoSecret(t *testing.T) {
	t.Parallel()
	hub := newHub(interceptor.Funcs{
		Get: func(_ context.Context, _ client.WithWatch, key client.ObjectKey, _ client.Object, _ ...client.GetOption) error {
			return fmt.Errorf("%s was read", key)
		},
	})
	item := compose(t, newComposer(t, hub), requestFor("one", charts(t, with("a: b"))))
	if item.Sensitive || len(generatedSecrets(t, hub)) != 0 {
		t.Error("a chart that generates nothing is private")
	}
}
