package resources_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/hub/resources"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

// world is a Watcher on a namespace of a real API server.
type world struct {
	*testing.T
	*resources.Watcher
	hub       client.Client
	reads     atomic.Int32 // of the Watcher
	listing   sync.RWMutex // the cache of kinds sends no request while it is locked
	kinds     cache.Cache
	namespace string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	plane := localkube.Shared(t)
	w := &world{T: t, namespace: plane.Namespace(t, "resources")}
	var err error
	if w.hub, err = client.New(plane.Config, client.Options{Scheme: kube.Scheme()}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{}, 2)
	content := newCache(t, plane.Config)
	gated := rest.CopyConfig(plane.Config)
	gated.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(request *http.Request) (*http.Response, error) {
			w.listing.RLock()
			defer w.listing.RUnlock()
			return next.RoundTrip(request)
		})
	})
	w.kinds = newCache(t, gated)
	live, err := client.NewWithWatch(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	w.Watcher = resources.New(interceptor.NewClient(live, interceptor.Funcs{
		Get: func(ctx context.Context, live client.WithWatch, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
			w.reads.Add(1)
			return live.Get(ctx, key, object, options...)
		},
	}), w.kinds, content)
	for _, start := range []func(context.Context) error{content.Start, w.Start} {
		go func() {
			defer func() { ended <- struct{}{} }()
			if err := start(ctx); err != nil {
				t.Error(err)
			}
		}()
	}
	t.Cleanup(func() {
		cancel()
		<-ended
		<-ended
	})
	return w
}

type roundTripper func(*http.Request) (*http.Response, error)

// RoundTrip implements http.RoundTripper.
func (r roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return r(request) }

func newCache(t *testing.T, config *rest.Config) cache.Cache {
	t.Helper()
	c, err := cache.New(config, cache.Options{Scheme: kube.Scheme(), DefaultTransform: resources.StripObject, ReaderFailOnMissingInformer: true})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (w *world) templateContext() source.TemplateContext {
	return source.TemplateContext{Namespace: w.namespace, Name: "one"}
}

func (w *world) load(summary string, refs ...configv1beta1.TemplateResourceRef) (source.Resources, error) {
	w.Helper()
	return w.Load(w.Context(), types.NamespacedName{Namespace: w.namespace, Name: summary}, refs, w.templateContext())
}

// mustLoad loads one object with the identifier x and returns its JSON.
func (w *world) mustLoad(summary string, ref configv1beta1.TemplateResourceRef) string {
	w.Helper()
	loaded, err := w.load(summary, ref)
	if err != nil {
		w.Fatal(err)
	}
	return string(loaded.Objects["x"])
}

// wantChanged waits until a change is reported for a summary.
func (w *world) wantChanged(want string) {
	w.Helper()
	select {
	case changed := <-w.Changed:
		if got := changed.Object.GetName(); got != want {
			w.Fatalf("got a change for %s, want %s", got, want)
		}
	case <-time.After(time.Minute):
		w.Fatalf("no change for %s", want)
	}
}

// boats installs a kind and returns references to, and objects of, that kind.
func (w *world) boats() *apiextensionsv1.CustomResourceDefinition {
	group := w.namespace + ".example.org"
	preserve := true
	return &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: "boats." + group},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: group, Scope: apiextensionsv1.NamespaceScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: "boats", Singular: "boat", Kind: "Boat", ListKind: "BoatList"},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: "v1", Served: true, Storage: true,
				Subresources: &apiextensionsv1.CustomResourceSubresources{Status: &apiextensionsv1.CustomResourceSubresourceStatus{}},
				Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{
					Type: "object", XPreserveUnknownFields: &preserve,
				}},
			}},
		},
	}
}

func (w *world) install(definition *apiextensionsv1.CustomResourceDefinition) {
	w.Helper()
	if err := w.hub.Create(w.Context(), definition); err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		if err := w.hub.Delete(context.WithoutCancel(w.Context()), definition); err != nil {
			w.Error(err)
		}
	})
}

func (w *world) boat(name string) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": w.namespace + ".example.org/v1", "kind": "Boat", "metadata": map[string]any{"name": name},
		"spec": map[string]any{"sails": int64(1), "crew": int64(1)},
	}}
}

func (w *world) ref(kind, name string, options ...func(*configv1beta1.TemplateResourceRef)) configv1beta1.TemplateResourceRef {
	r := configv1beta1.TemplateResourceRef{Identifier: "x", Resource: corev1.ObjectReference{Kind: kind, Name: name}}
	if kind == "Boat" {
		r.Resource.APIVersion = w.namespace + ".example.org/v1"
	}
	for _, option := range options {
		option(&r)
	}
	return r
}

func optional(r *configv1beta1.TemplateResourceRef) { r.Optional = true }

func (w *world) create(object client.Object) {
	w.Helper()
	object.SetNamespace(w.namespace)
	if err := w.hub.Create(w.Context(), object); err != nil {
		w.Fatal(err)
	}
}

func (w *world) update(object client.Object) {
	w.Helper()
	if err := w.hub.Update(w.Context(), object); err != nil {
		w.Fatal(err)
	}
}

func configMap(name, value string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"value": value}}
}

// TestLoadWatchesContent changes, deletes and creates a ConfigMap: a kind that the hub watches anyway.
func TestLoadWatchesContent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	settings := configMap("settings", "one")
	w.create(settings)
	w.create(configMap("unrelated", "one"))
	if got := w.mustLoad("reader", w.ref("ConfigMap", "settings")); !strings.Contains(got, `"value":"one"`) || strings.Contains(got, "managedFields") {
		t.Errorf("got %s, want the object without managedFields", got)
	}
	unrelated := configMap("unrelated", "two")
	unrelated.Namespace = w.namespace
	w.update(unrelated)
	settings.Data["value"] = "two"
	w.update(settings)
	w.wantChanged("reader")
	if got := w.mustLoad("reader", w.ref("ConfigMap", "settings")); !strings.Contains(got, `"value":"two"`) {
		t.Errorf("after the change: got %s", got)
	}
	if err := w.hub.Delete(t.Context(), settings); err != nil {
		t.Fatal(err)
	}
	w.wantChanged("reader")
	_, err := w.load("reader", w.ref("ConfigMap", "settings"))
	if want := "templateResourceRefs x: ConfigMap " + w.namespace + "/settings does not exist"; !errors.Is(err, source.ErrNotFound) || err.Error() != want {
		t.Errorf("after the deletion: got %v, want %s", err, want)
	}
	loaded, err := w.load("reader", w.ref("ConfigMap", "settings", optional))
	if err != nil || len(loaded.Absent) != 1 || loaded.Absent[0] != "x" {
		t.Errorf("an optional object that does not exist: got %+v, %v", loaded, err)
	}
	w.create(configMap("settings", "three"))
	w.wantChanged("reader")
	if got := w.mustLoad("reader", w.ref("ConfigMap", "settings")); !strings.Contains(got, `"value":"three"`) {
		t.Errorf("after the creation: got %s", got)
	}
}

// TestOneReadForAllSummaries loads an object for many summaries at the same time, and changes it.
func TestOneReadForAllSummaries(t *testing.T) {
	t.Parallel()
	const summaries = 200
	w := newWorld(t)
	settings := configMap("settings", "one")
	w.create(settings)
	var names []string
	var loading sync.WaitGroup
	for i := range summaries {
		name := fmt.Sprintf("reader-%d", i)
		names = append(names, name)
		loading.Go(func() {
			if _, err := w.load(name, w.ref("ConfigMap", "settings")); err != nil {
				t.Error(err)
			}
		})
	}
	loading.Wait()
	if got := w.reads.Load(); got != 1 {
		t.Errorf("%d reads for %d summaries, want 1", got, summaries)
	}
	settings.Data["value"] = "two"
	w.update(settings)
	w.wantAllChanged(names...)
	for _, name := range names {
		if got := w.mustLoad(name, w.ref("ConfigMap", "settings")); !strings.Contains(got, `"value":"two"`) {
			t.Fatalf("%s reads %s", name, got)
		}
	}
	// On a busy machine, events that arrive later than a second after a read cause another one.
	if got := w.reads.Load(); got < 2 || got > 10 {
		t.Errorf("%d reads after one change for %d summaries, want about 2", got, summaries)
	}
}

// TestChangesThatCount refers to one object in three ways. A change reconciles only the summaries to which it is
// relevant, and the others keep their pins.
func TestChangesThatCount(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	definition := w.boats()
	every := w.ref("Boat", "anna")
	withoutStatus := w.ref("Boat", "anna", func(r *configv1beta1.TemplateResourceRef) { r.IgnoreStatusChanges = true })
	crew := w.ref("Boat", "anna", func(r *configv1beta1.TemplateResourceRef) {
		r.WatchFields = []string{".spec.crew", "/metadata/labels/a~1b"}
	})

	if _, err := w.load("every", every); !errors.Is(err, source.ErrNotFound) || !strings.Contains(err.Error(), "the hub has no kind Boat in "+definition.Spec.Group+"/v1") {
		t.Fatalf("before the kind is installed: got %v", err)
	}
	w.install(definition)
	w.wantHealed("every", every, "does not exist")
	anna := w.boat("anna")
	w.create(anna)
	w.create(w.boat("berta"))
	w.wantChanged("every")
	for name, ref := range map[string]configv1beta1.TemplateResourceRef{"every": every, "withoutStatus": withoutStatus, "crew": crew} {
		if got := w.mustLoad(name, ref); !strings.Contains(got, `"crew":1`) {
			t.Errorf("%s: got %s", name, got)
		}
	}

	if err := unstructured.SetNestedField(anna.Object, "at sea", "status", "place"); err != nil {
		t.Fatal(err)
	}
	if err := w.hub.Status().Update(t.Context(), anna); err != nil {
		t.Fatal(err)
	}
	w.wantAllChanged("every")
	if got := w.mustLoad("withoutStatus", withoutStatus); strings.Contains(got, "at sea") {
		t.Errorf("a change of the status: got %s", got)
	}
	if got := w.mustLoad("every", every); !strings.Contains(got, "at sea") {
		t.Errorf("a change of the status that counts: got %s", got)
	}

	w.setSpec(anna, "sails", 2)
	w.wantAllChanged("every", "withoutStatus")
	if got := w.mustLoad("crew", crew); !strings.Contains(got, `"sails":1`) {
		t.Errorf("a change of another field: got %s", got)
	}
	w.setSpec(anna, "crew", 2)
	w.wantAllChanged("every", "withoutStatus", "crew")
	if got := w.mustLoad("crew", crew); !strings.Contains(got, `"sails":2`) {
		t.Errorf("a change of the field: got %s", got)
	}
	anna.SetLabels(map[string]string{"a/b": "c"})
	w.update(anna)
	w.wantAllChanged("every", "withoutStatus", "crew")

	if !w.isWatched(anna) {
		t.Error("the kind is not watched")
	}
	for _, summary := range []string{"every", "withoutStatus", "crew"} {
		w.Forget(types.NamespacedName{Namespace: w.namespace, Name: summary})
	}
	for deadline := time.Now().Add(time.Minute); w.isWatched(anna); {
		if time.Now().After(deadline) {
			t.Fatal("the kind is watched although nobody refers to it")
		}
		<-time.After(10 * time.Millisecond)
	}
}

func (w *world) isWatched(object *unstructured.Unstructured) bool {
	metadata := &metav1.PartialObjectMetadata{}
	metadata.SetGroupVersionKind(object.GroupVersionKind())
	return w.kinds.Get(w.Context(), client.ObjectKeyFromObject(object), metadata) == nil
}

func (w *world) setSpec(object *unstructured.Unstructured, field string, value int64) {
	w.Helper()
	if err := unstructured.SetNestedField(object.Object, value, "spec", field); err != nil {
		w.Fatal(err)
	}
	w.update(object)
}

// wantAllChanged waits until exactly these summaries are to be reconciled, in any order.
func (w *world) wantAllChanged(names ...string) {
	w.Helper()
	remaining := slices.Clone(names)
	for range names {
		select {
		case changed := <-w.Changed:
			at := slices.Index(remaining, changed.Object.GetName())
			if at < 0 {
				w.Fatalf("got a change for %s, want %v", changed.Object.GetName(), names)
			}
			remaining = slices.Delete(remaining, at, at+1)
		case <-time.After(time.Minute):
			w.Fatalf("no change for %v", remaining)
		}
	}
}

// wantHealed reconciles a summary after each change until Load has another error.
func (w *world) wantHealed(summary string, ref configv1beta1.TemplateResourceRef, text string) {
	w.Helper()
	for {
		w.wantChanged(summary)
		if _, err := w.load(summary, ref); err != nil && !strings.Contains(err.Error(), "no kind") {
			if !strings.Contains(err.Error(), text) {
				w.Fatalf("got %v, want %s", err, text)
			}
			return
		}
	}
}

// TestProfilesReadTheirNamespace loads objects for a Profile, which reads its own namespace, and there only Secrets for
// profiles.
func TestProfilesReadTheirNamespace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "kubeconfig"}, StringData: map[string]string{"a": "b"}})
	w.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "content"}, Type: libv1beta1.ProfileSecretType, StringData: map[string]string{"a": "b"}})
	restricted := w.templateContext()
	restricted.RestrictedNamespace = w.namespace
	summary := types.NamespacedName{Namespace: w.namespace, Name: "tenant"}
	for name, test := range map[string]struct {
		ref  configv1beta1.TemplateResourceRef
		want string
	}{
		"another namespace": {
			w.ref("ConfigMap", "kube-root-ca.crt", func(r *configv1beta1.TemplateResourceRef) { r.Resource.Namespace = "default" }),
			"templateResourceRefs x: ConfigMap default/kube-root-ca.crt: a Profile reads its own namespace " + w.namespace + " only",
		},
		"no namespace":       {w.ref("Namespace", "default"), "Namespace default has no namespace: a Profile reads its own namespace"},
		"a Secret of others": {w.ref("Secret", "kubeconfig"), `but a Profile reads only Secrets of type "addons.projectsveltos.io/cluster-profile"`},
	} {
		loaded, err := w.Load(t.Context(), summary, []configv1beta1.TemplateResourceRef{test.ref}, restricted)
		if _, isInvalid := errors.AsType[phase.TerminalError](err); !isInvalid || !strings.Contains(err.Error(), test.want) || len(loaded.Objects) > 0 {
			t.Errorf("%s: got %v, %v, want %s", name, loaded, err, test.want)
		}
	}
	loaded, err := w.Load(t.Context(), summary, []configv1beta1.TemplateResourceRef{w.ref("Secret", "content")}, restricted)
	if err != nil || !loaded.HasSecret || len(loaded.Objects) != 1 {
		t.Errorf("a Secret for profiles: got %v, %v", loaded, err)
	}
	for _, ref := range []configv1beta1.TemplateResourceRef{w.ref("Namespace", "default"), w.ref("Secret", "kubeconfig")} {
		if got := w.mustLoad("administrator", ref); got == "" {
			t.Errorf("%s %s: a ClusterProfile cannot read it", ref.Resource.Kind, ref.Resource.Name)
		}
	}
}
