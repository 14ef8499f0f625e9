package hub_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/source"
)

// createFluxSource is a GitRepository of the test's namespace, and the server of its artifacts.
type fluxSource struct {
	*world
	object    *unstructured.Unstructured
	server    *httptest.Server
	mu        sync.Mutex // guards artifacts
	artifacts map[string][]byte
}

func (w *world) createFluxSource(name string) *fluxSource {
	w.Helper()
	s := &fluxSource{world: w, object: &unstructured.Unstructured{}, artifacts: map[string][]byte{}}
	s.server = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		_, _ = rw.Write(s.artifacts[r.URL.Path])
	}))
	w.Cleanup(s.server.Close)
	s.object.SetGroupVersionKind(source.FluxGroupVersion().WithKind("GitRepository"))
	s.object.SetNamespace(w.ns)
	s.object.SetName(name)
	// The API server serves the kind a moment after the CRD is established.
	w.eventually("create "+name, func() error { return w.Create(w.Context(), s.object) })
	return s
}

// publish sets the artifact to an archive with one ConfigMap.
func (s *fluxSource) publish(revision, text string) {
	s.Helper()
	var archive bytes.Buffer
	zipped := gzip.NewWriter(&archive)
	writer := tar.NewWriter(zipped)
	s.must(writer.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "web/a.yaml", Mode: 0o600, Size: int64(len(text))}))
	_, err := writer.Write([]byte(text))
	s.must(errors.Join(err, writer.Close(), zipped.Close()))
	path := "/" + s.object.GetName() + "/" + revision + ".tar.gz"
	s.mu.Lock()
	s.artifacts[path] = archive.Bytes()
	s.mu.Unlock()
	s.status(func(status map[string]any) {
		status["artifact"] = map[string]any{"url": s.server.URL + path, "revision": revision, "digest": fmt.Sprintf("sha256:%x", sha256.Sum256(archive.Bytes()))}
	})
}

// status changes the status of the object.
func (s *fluxSource) status(change func(map[string]any)) {
	s.Helper()
	before := s.object.DeepCopy()
	status, _, _ := unstructured.NestedMap(s.object.Object, "status")
	if status == nil {
		status = map[string]any{}
	}
	change(status)
	s.object.Object["status"] = status
	s.must(s.Status().Patch(s.Context(), s.object, client.MergeFrom(before)))
}

func (w *world) installFlux() {
	w.Helper()
	group := source.FluxGroupVersion().Group
	crd := &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: "gitrepositories." + group},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: group, Scope: apiextensionsv1.NamespaceScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Kind: "GitRepository", ListKind: "GitRepositoryList", Plural: "gitrepositories", Singular: "gitrepository"},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: source.FluxGroupVersion().Version, Served: true, Storage: true,
				Subresources: &apiextensionsv1.CustomResourceSubresources{Status: &apiextensionsv1.CustomResourceSubresourceStatus{}},
				Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{
					Type: "object", XPreserveUnknownFields: ptr.To(true),
				}},
			}},
		},
	}
	w.create(crd)
}

// TestFluxSources deploys two profiles with a source each: before Flux is installed, without an artifact, with
// revisions, and after the source is deleted.
func TestFluxSources(t *testing.T) {
	w := newWorld(t)
	deliveries := map[string]int{}
	w.set(func(b *fakeTransport) {
		b.answer = func(sent bundle.Bundle, _ *bundle.Report) error { deliveries[sent.Owner.Name]++; return nil }
	})
	delivered := func(profile client.Object) (count int) {
		w.set(func(*fakeTransport) { count = deliveries[profile.GetName()] })
		return count
	}
	w.createReadyMember("one", w.prodLabels())
	from := func(name string) func(*configv1beta1.ProfileSpec) {
		return func(s *configv1beta1.ProfileSpec) {
			s.PolicyRefs = []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceGitRepository, Namespace: w.ns, Name: name, Path: "web"}}
		}
	}
	failed := func(profile client.Object, status libv1beta1.FeatureStatus, message string) {
		t.Helper()
		w.wantFeature(profile, "one", configv1beta1.FeatureSummary{FeatureID: libv1beta1.FeatureResources, Status: status, FailureMessage: message})
	}
	app, other := w.createProfile(from("app")), w.createProfile(from("other"))
	named := "GitRepository " + w.ns + "/app"
	failed(app, libv1beta1.FeatureStatusFailed, named+": the hub has no kind GitRepository of source.toolkit.fluxcd.io/v1; is Flux's source-controller installed?")
	w.installFlux()
	appSource, otherSource := w.createFluxSource("app"), w.createFluxSource("other")
	failed(app, libv1beta1.FeatureStatusFailed, named+" has no artifact: Flux's source-controller has not reported on it")

	appSource.publish("one", manifest("first"))
	w.wantProvisioned(app, "one")
	otherSource.publish("one", manifest("of-the-other"))
	w.wantProvisioned(other, "one")
	appSource.publish("two", manifest("second"))
	both := []string{"ConfigMap default/of-the-other", "ConfigMap default/second"}
	w.eventually("the second revision", func() error { return checkEqual(both, slices.Sorted(slices.Values(w.refs("one", "Resources")))) })

	// Only a change of the artifact reaches the members.
	before := delivered(app)
	appSource.status(func(status map[string]any) {
		status["observedGeneration"] = int64(7)
		status["conditions"] = []any{map[string]any{"type": "Ready", "status": "False", "message": "the server is down"}}
	})
	otherSource.publish("two", manifest("of-the-other"))
	otherSource.publish("three", manifest("of-the-other-again"))
	both[0] = "ConfigMap default/of-the-other-again"
	w.eventually("the third revision of the other source", func() error { return checkEqual(both, slices.Sorted(slices.Values(w.refs("one", "Resources")))) })
	if got := delivered(app); got != before {
		t.Errorf("a change of conditions delivered %d times", got-before)
	}

	appSource.publish("three", "kind: [broken\n")
	w.eventually("the broken revision", func() error {
		summary, err := w.getSummary(app, "one")
		if err != nil {
			return err
		}
		return wantFailure(summary, named, "web/a.yaml")
	})
	w.must(w.Delete(t.Context(), appSource.object))
	failed(app, libv1beta1.FeatureStatusFailed, named+" does not exist")
	if err := checkEqual(both, slices.Sorted(slices.Values(w.refs("one", "Resources")))); err != nil {
		t.Errorf("after the deletion: %v", err)
	}
	if len(w.withdrawals()) > 0 {
		t.Errorf("withdrawn: %+v", w.withdrawals())
	}
}

// wantFailure returns an error unless a feature of the summary has a message with all texts.
func wantFailure(summary *configv1beta1.ClusterSummary, texts ...string) error {
	for _, feature := range summary.Status.FeatureSummaries {
		if !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(feature.FailureMessage, text) }) {
			return nil
		}
	}
	return fmt.Errorf("features are %+v, want a message with %q", summary.Status.FeatureSummaries, texts)
}
